"""The defaults of attention's forward of family ``sm90`` whose CTAs share keys, against races of an H200."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import replace
from math import log, sqrt
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.problem import NO_WINDOW, Problem
from attention_autotuner.kernels.attention_forward_sm90 import space, streams
from attention_autotuner.kernels.attention_forward_sm90.knobs import (
    WARPGROUP_ROWS,
    AttentionForwardSm90Knobs,
    knobs_of,
)
from attention_autotuner.kernels.cost_model import estimate
from attention_autotuner.kernels.shared.split_kv import rows_of_group
from benchmarks.default_races import Race, default_of, main, read_races, regrets, without_stages
from tests.result_files import result

RESULTS = Path("benchmarks/results/nvidia-h200")
POLICY = resolve("H200")
CHUNK = Problem(
    dtype="bf16", batch=1, heads_q=4, heads_kv=1, seqlen_q=512, seqlen_k=32768, causal=True
)


@pytest.fixture(scope="module")
def races(repository: Path) -> tuple[Race, ...]:
    return read_races(repository / RESULTS / "forward_splits.json.xz")


@pytest.fixture(scope="module")
def tall_races(repository: Path) -> tuple[Race, ...]:
    return read_races(repository / RESULTS / "forward_splits_tall.json.xz")


def test_defaults_are_near_the_fastest_kernel_of_every_race(
    races: tuple[Race, ...], tall_races: tuple[Race, ...], repository: Path
) -> None:
    choose = default_of(POLICY)
    known = [race for race in races if not is_tall(choose(race.problem))]
    ratios = [ratio for _, ratio in regrets(known, choose)]
    assert len(ratios) > 0.8 * len(known)  # of others the very number of splits was not raced
    assert len(known) > 300
    assert geometric_mean(ratios) < 1.015
    assert max(ratios) < 1.3
    tall = [ratio for _, ratio in regrets(tall_races, choose)]
    assert len(tall) > 0.7 * len(tall_races)
    assert geometric_mean(tall) < 1.01
    assert max(tall) < 1.1
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    (said, most) = re.findall(r"that share keys take (1\.\d+) times .* (1\.\d+) at most", log)[0]
    assert float(said) == pytest.approx(geometric_mean(ratios), abs=2e-3)
    assert float(most) == pytest.approx(max(ratios), abs=0.05)
    assert f"{len(races)} shapes of few tiles" in log
    words = f"{len(tall_races)} shapes, where the default takes {geometric_mean(tall):.3f}"
    assert f"{words} times the time of the fastest, {max(tall):.2f} at most" in log


def test_uneven_tiles_that_share_keys_are_claimed(repository: Path) -> None:
    races = read_races(repository / RESULTS / "forward_splits_claimed.json.xz")
    choose = default_of(POLICY)
    ratios = {race.problem: ratio for race, ratio in regrets(races, choose)}
    assert len(ratios) == len(races) > 30
    mean, most = geometric_mean(ratios.values()), max(ratios.values())
    assert mean < 1.01
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    assert f"Of {len(races)} such shapes the default takes {mean:.3f} times" in log
    assert f"of the fastest, {most:.2f} at most" in log
    claimed = [race for race in races if re.search("dynamic_split", choose(race.problem))]
    gains = []
    for race in claimed:
        others = [us for label, us in race.us.items() if not re.search("dynamic.*_split", label)]
        gains.append(min(others) / min(race.us.values()))
    assert f"{min(gains):.2f} to {max(gains):.2f} in the {len(claimed)} where the default" in log
    us = next(x for x in races if x.problem.describe().endswith("b1 h1 s16384 d128 causal")).us
    kinds = ("dynamic.*_split", "static.*_split", "dynamic$")
    least = [min(t for label, t in us.items() if re.search(kind, label)) for kind in kinds]
    said = "one head of 16384 tokens takes {:.0f} us in place of {:.0f}, or {:.0f} without splits"
    assert said.format(*least) in log


def is_tall(label: str) -> bool:
    """True for labels of kernels that share keys and have more than two warpgroups."""
    return "split" in label and int(label[1]) > 2


def test_the_log_says_what_tall_tiles_save(tall_races: tuple[Race, ...], repository: Path) -> None:
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    saved: dict[tuple[int, int], list[float]] = {}
    for race in tall_races:
        low = min(us for label, us in race.us.items() if "_overlap_" in label)
        dims = (race.problem.padded_dim_qk, race.problem.padded_dim_v)
        saved.setdefault(dims, []).append(min(race.us.values()) / low)
    cells = re.findall(r"\| the time over that of two warpgroups at most \|(.*)\|", log)[0].split(
        "|"
    )
    columns = [(dim, dim) for dim in (32, 64, 80, 96, 112, 128)]
    columns += [(192, 128), (160, 160), (256, 256)]
    figures = [geometric_mean(saved[dims]) for dims in columns]
    assert [float(cell) for cell in cells] == pytest.approx(figures, abs=0.006)
    assert f"At best {min(saved[64, 64]):.2f} at d64 and {min(saved[128, 128]):.2f} at d128" in log
    assert f"{sum(len(race.us) for race in tall_races)} times of {len(tall_races)} shapes" in log


def alone(race: Race) -> float:
    """The time of the fastest kernel that shares nothing."""
    return min(us for label, us in race.us.items() if "split" not in label)


def test_the_log_says_what_sharing_keys_saves(races: tuple[Race, ...], repository: Path) -> None:
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    for size, words in (
        ("b1 h4/1 s512x32768", "62 us for 272 with 512 queries of 4 heads on 32k keys"),
        ("b1 h4/1 s128x32768", "21 for 271 with 128"),
        ("b1 h1 s2048x32768", "64 for 272 with 2048 of one head"),
    ):
        race = next(r for r in races if r.problem.describe().endswith(f" {size} d128 causal"))
        took = [f"{min(race.us.values()):.0f}", f"{alone(race):.0f}"]
        assert took == re.findall(r"\d+", words)[:2]
        assert words in log
    many = [race for race in races if race.problem.seqlen_q >= 64]
    ratios = [alone(race) / min(race.us.values()) for race in many]
    assert f"{geometric_mean(ratios):.2f} times that of the fastest" in log


def test_the_log_says_what_combining_by_several_warps_saves(repository: Path) -> None:
    runs = result("kernel_log_races")
    races = runs["attention_forward_split_combine"]["races"]
    of_splits: dict[str, list[float]] = {"33": [], "17": [], "9": [], "2": [], "none": []}
    for race in races:
        if int(re.findall(r" s(\d+)", race["shape"])[0]) >= 128:
            continue
        for label, (before, now) in race["us"].items():
            splits = int((re.findall(r"split(\d+)", label) or ["0"])[0])
            least = next((n for n in ("33", "17", "9", "2") if splits >= int(n)), "none")
            of_splits[least].append(now / before)
    means = {least: geometric_mean(ratios) for least, ratios in of_splits.items()}
    assert means["none"] == pytest.approx(1, abs=0.02)  # the two runs are alike
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    words = [f"{means[least]:.2f}" for least in ("2", "9", "17", "33")]
    assert f"{words[0]} with 2 to 8 splits, {words[1]} with 9 to 16, {words[2]} up to 32" in log
    assert f"{words[3]} beyond" in log
    (race,) = (race for race in races if race["shape"].startswith("b1 h1 s64x19444"))
    few, many = (
        round(race["us"][f"g1n{block}_overlap_optimistic_free_static_split{splits}"][0])
        for block, splits in ((128, 36), (64, 152))
    )
    assert f"on 19k keys took {many} us with 152 splits and {few} with 36" in log


def kernels_with_costs(
    problem: Problem, known: dict[Hashable, dict[int, AttentionForwardSm90Knobs]]
) -> dict[int, AttentionForwardSm90Knobs]:
    """By warpgroups, the kernels that share keys and have costs: the same for all problems that a key stands for."""
    rows = min(rows_of_group(problem), 5 * WARPGROUP_ROWS)
    key = (
        problem.dim_qk,
        problem.dim_v,
        problem.heads_q > problem.heads_kv,
        -rows // WARPGROUP_ROWS,
    )
    if key not in known:
        known[key] = {
            point.warpgroups: replace(point, splits=1)
            for point in space.points(problem, POLICY.spec)
            if not isinstance(point, Rejection)
            if point.split_kv and streams.plan_of(point, problem) is not None
        }
    return known[key]


def errors_of(races: tuple[Race, ...], warpgroups: tuple[int, ...]) -> list[float]:
    """Logarithms of the formula's times over those of races without modifications."""
    errors: list[float] = []
    known: dict[Hashable, dict[int, AttentionForwardSm90Knobs]] = {}
    for race in races:
        problem = race.problem
        if problem.modifications or problem.window_size != NO_WINDOW:
            continue
        if not streams.may_share(problem, POLICY.spec):
            continue
        for count, kernel in kernels_with_costs(problem, known).items():
            if count not in warpgroups:
                continue
            for us, splits in streams.times_of(problem, kernel, POLICY.spec):
                label = without_stages(replace(kernel, splits=splits).label)
                if label in race.us:
                    errors.append(log(us / race.us[label]))
    return errors


def test_the_formula_meets_the_races(
    races: tuple[Race, ...], tall_races: tuple[Race, ...], repository: Path
) -> None:
    text = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    errors = errors_of(races, (1, 2))
    assert len(errors) == pytest.approx(2800, abs=20)
    assert sqrt(fmean(error**2 for error in errors)) == pytest.approx(0.06, abs=0.005)
    said = f"root mean square 6 % over {round(len(errors), -2)} times without modifications"
    assert said in text
    tall = errors_of(tall_races, (3, 4))
    assert sqrt(fmean(error**2 for error in tall)) == pytest.approx(0.04, abs=0.005)
    assert f"root mean square 4 % over {len(tall)} times of these" in text


def test_the_cost_model_ranks_tall_tiles(tall_races: tuple[Race, ...], repository: Path) -> None:
    ratios = []
    known: dict[Hashable, dict[int, AttentionForwardSm90Knobs]] = {}
    for race in tall_races:
        estimates = {}
        for kernel in kernels_with_costs(race.problem, known).values():
            for splits in range(1, 40):
                knobs = replace(kernel, splits=splits)
                label = without_stages(knobs.label)
                if label in race.us:
                    candidate = Candidate.of(race.problem, knobs)
                    estimates[label] = estimate(race.problem, candidate, POLICY.spec).us
        if estimates:
            first = min(estimates, key=lambda label: estimates[label])
            ratios.append(race.us[first] / min(race.us.values()))
    said = f"the cost model's first takes {geometric_mean(ratios):.3f}"
    assert said in (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    assert max(ratios) < 1.25


def test_costs_hold_for_all_head_dims() -> None:
    for dims in ((8, 8), (40, 40), (72, 72), (104, 104), (136, 64), (64, 200), (248, 256)):
        problem = replace(CHUNK, dim_qk=dims[0], dim_v=dims[1])
        knobs = knobs_of(POLICY.default(problem))
        assert knobs.split_kv, dims
        assert 1 < knobs.splits <= 32
        us, splits = streams.timed(problem, knobs, POLICY.spec)
        assert splits == knobs.splits
        assert 20 < us < 120


def test_more_keys_take_as_many_splits_or_more() -> None:
    splits = [
        knobs_of(POLICY.default(replace(CHUNK, seqlen_q=64, seqlen_k=keys))).splits
        for keys in (1024, 4096, 16384, 65536)
    ]
    assert splits == sorted(splits)
    assert splits[0] > 1


@pytest.mark.parametrize(
    "changes", [{"batch": 40}, {"heads_q": 132, "heads_kv": 132}, {"packed_rows": (512, 32768)}]
)
def test_tiles_that_fill_the_gpu_share_nothing(changes: dict[str, Any]) -> None:
    assert not knobs_of(POLICY.default(replace(CHUNK, **changes))).split_kv


def test_the_program_prints_the_regret(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(repository / RESULTS / "forward_splits.json.xz"), "--no-fit"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("(128, 128) causal: 1.0") for line in printed)


def test_few_tiles_of_retnet_are_as_the_log_says(repository: Path) -> None:
    races = read_races(repository / RESULTS / "retnet_forward_defaults.json.xz")
    ratios = [ratio for _, ratio in regrets(races, default_of(POLICY))]
    assert len(ratios) > 0.9 * len(races)
    assert geometric_mean(ratios) < 1.02
    assert max(ratios) < 1.2
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    race = next(r for r in races if r.problem.describe().endswith("b1 h3 s179 d64 causal explicit"))
    claimed = "g3n128_serial_exact_turns_q2k2v2_m2v1_oq_dynamic"
    assert f"{race.us[claimed]:.1f} us with three heads of 179 tokens" in log
    assert f"no claims take {min(race.us.values()):.1f}." in log


def test_the_list_decides_about_uneven_tiles(repository: Path) -> None:
    runs = result("kernel_log_races")
    us = runs["attention_forward_uneven_splits"]["us"]
    said = f"two splits took {us['pick']:.0f} us where flash-attn 4 takes "
    said += f"{us['flash_attn_4 forward']:.0f}"
    assert said in (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    uneven = replace(CHUNK, seqlen_q=4096, seqlen_k=4096)
    assert not knobs_of(POLICY.default(uneven)).split_kv
    rows = result("small_batches")["rows"]
    row = next(x for x in rows if x["key"] == "llama3_8b_8_ranks_4k forward fp16")
    entries = row["entries"]
    said = f"In one they take {entries['pick']['median_us']:.0f} (`small_batches.json`)"
    assert said in (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    assert entries["pick"]["median_us"] < 0.85 * entries["flash_attn_4 forward"]["median_us"]
    tall = knobs_of(POLICY.default(CHUNK))
    knobs = replace(tall, warpgroups=2, mainloop="overlap", ping_pong=False, splits=2)
    assert streams.timed(uneven, knobs, POLICY.spec)[0] > 0.9 * us["pick"]
