"""The defaults of attention's backward of family ``sm90``, against races of an H200."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_backward_sm90 import suitability
from attention_autotuner.kernels.attention_backward_sm90.knobs import knobs_of
from attention_autotuner.kernels.attention_backward_sm90.resources import has_tail, shapes
from attention_autotuner.kernels.cost_model import estimate
from attention_autotuner.kernels.shared.engine import AuxiliaryWork, in_sequence
from attention_autotuner.kernels.shared.estimates import Estimate
from benchmarks.default_races import Race, default_of, main, read_races, regrets
from tests.result_files import result

RACES = Path("benchmarks/results/nvidia-h200/backward_defaults.json.xz")
FEW = Path("benchmarks/results/nvidia-h200/backward_few_blocks.json.xz")
TAILS = Path("benchmarks/results/nvidia-h200/backward_tails.json.xz")
POLICY = resolve("H200")
BACKWARD = Problem(direction="backward", dtype="bf16", batch=1, causal=True)


@pytest.fixture(scope="module")
def every(repository: Path) -> tuple[Race, ...]:
    """Races of few and of many blocks, from before the conversion of dQ was changed."""
    return read_races(repository / RACES)


def is_tailed(race: Race) -> bool:
    """True where the default's list has a tail, so that races from before it say nothing of it."""
    return race.problem.causal and has_tail(shapes(POLICY.default(race.problem.rounded()))[0])


@pytest.fixture(scope="module")
def races(every: tuple[Race, ...]) -> tuple[Race, ...]:
    """Races of many blocks, of whose time the conversion is little, but those of lists with a tail."""
    few = (suitability.has_few_blocks(race.problem, POLICY.spec) for race in every)
    many = (race for race, is_few in zip(every, few, strict=True) if not is_few)
    return tuple(race for race in many if not is_tailed(race))


@pytest.fixture(scope="module")
def few(repository: Path) -> tuple[Race, ...]:
    """Races of few blocks, and of changed scores."""
    return read_races(repository / FEW)


@pytest.fixture(scope="module")
def of_few(few: tuple[Race, ...]) -> tuple[Race, ...]:
    """The same but those of lists with a tail."""
    return tuple(race for race in few if not is_tailed(race))


@pytest.fixture(scope="module")
def ratios_of_tails(repository: Path) -> list[float]:
    """The time of the default over that of the fastest kernel, of causal shapes raced with a tail."""
    return [ratio for _, ratio in regrets(read_races(repository / TAILS), default_of(POLICY))]


@pytest.fixture(scope="module")
def ratios(races: tuple[Race, ...]) -> list[float]:
    """The time of the default over that of the fastest kernel, of every race of many blocks."""
    return [ratio for _, ratio in regrets(races, default_of(POLICY))]


@pytest.fixture(scope="module")
def ratios_of_few(of_few: tuple[Race, ...]) -> list[float]:
    """The same of few blocks, and of changed scores."""
    return [ratio for _, ratio in regrets(of_few, default_of(POLICY))]


def shaped(dim: int, heads: int, tokens: int, **options: Any) -> Problem:
    sizes = {"heads_q": heads, "heads_kv": heads, "seqlen_q": tokens, "seqlen_k": tokens}
    return replace(BACKWARD, **{**sizes, "dim_qk": dim, "dim_v": dim, **options})


def test_defaults_are_near_the_fastest_kernel_of_every_race(
    every: tuple[Race, ...],
    races: tuple[Race, ...],
    of_few: tuple[Race, ...],
    ratios: list[float],
    ratios_of_few: list[float],
    ratios_of_tails: list[float],
) -> None:
    assert len(ratios) == len(races) > 150
    assert max(ratios) < 1.2
    assert len(ratios_of_few) == len(of_few) > 240
    assert max(ratios_of_few) < 1.25
    assert len(ratios_of_tails) > 190
    assert max(ratios_of_tails) < 1.32
    assert geometric_mean([*ratios, *ratios_of_few, *ratios_of_tails]) < 1.009
    by_buckets = regrets(every, lambda problem: POLICY.default(problem.bucketed()).knobs.label)
    assert geometric_mean(ratio for _, ratio in by_buckets) > 1.012


def test_the_log_says_what_the_races_say(
    every: tuple[Race, ...],
    few: tuple[Race, ...],
    ratios: list[float],
    ratios_of_few: list[float],
    ratios_of_tails: list[float],
    repository: Path,
) -> None:
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    assert (
        f"defaults take {geometric_mean(ratios_of_few):.3f} times that of the fastest kernel of {len(ratios_of_few)} "
        f"such shapes, {max(ratios_of_few):.2f} at worst" in log
    )
    assert f"and {geometric_mean(ratios):.3f} of {len(ratios)} with more blocks" in log
    assert f"take {geometric_mean(ratios_of_tails):.3f} times, {max(ratios_of_tails):.2f}" in log
    assert f"{len(every)} shapes of the backward" in log
    before, now = "fused_keys_g2c64a3x2_keys2bulk", "fused"
    for raced, shape, fused, words in (
        (every, "b1 h16 s1024 d128 causal", before, "41 us for 61 at 1 x 16 x 1024"),
        (every, "b8 h8 s214 d128 causal", before, "22 for 35 at 8 x 8 x 214"),
        (few, "b2 h8 s1008 d128 causal sinks", now, "42 us for 52 at 2 x 8 x 1008 with sinks"),
        (few, "b7 h2 s512 d128 causal softcap", now, "24 for 30 at 7 x 2 x 512 with a softcap"),
    ):
        times = next(race.us for race in raced if race.problem.describe().endswith(f" {shape}"))
        by_passes = [
            min(us for label, us in times.items() if label.startswith(word))
            for word in ("two_pass", fused)
        ]
        assert [f"{us:.0f}" for us in by_passes] == re.findall(r"\d+", words)[:2]
        assert words in log


def test_the_log_says_how_long_conversions_take(repository: Path) -> None:
    runs = result("kernel_log_races")
    run = runs["attention_backward_dq_conversion"]

    def after_the_last_share(way: str) -> str:
        times = run["ns"][way]  # least, median and greatest over CTAs
        return f"{(times['conversion ends'][2] - times['head complete'][1]) / 1000:.1f}"

    before, ahead, lie = (run["step_us"][way] for way in ("before", "loads ahead", "as they lie"))
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    assert f"the conversion of dQ {after_the_last_share('before')} after the last" in log
    assert (
        f"conversion {after_the_last_share('loads ahead')} us after the wait in place of "
        f"{after_the_last_share('before')}, a step {ahead:.1f} for {before:.1f}" in log
    )
    assert f"{after_the_last_share('as they lie')} us, {lie:.1f}. Default" in log
    ratios = [
        min(us for label, us in race["us"].items() if label.startswith("two_pass"))
        / min(us for label, us in race["us"].items() if label.startswith("fused"))
        for race in runs["attention_backward_packed_passes"]["races"]
    ]
    assert f"{min(ratios):.2f} to {max(ratios):.2f}: their blocks are listed twice" in log


def test_the_log_says_when_changed_scores_gain_by_claims(repository: Path) -> None:
    runs = result("kernel_log_races")
    ratios = []
    for race in runs["attention_backward_changed_claims"]["races"]:
        if race["shape"].split()[2] not in ("s4096", "s8192") or "causal" not in race["shape"]:
            continue
        of_claims = {
            claims: [us for label, us in race["us"].items() if ("dynamic" in label) is claims]
            for claims in (True, False)
        }
        ratios.append(min(of_claims[False]) / min(of_claims[True]))
    said = f"with eight {min(ratios):.2f} to {max(ratios):.2f} without claims"
    assert said in (repository / "docs/kernel_log.md").read_text(encoding="utf-8")


def test_the_log_says_what_tails_gain(repository: Path) -> None:
    run = result("kernel_log_races")["attention_backward_tails"]
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")

    def times(shape: str) -> dict[str, float]:
        wanted = shape.replace(", ", " ").split()
        name = "b{} h{} s{} {} causal".format(*(word for word in wanted if word != "x"))
        race = next(race for race in run["races"] if race["shape"] == name)
        return {label: float(us) for label, us in race["us"].items()}

    ways = ["no tail, 17 lists", *(f"{n} wave{'s' * (n > 1)}, 17 lists" for n in (1, 2, 3))]
    tables = re.findall(r"^\| (\d+ x \S+ x \d+, d\d+) ((?:\| \d+ ){4})\|$", log, re.MULTILINE)
    assert len(tables) >= 6
    for shape, columns in tables:
        assert columns.strip(" |") == " | ".join(f"{times(shape)[way]:.0f}" for way in ways)

    def ratio(shape: str, way: str) -> str:
        return f"{times(shape)[way] / times(shape)[ways[0]]:.2f}"

    gains = [ratio(shape, ways[2]) for shape in ("1 x 8 x 4096, d128", "2 x 16 x 1024, d128")]
    assert "{} of the time at 1 x 8 x 4096, d128, {} at 2 x 16 x 1024".format(*gains) in log
    short = [ratio("8 x 32/8 x 1024, d128", way) for way in ways[2:]]
    assert "takes {} of the time with two blocks an SM, {} with three".format(*short) in log
    for shape, fewer, before, words in (
        ("1 x 32/8 x 8192", "2 waves, 8 lists", ways[2], "takes {} us for {}"),
        ("2 x 28/4 x 4096", "2 waves, 8 lists", ways[2], "{} for {}"),
        ("1 x 16/2 x 8192", "3 waves, 4 lists", "3 waves, 8 lists", "takes {} for {}"),
        (
            "1 x 32/4 x 8192",
            "3 waves, 4 lists",
            "3 waves, 8 lists",
            "takes {} in four lists, {} in eight",
        ),
    ):
        us = times(f"{shape}, d128")
        assert f"{shape} {words.format(f'{us[fewer]:.0f}', f'{us[before]:.0f}')}" in log

    def fastest(race: dict[str, Any], when: str) -> float:
        return min(us for label, us in race["us"].items() if label.startswith(when))

    kinds: dict[str, list[float]] = {}
    for race in run["beside"]:
        kind = "d64" if "d64" in race["shape"] else "groups" if "/" in race["shape"] else "none"
        kinds.setdefault(kind, []).append(fastest(race, "now") / fastest(race, "before"))
    groups, none, narrow = (kinds[kind] for kind in ("groups", "none", "d64"))
    of = "{:.2f} to {:.2f}"
    assert (
        f"takes {geometric_mean(groups):.2f} of the time of the fastest before with groups at d128 ({len(groups)} "
        f"shapes, {of.format(min(groups), max(groups))}), {geometric_mean(none):.2f} without ({len(none)}, "
        f"{of.format(min(none), max(none))}), {geometric_mean(narrow):.2f} at d64 ({len(narrow)}, "
        f"{of.format(min(narrow), max(narrow))}" in log
    )


def test_the_log_says_what_small_batches_are(repository: Path) -> None:
    rows = result("small_batches")["rows"]
    ratios = {
        (row["case"], peer.split()[0]): against["ratio"]
        for row in rows
        if row["modes"] == ["backward"]
        for peer, against in row["ratios"].items()
        if peer.startswith(("flash_attn_4", "sdpa_cudnn"))
    }
    log = (repository / "docs/kernel_log.md").read_text(encoding="utf-8")
    of_ranks = sorted(ratio for (case, _), ratio in ratios.items() if case.startswith("llama"))
    assert f"{of_ranks[0]:.2f} to {of_ranks[-1]:.2f} of flash-attn 4 and cuDNN for one rank" in log
    image = sorted(ratio for (case, _), ratio in ratios.items() if case.startswith("sdxl"))
    assert f"{image[0]:.2f} to {image[-1]:.2f} for an image" in log
    assert f"{ratios['bert_large_2x512', 'flash_attn_4']:.2f} of flash-attn 4 with two" in log
    step = next(row for row in rows if row["key"].startswith("bert_large_2x512 step"))
    assert f"a step of these has {step['ratios']['flash_attn_4 step']['ratio']:.2f}." in log


@pytest.mark.parametrize(
    ("problem", "two"),
    [
        (shaped(128, 16, 1024), True),
        (shaped(128, 24, 1024), True),
        (shaped(128, 16, 2048), False),
        (shaped(128, 16, 512, causal=False), True),
        (shaped(128, 32, 512, causal=False), True),
        (shaped(128, 4, 4096, causal=False), False),
        (shaped(128, 24, 1024, causal=False), True),  # the second wave is nearly empty
        (shaped(128, 16, 2048, causal=False), False),
        (shaped(64, 16, 1024), True),
        (shaped(64, 24, 1024), False),
        (shaped(64, 16, 512, causal=False), True),
        (shaped(64, 16, 1024, causal=False), False),
        (shaped(64, 16, 1024, modifications=("softcap",)), True),
        (shaped(64, 16, 1024, modifications=("softcap",), window_size=(255, -1)), False),
        (shaped(128, 16, 1024, modifications=("sinks",), window_size=(255, -1)), False),
        (shaped(128, 24, 1024, modifications=("bias_table",)), False),
        (shaped(128, 16, 1024, modifications=("attn_mask",)), False),
        (shaped(128, 8, 1024, modifications=("attn_mask",)), True),
        (shaped(128, 16, 1024, window_size=(255, -1)), True),
        (shaped(128, 16, 1024, causal=False, window_size=(255, 255)), False),  # not raced
        (shaped(128, 16, 1024, modifications=("sinks",)), True),
        (shaped(128, 16, 1024, deterministic=True), True),
        # A CTA of the pass over queries takes all keys one after the other.
        (shaped(128, 1, 256, seqlen_k=8192), False),
        (shaped(64, 8, 512, seqlen_k=2048), False),
        (shaped(128, 1, 256, seqlen_k=8192, causal=False), False),
        (shaped(128, 16, 512, seqlen_k=1024), True),
        (shaped(128, 8, 2048, seqlen_k=128, causal=False), True),
        (shaped(256, 16, 1024), True),  # at any number
        (shaped(256, 16, 16384), True),
    ],
)
def test_few_blocks_are_of_two_passes_side_by_side(problem: Problem, two: bool) -> None:
    knobs = knobs_of(POLICY.default(problem))
    assert (knobs.decomposition == "two_pass") is two
    if two:
        assert knobs.early_launches


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (shaped(128, 2, 512, batch=151, causal=False), "keys1bulk"),
        (shaped(128, 2, 512, batch=150, causal=False), "keys1stored"),
        (shaped(128, 1, 704, batch=239, causal=False), "keys1bulk"),
        (shaped(64, 1, 753, batch=257), "own2stored"),
        (shaped(64, 1, 753, batch=256), "own2queued"),
    ],
)
def test_heads_that_find_no_neighbours_have_their_own_sums(problem: Problem, words: str) -> None:
    assert f"_{words}_" in POLICY.default(problem).knobs.label


def test_the_space_offers_two_early_passes_where_blocks_are_few() -> None:
    def early(problem: Problem) -> int:
        offered = [c for c in POLICY.legal(problem) if c.kernel == "attention_backward_sm90"]
        knobs = [knobs_of(candidate) for candidate in offered]
        return sum(k.decomposition == "two_pass" and k.early_launches for k in knobs)

    assert early(shaped(128, 16, 2048)) >= 2
    assert early(shaped(128, 24, 2048)) == 0
    chosen = POLICY.default(shaped(128, 16, 1024))
    assert chosen in POLICY.legal(shaped(128, 16, 1024))


def test_passes_side_by_side_cost_what_idle_sms_leave() -> None:
    def launch(us: float, idle: float) -> Estimate:
        terms = {"tensor_us": us - idle, "imbalance_us": idle, "launch_us": 0.0}
        return Estimate(us=us, limiter="tensor", terms=terms, occupancy=1, waves=0.5)

    passes, nothing, spec = [launch(40.0, 15.0), launch(30.0, 10.0)], AuxiliaryWork(), POLICY.spec
    assert in_sequence(passes, nothing, spec).us == 70.0
    beside = in_sequence(passes, nothing, spec, side_by_side=True)
    assert (beside.us, beside.terms["imbalance_us"]) == (47.5, 2.5)  # 15 of 20 find a place
    few = [launch(40.0, 30.0), launch(30.0, 25.0)]
    assert in_sequence(few, nothing, spec, side_by_side=True).us == 40.0  # the longest of them


def test_the_cost_model_knows_that_they_are_the_fastest_of_few_blocks() -> None:
    for tokens, faster in ((1024, True), (8192, False)):
        problem = shaped(128, 16, tokens)
        two = POLICY.default(shaped(128, 16, 1024))
        fused = POLICY.default(shaped(128, 16, 8192))
        by_cost = [estimate(problem, c, POLICY.spec).us for c in (two, fused)]
        assert (by_cost[0] < by_cost[1]) is faster


def test_the_races_can_be_read_from_the_command_line(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(repository / RACES)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("shapes") == 12
    assert "for (" not in printed  # no costs of tiles
