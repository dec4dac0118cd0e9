"""The defaults of attention's forward of family ``sm90``, against races of an H200."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import log2
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_forward_sm90 import plans, streams
from attention_autotuner.kernels.attention_forward_sm90.plans import Plan, times_of
from attention_autotuner.serving.pinning import pinned
from benchmarks.default_races import (
    Race,
    default_of,
    fit,
    main,
    read_races,
    regrets,
)

RESULTS = Path("benchmarks/results/nvidia-h200")
RACES = RESULTS / "forward_plans.json.xz"
WIDE_HEADS = RESULTS / "forward_plans_wide_heads.json.xz"
POLICY = resolve("H200")
EACH = 3  # of so many races one is looked at


@pytest.fixture(scope="module")
def races(repository: Path) -> tuple[Race, ...]:
    return read_races(repository / RACES)


def ratios(races: tuple[Race, ...], choose: Callable[[Problem], str]) -> list[float]:
    return [ratio for _, ratio in regrets(races[::EACH], choose)]


def test_defaults_are_near_the_fastest_kernel_of_every_race(races: tuple[Race, ...]) -> None:
    of_defaults = ratios(races, default_of(POLICY))
    assert len(of_defaults) > 300
    assert geometric_mean(of_defaults) < 1.011
    assert max(of_defaults) < 1.16
    # By the lengths of buckets they would not be.
    by_buckets = ratios(races, lambda problem: POLICY.default(problem.bucketed()).knobs.label)
    assert geometric_mean(by_buckets) > 1.025


def test_head_dims_between_128_and_256_have_plans_of_their_own(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raced = read_races(repository / WIDE_HEADS)
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    said = re.search(
        rf"{WIDE_HEADS.name}`, (\d+) shapes.*? (1\.\d+) times .*? (1\.\d+) at worst.*? "
        r"(1\.\d+) now, (1\.\d+) at worst",
        log.replace("\n", " "),
    )
    assert said is not None

    def chosen() -> list[float]:
        of_default = [ratio for _, ratio in regrets(raced, default_of(POLICY))]
        assert len(of_default) == len(raced) == int(said[1])
        return [geometric_mean(of_default), max(of_default)]

    now = chosen()
    dims = {(race.problem.padded_dim_qk, race.problem.padded_dim_v) for race in raced}
    for table in (plans, streams):  # as it was before either had rows of these head dims
        others = [row for row in table.PLANS if row[0] not in dims]
        monkeypatch.setattr(table, "PLANS", tuple(others))
    figures = [float(said[group]) for group in range(2, 6)]
    assert [*chosen(), *now] == pytest.approx(figures, abs=6e-3)


def test_the_log_says_what_the_races_say(races: tuple[Race, ...], repository: Path) -> None:
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"\| (1\.\d+) over all, 1\.\d+ over \d+ shapes at powers of two", log)
    assert float(said) == pytest.approx(geometric_mean(ratios(races, default_of(POLICY))), abs=3e-3)
    assert f"Races of {len(races)} shapes" in log
    of_64 = [race for race in races if race.problem.dim_qk == 64 and not race.problem.causal]
    for batch, heads, seqlen in ((8, 12, 577), (32, 16, 257), (64, 12, 257)):
        size = (batch, heads, seqlen)
        race = next(
            r for r in of_64 if (r.problem.batch, r.problem.heads_q, r.problem.seqlen_q) == size
        )
        us = min(race.us.values()) * next(ratio for _, ratio in regrets([race], default_of(POLICY)))
        assert re.search(rf"are {us:.1f} at {batch} x {heads} x {seqlen}\b", log)


def test_claims_cost_what_they_have_cost_since_calls_begin_early(
    races: tuple[Race, ...], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the races a copy of zeros was ahead of claimed tiles; where a time is under 50 us, in a CUDA graph."""
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    said = re.search(r"they take (1\.\d+) times the time of the fastest for (1\.\d+), and 66", log)
    assert said is not None
    gained = tuple(
        replace(
            race,
            us={
                label: us - (1.1 if us < 50.0 else 0.5) * label.endswith("dynamic")
                for label, us in race.us.items()
            },
        )
        for race in races
    )
    now = geometric_mean(ratios(gained, default_of(POLICY)))
    monkeypatch.setattr(plans, "CLAIMS_US", 2.5)
    before = geometric_mean(ratios(gained, default_of(POLICY)))
    assert now < before
    assert [now, before] == pytest.approx([float(number) for number in said.groups()], abs=2e-3)


def test_costs_of_tiles_are_found_again_from_times_that_have_them() -> None:
    raced = []
    for seqlen in (256, 512, 1024, 2048):
        # As the formula has it: 16 heads of so many tiles, each of as many steps, by 132 SMs.
        steps = seqlen // 64
        us = 3.2 + -(-16 * steps // 132) * (1.5 + 0.25 * steps)
        problem = Problem(batch=1, seqlen_q=seqlen, seqlen_k=seqlen)
        raced.append(Race(problem=problem, us={"g1n64_overlap_optimistic_free_static": us}))
    begun = Plan(warpgroups=1, mainloop="overlap", block_n=64, costs=((1.0, 1.0), (1.0, 1.0)))
    assert fit(raced, begun, causal=False, sms=132) == pytest.approx((1.5, 0.25), rel=0.01)


@pytest.mark.parametrize(
    ("batch", "heads_kv", "seqlen", "sms"),
    [(3, 5, 700, 31), (1, 9, 2000, 132), (3, 5, 8192, 300), (3, 5, 8192, 132)],
)
def test_shares_are_those_of_the_list_of_tiles(
    batch: int, heads_kv: int, seqlen: int, sms: int
) -> None:
    """The list of ``work_list`` in entry.cuh: section by section, row blocks from the last, heads innermost."""
    group, rows = 2, 128
    heads = batch * heads_kv * group
    problem = Problem(
        causal=True,
        batch=batch,
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
    )
    blocks = -(-seqlen // rows)
    head_bytes = 2 * seqlen * (128 + 128)
    section = min(2 ** round(log2(max(1, 32e6 / head_bytes))), batch * heads_kv) * group
    listed = [
        rank
        for begun in range(0, heads, section)
        for rank in range(blocks)
        for _ in range(min(section, heads - begun))
    ]
    plan = Plan(warpgroups=2, mainloop="overlap", block_n=64, costs=((9.0, 9.0), (1.5, 0.5)))
    steps = [-(-min((blocks - rank) * rows, seqlen) // 64) for rank in range(blocks)]
    shares = [sum(1.5 + 0.5 * steps[rank] for rank in listed[sm::sms]) for sm in range(sms)]
    few = len(listed) <= 8 * sms
    assert (times_of(problem, plan, sms)["static"] == pytest.approx(max(shares))) == few


@pytest.mark.parametrize(
    "modified",
    [
        {"window_size": (128, 0)},
        {"modifications": ("softcap",)},
        {"documents": 3, "modifications": ("document_ids",)},
    ],
)
def test_wider_values_than_any_row_takes_go_to_the_other_family(modified: dict[str, Any]) -> None:
    problem = Problem(dim_qk=128, dim_v=512, seqlen_q=1024, seqlen_k=1024, **modified)
    assert POLICY.default(problem).family == "sm80"


@pytest.mark.parametrize("seqlen_q", [65, 130, 200])
def test_what_serves_untuned_can_be_pinned(seqlen_q: int) -> None:
    """Counts of splits go by the lengths, so that those of the bucket are others."""
    problem = Problem(
        batch=1,
        heads_q=2,
        heads_kv=2,
        seqlen_q=seqlen_q,
        seqlen_k=3000,
        dim_qk=64,
        dim_v=64,
        causal=True,
    )
    default = POLICY.default(problem.rounded())
    assert pinned(problem, POLICY, [default.name]) == default
    of_bucket = POLICY.legal(problem.bucketed())[0]
    assert pinned(problem, POLICY, [of_bucket.name]) == of_bucket


def test_the_command_prints_what_defaults_cost(
    races: tuple[Race, ...],
    repository: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.default_races.read_races", lambda path: races[:24])
    assert main([str(repository / RACES), "--no-fit"]) == 0
    of_64 = [race for race in races[:24] if race.problem.dim_qk == 64 and race.problem.causal]
    expected = [ratio for _, ratio in regrets(of_64, default_of(POLICY))]
    line = f"(64, 64) causal: {geometric_mean(expected):.3f}, at most {max(expected):.2f}, of {len(expected)} shapes"
    assert line in capsys.readouterr().out
