"""Searches of several ranks, on gloo groups of processes without a GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from attention_autotuner import settings
from attention_autotuner.arch import H100
from attention_autotuner.core.outcome import LaunchFailed, Ok, Outcome, Proof, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import DistributedError
from attention_autotuner.tuning import function_search, ranks, tune, tune_step
from attention_autotuner.tuning.distributed import FINALISTS, race_together
from attention_autotuner.tuning.functions import Tunable
from attention_autotuner.tuning.racing import Race, Timing
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.sweeps import DIRECTIONS
from examples.autotune import two_ranks
from tests.fake_pipeline import FakePipeline
from tests.fake_ranks import KILLED, killed, run_ranks
from tests.tunable_functions import ENDS, bench, double, summed

pytestmark = pytest.mark.dist

PROBLEM = Problem(batch=4, heads_q=16, heads_kv=16, seqlen_q=1024, seqlen_k=1024)
POLICY = H100()
DEFAULT = POLICY.default(PROBLEM).name
STEP_DEFAULTS = {POLICY.default(replace(PROBLEM, direction=way)).name for way in DIRECTIONS}
PROVEN = Ok(
    proof=Proof(
        verifier="v", gpu_name="g", checks=("a",), repeats=2, same_bits=True, ratios={"o": 0.5}
    )
)

# --- the race -------------------------------------------------------------------------------------


def raced(rank: int, of_ranks: list[dict[str, float]], failing: dict[int, str]) -> Any:
    asked: list[list[str]] = []

    def race(names: Any) -> list[Timing]:
        asked.append(list(names))
        race = Race(names)
        for _ in range(6):
            race.add({name: of_ranks[rank][name] for name in names})
        if failing.get(rank) in names:
            race.fail(failing[rank], LaunchFailed(reason="gone"))
        return race.results()

    with ranks.Ranks(dist.group.WORLD) as group:
        return asked, race_together(group, list(of_ranks[0]), race)


def test_ranks_race_shares_and_the_worst_rank_of_the_finals_decides() -> None:
    names = ["default", *"abcdefgh"]
    fast = {name: 100.0 - 5 * index for index, name in enumerate(names)}  # h is the fastest
    slow = dict.fromkeys(names, 200.0) | {"h": 210.0, "g": 150.0, "f": 180.0}
    (first, timings), (second, others) = run_ranks(raced, [fast, slow], {})
    assert timings == others
    assert (first[0], second[0]) == (["default", *"aceg"], ["default", *"bdfh"])
    assert first[1] == second[1] == ["default", *"cefg"]
    assert len(first[1]) == FINALISTS + 1
    assert [t.name for t in timings[:2]] == ["g", "f"]
    by_name = {t.name: t for t in timings}
    assert by_name["g"].ratio_to_best == 1.0
    assert by_name["default"].ratio_to_best == pytest.approx(200 / 150)
    assert by_name["c"].ratio_to_best == pytest.approx(
        200 / 150
    )  # as fast as the default on rank 1
    assert (by_name["g"].median_us, by_name["default"].median_us) == (150.0, 200.0)


def test_a_failure_of_one_rank_counts_for_all_and_the_next_takes_the_place_of_the_default() -> None:
    times = {"default": 100.0, "a": 90.0, "b": 80.0}
    for failing, order in (
        ({1: "b"}, ["a", "default", "b"]),
        ({0: "default"}, ["b", "a", "default"]),
    ):
        (_, timings), (_, others) = run_ranks(raced, [times, times], failing)
        assert timings == others
        assert [timing.name for timing in timings] == order
        assert timings[-1].outcome == LaunchFailed(reason="gone")


# --- problems -------------------------------------------------------------------------------------


@dataclass
class RankPipeline(FakePipeline):
    """A pipeline that says when it built, and whose ranks may differ."""

    at_verify: Callable[[], Any] = lambda: None
    built_at: tuple[float, float] = (0.0, 0.0)

    def build(self, kernels: Any, progress: Any, stop: Any = lambda: False) -> Any:
        began = time.monotonic()
        time.sleep(0.05)
        results = super().build(kernels, progress, stop)
        self.built_at = (began, time.monotonic())
        return results

    def verify(self, problem: Any, built: Any, *, deterministic: bool) -> Outcome:
        self.at_verify()
        return super().verify(problem, built, deterministic=deterministic)


def searched(rank: int, root: Path, **options: Any) -> tuple[Any, RankPipeline]:
    pipeline = RankPipeline(confirmed_ratio=1.2, **options)
    records = RecordStore(root)
    return tune(
        PROBLEM, POLICY, group=dist.group.WORLD, records=records, pipeline=pipeline
    ), pipeline


def search_twice(rank: int, root: Path) -> Any:
    def us(name: str) -> float:  # a name has one time, unless the rank is the second
        return 100.0 if name == DEFAULT else 70.0 + sum(map(ord, name)) % 40 + 10 * rank

    def checked(name: str) -> Outcome:
        return Wrong(reason="off") if sum(map(ord, name)) % 3 == 0 and name != DEFAULT else PROVEN

    result, pipeline = searched(rank, root, time_us=us, verify_outcome=checked)
    again, _ = searched(rank, root)
    rows = [(row.candidate.name, row.outcome) for row in result.rows]
    files = {p: p.stat().st_ino for p in root.glob("*/*/*.json")}
    return rows, result.pick.name, again.status, pipeline.verified, pipeline.built_at, files


def test_ranks_share_builds_checks_and_races_and_come_to_one_decision(tmp_path: Path) -> None:
    (rows, pick, again, checked, built, files), other = run_ranks(search_twice, tmp_path)
    assert (rows, pick, again, files) == (*other[:3], other[5])
    assert pick != DEFAULT
    assert again == "recorded"
    assert len(files) == 1
    assert not [(n, o.proof) for n, o in rows if o.ok and o.proof != PROVEN.proof]
    assert not [*tmp_path.rglob("*.jsonl"), *tmp_path.rglob("*.lease")]
    assert built[1] <= other[4][0]  # the second took what the first had built
    both = [name for name in checked if name in other[3]]
    assert {*both} == {DEFAULT}
    assert {*checked, *other[3]} == {name for name, _ in rows}
    assert abs(len(checked) - len(other[3])) <= 1
    assert any(isinstance(outcome, Wrong) for _, outcome in rows)


@dataclass
class SlowSteps(FakePipeline):
    """A pipeline whose picks are faster than the defaults, and slower in steps."""

    def measure_steps(self, *arguments: Any, **options: Any) -> Any:
        alone, self.time_us = self.time_us, lambda name: 300.0 - self.alone_us(name)
        timings = super().measure_steps(*arguments, **options)
        self.time_us = alone
        return timings

    @staticmethod
    def alone_us(name: str) -> float:
        return 200.0 if name in STEP_DEFAULTS else 100.0


def step_together(rank: int, root: Path, slow: bool) -> Any:
    kind = SlowSteps if slow and rank == 1 else FakePipeline
    pipeline = kind(time_us=SlowSteps.alone_us, confirmed_ratio=2.0)
    group, records = dist.group.WORLD, RecordStore(root)
    result = tune_step(
        PROBLEM,
        POLICY,
        group=group,
        records=records,
        pipeline=pipeline,
        top_k=1,
        budget_seconds=9.0,
    )
    halves = [half.pick.name in STEP_DEFAULTS for half in result.results]
    return result.reverted, halves, result.gain, {r.pick for _, r in records.records()}


@pytest.mark.parametrize("slow", [True, False])
def test_where_a_step_is_slower_on_one_rank_the_defaults_serve_on_all(
    tmp_path: Path, slow: bool
) -> None:
    first, second = run_ranks(step_together, tmp_path, slow)
    assert first[:2] == second[:2] == (slow, [slow, slow])
    assert first[2] == pytest.approx(1.0)
    assert second[2] == pytest.approx(-0.5 if slow else 1.0)
    assert first[3] == second[3]
    assert (first[3] == STEP_DEFAULTS) == slow


def fail_at_checks(rank: int, root: Path, failure: str) -> Any:
    ranks.SILENT_SECONDS = 2.0
    began = time.monotonic()

    def fails() -> None:
        if rank == 1 and failure == "kill":
            killed()
        if rank == 1:
            raise RuntimeError("the disk is full")

    try:
        searched(rank, root, at_verify=fails)
    except (DistributedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", 0.0


def test_a_rank_that_fails_or_dies_ends_the_others(tmp_path: Path) -> None:
    (error, seconds), theirs = run_ranks(fail_at_checks, tmp_path, "raise")
    assert error == "DistributedError: rank 1 failed: RuntimeError: the disk is full"
    assert theirs[0] == "RuntimeError: the disk is full"
    assert seconds < 5
    (error, seconds), theirs = run_ranks(fail_at_checks, tmp_path, "kill")
    assert error.startswith("DistributedError: nothing was heard of rank 1 for ")
    assert theirs == KILLED
    assert seconds < 10
    assert ranks.SILENT_SECONDS + 2 * ranks.BEAT_SECONDS < 30


def differ(rank: int, root: Path, what: str) -> None:
    other = rank == 1
    problem = replace(PROBLEM, causal=other) if what == "problem" else PROBLEM
    pipeline = FakePipeline()
    if what == "GPU" and other:
        pipeline.environment = replace(pipeline.environment, num_sms=114)
    tune(problem, POLICY, group=dist.group.WORLD, records=RecordStore(root), pipeline=pipeline)


@pytest.mark.parametrize(
    ("what", "words"), [("problem", "arguments and settings"), ("GPU", "GPUs")]
)
def test_ranks_that_do_not_belong_together_are_told(tmp_path: Path, what: str, words: str) -> None:
    for answer in run_ranks(differ, tmp_path, what):
        assert isinstance(answer, DistributedError)
        assert f"the ranks differ in their {words}, by digest: rank 0 " in str(answer)


def go_two_ways(rank: int) -> None:
    with ranks.Ranks(dist.group.WORLD) as group:
        group.exchange(f"step {rank}", None)


def test_ranks_that_go_two_ways_are_told() -> None:
    first, second = run_ranks(go_two_ways)
    assert "rank 0 is at 'step 0' while rank 1 is at 'step 1'" in str(first)
    assert "rank 1 is at 'step 1' while rank 0 is at 'step 0'" in str(second)


def log(rank: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    ours, others = logging.getLogger("attention_autotuner.tuning.x"), logging.getLogger("other")
    with ranks.Ranks(dist.group.WORLD):
        ours.warning("one of %d", 2)
        others.warning("not ours")
    ours.warning("after")
    return said


def test_logs_carry_the_rank() -> None:
    assert run_ranks(log) == [[f"[rank {rank}] one of 2", "not ours", "after"] for rank in range(2)]


def test_a_group_needs_torch_distributed(tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match=r"torch\.distributed is not initialised"):
        tune(
            PROBLEM, POLICY, group=object(), pipeline=FakePipeline(), records=RecordStore(tmp_path)
        )


# --- functions ------------------------------------------------------------------------------------


def call_functions(rank: int, root: Path) -> Any:
    group = dist.group.WORLD
    with settings.override(cache_dir=root, in_process=True):
        out = torch.zeros(3)
        double.configs = [config for config in double.configs if config["mode"] not in ENDS]
        picked = double.tune(torch.ones(3), out, group=group)
    with settings.override(cache_dir=root):
        together = Tunable(summed.function, summed.configs, collective=True, bench=bench)
        together.configs = [c for c in together.configs if c["mode"] != "local"]
        result = together.tune(torch.ones(3), group=group)
        total = together(torch.ones(3), group=group)
    outcomes = {timing.name: timing.outcome.kind for timing in result.timings}
    return picked.pick, result.pick, outcomes, total.tolist()


def test_ranks_tune_functions_each_for_itself_or_all_in_step(tmp_path: Path) -> None:
    first, second = run_ranks(call_functions, tmp_path)
    outcomes = {"mode=default": "ok", "mode=fast": "ok", "mode=fails": "launch_failed"}
    assert first == second == ({"mode": "fast"}, {"mode": "fast"}, outcomes, [2.0] * 3)


def run_example(rank: int, root: Path) -> Any:
    with settings.override(cache_dir=root, budget_seconds=0.1):
        a, b = torch.full((64, 32), 2.0), torch.ones(32, 64)
        result = two_ranks.matmul_all_reduce.tune(a, b, group=dist.group.WORLD)
        product = two_ranks.matmul_all_reduce(a, b, group=dist.group.WORLD)
    kinds = {timing.outcome.kind for timing in result.timings}
    return dict(result.pick), kinds, float(product.min()), float(product.max())


def test_the_example_of_two_ranks_is_right_on_both(tmp_path: Path) -> None:
    first, second = run_ranks(run_example, tmp_path)
    assert first == second
    assert first[1:] == ({"ok"}, 128.0, 128.0)


def fail_on_one(rank: int, root: Path) -> float:
    function_search.COLLECTIVE_SECONDS = 2.0
    began = time.monotonic()
    with settings.override(cache_dir=root), pytest.raises(DistributedError) as caught:
        summed.tune(torch.ones(3), group=dist.group.WORLD)
    assert "mode=local did not end alike on all ranks" in str(caught.value)
    assert "rank 1: ValueError: on one rank" in str(caught.value)
    return time.monotonic() - began


def test_a_failure_on_one_rank_inside_a_collective_ends_all(tmp_path: Path) -> None:
    assert function_search.COLLECTIVE_SECONDS < 30
    assert max(run_ranks(fail_on_one, tmp_path)) < 10
