"""The defaults of retention of family ``sm90``, and the cost model behind them, against races of an H200."""

from __future__ import annotations

import time
from dataclasses import replace
from math import fsum, log, sqrt
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from attention_autotuner import arch
from attention_autotuner.arch import Policy, resolve
from attention_autotuner.arch.measured_specs import read
from attention_autotuner.arch.resolution import policy_with
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.cost_model import estimate, rank
from attention_autotuner.kernels.shared.estimates import Estimate
from benchmarks.default_races import Race, default_of, main, read_races, regrets

RESULTS = Path("benchmarks/results/nvidia-h200")
DIRECTIONS = ("forward", "backward")
POLICY = resolve("H200")
AS_MEASURED = policy_with(read(Path(arch.__file__).with_name("measured") / "nvidia-h200.json"))
RETENTION = Problem(op="retention", dtype="bf16", batch=1, causal=True)


@pytest.fixture(scope="module", params=DIRECTIONS)
def races(repository: Path, request: pytest.FixtureRequest) -> tuple[Race, ...]:
    return read_races(repository / RESULTS / f"retention_{request.param}_defaults.json.xz")


def ranking(race: Race) -> list[tuple[Candidate, Estimate]]:
    return rank(race.problem, AS_MEASURED.legal(race.problem), AS_MEASURED.spec)


def shaped(dims: tuple[int, int], batch: int, heads: int, tokens: int, **options: Any) -> Problem:
    sizes: dict[str, Any] = {"dim_qk": dims[0], "dim_v": dims[1], "batch": batch}
    sizes |= {"heads_q": heads, "heads_kv": heads, "seqlen_q": tokens, "seqlen_k": tokens}
    return replace(RETENTION, **sizes, **options)


@pytest.mark.parametrize("policy", [POLICY, AS_MEASURED], ids=["published", "measured"])
def test_defaults_are_near_the_fastest_kernel_of_every_race(
    races: tuple[Race, ...], policy: Policy
) -> None:
    ratios = [ratio for _, ratio in regrets(races, default_of(policy))]
    assert len(ratios) > 0.95 * len(races) > 55
    assert geometric_mean(ratios) < 1.02
    assert max(ratios) < 1.25


def test_races_are_of_the_operation_that_their_file_says(races: tuple[Race, ...]) -> None:
    assert {race.problem.op for race in races} == {"retention"}
    assert len({race.problem.direction for race in races}) == 1
    assert len({race.problem for race in races}) == len(races)


def test_the_model_meets_the_races(races: tuple[Race, ...]) -> None:
    errors = [
        log(predicted.us / race.us[candidate.knobs.label])
        for race in races
        for candidate, predicted in ranking(race)
        if candidate.family == "sm90" and candidate.knobs.label in race.us
    ]
    assert len(errors) > 300
    assert sqrt(fsum(error**2 for error in errors) / len(errors)) < 0.12


def test_the_model_ranks_no_kernel_of_warps_first_where_warpgroups_are_faster(
    races: tuple[Race, ...],
) -> None:
    wrong, ratios = 0, []
    for race in races:
        ranked = ranking(race)
        families = {candidate.knobs.label: candidate.family for candidate, _ in ranked}
        fastest = min(race.us, key=lambda label: race.us[label])
        wrong += families.get(fastest) == "sm90" and ranked[0][0].family == "sm80"
        if ranked[0][0].knobs.label in race.us:
            ratios.append(race.us[ranked[0][0].knobs.label] / race.us[fastest])
    assert wrong <= 1
    assert len(ratios) >= 40
    assert geometric_mean(ratios) < 1.02


def test_a_default_is_chosen_in_milliseconds() -> None:
    asked = [
        shaped(dims, 1, 8, tokens, direction=direction)
        for dims in ((64, 64), (128, 128), (256, 512))
        for tokens in (512, 4096, 32768)
        for direction in DIRECTIONS
    ]
    begun = time.process_time()
    for problem in asked:
        POLICY.default(problem)
    assert (time.process_time() - begun) / len(asked) < 5e-3


def times(problem: Problem, **options: Any) -> Estimate:
    """The estimate of the default with other knobs."""
    default = POLICY.default(problem)
    return estimate(problem, replace(default, knobs=replace(default.knobs, **options)), POLICY.spec)


def test_passes_of_whole_sequences_take_the_time_of_the_longest_where_all_find_a_place() -> None:
    few = shaped((128, 128), 1, 8, 2048, direction="backward")
    whole = {"warpgroups": 2, "num_stages": 3, "ctas_per_sm": 1, "super_chunk": 0}
    assert times(few, **whole).us == pytest.approx(
        times(replace(few, batch=2), **whole).us, rel=0.2
    )
    many = [times(replace(few, batch=batch), **whole).us for batch in (5, 6)]
    assert many[1] > 1.7 * many[0]  # 120 CTAs, and 144 on 132 SMs


def test_passes_of_super_chunks_wait_for_each_other() -> None:
    asked = shaped((64, 64), 2, 4, 32768, direction="backward")
    same = {"warpgroups": 1, "num_stages": 3, "ctas_per_sm": 1}
    halves, whole = (times(asked, **same, super_chunk=size) for size in (16384, 0))
    assert halves.us > 1.4 * whole.us
    assert halves.terms["auxiliary_us"] > whole.terms["auxiliary_us"] == 0.0


def test_two_ctas_of_a_forward_pass_lack_registers_in_bf16() -> None:
    asked = shaped((128, 128), 4, 3, 683)
    same = {"warpgroups": 1, "num_stages": 2, "super_chunk": 0}
    slow, fast = (times(asked, **same, ctas_per_sm=ctas).us for ctas in (2, 1))
    assert slow > 2 * fast
    half = replace(asked, dtype="fp16")
    assert times(half, **same, ctas_per_sm=2).us < 1.2 * times(half, **same, ctas_per_sm=1).us


@pytest.mark.parametrize(
    ("problem", "label"),
    [
        (shaped((256, 512), 2, 4, 512, direction="backward"), "p0_g2s2b1"),
        (shaped((128, 128), 4, 8, 2048, direction="backward"), "p0_g2s3b1"),
        (shaped((128, 128), 1, 8, 16384, direction="backward"), "p2048_g1s3b1"),
        (shaped((64, 64), 8, 32, 8192, direction="backward"), "p0_g1s3b2"),
        (shaped((256, 256), 4, 2, 8192), "p1024_g2s2b1"),
        (shaped((256, 512), 4, 16, 4096), "p0_g2s2b1"),
        (shaped((128, 128), 1, 16, 512), "p0_g1s3b1"),
    ],
)
def test_defaults_that_were_the_fastest_of_their_races(problem: Problem, label: str) -> None:
    assert POLICY.default(problem).knobs.label == f"chunkwise_l64{label}"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_regrets_can_be_read_from_the_command_line(
    repository: Path, capsys: pytest.CaptureFixture[str], direction: str
) -> None:
    assert main([str(repository / RESULTS / f"retention_{direction}_defaults.json.xz")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("shapes") == 5  # pairs of head dims
    assert "for (" not in printed  # no costs of tiles
