from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import H100
from attention_autotuner.core.outcome import BuildFailed
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import tune, tune_step
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.lookup import Hit, Query
from attention_autotuner.tuning.progress import Event
from attention_autotuner.tuning.racing import Timing
from attention_autotuner.tuning.ranking import ranked
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shortlist import shortlist
from attention_autotuner.tuning.step import DEFAULTS, PICKS, problems_of_step
from tests.fake_pipeline import GPU, FakePipeline

FORWARD = Problem(batch=2, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_k=1024)
BACKWARD = replace(FORWARD, direction="backward")
POLICY = H100()


def challenger_of(problem: Problem) -> str:
    """The first candidate that a search races beside the default."""
    default = POLICY.default(problem)
    raced = shortlist(ranked(problem, POLICY), default, top_k=2)
    return next(candidate.name for candidate, _ in raced if candidate != default)


CHALLENGERS = (challenger_of(FORWARD), challenger_of(BACKWARD))


def times(name: str) -> float:
    """Defaults take 100 and 200 us, the challengers a tenth less."""
    base = 200.0 if "backward" in name else 100.0
    return 0.9 * base if name in CHALLENGERS else base


@pytest.fixture
def records(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "records")


def hit(records: RecordStore, problem: Problem) -> Hit:
    answer = records.find(Query(problem=problem, arch="H100", environment=GPU))
    assert isinstance(answer, Hit), answer
    return answer


def test_both_directions_are_tuned_recorded_for_the_step_and_timed_as_one(
    records: RecordStore,
) -> None:
    pipeline = FakePipeline(time_us=times, confirmed_ratio=1.1)
    result = tune_step(FORWARD, POLICY, records=records, pipeline=pipeline, top_k=2)
    assert result.backward is not None
    assert (result.forward.pick.name, result.backward.pick.name) == CHALLENGERS
    for problem, challenger in ((FORWARD, CHALLENGERS[0]), (BACKWARD, CHALLENGERS[1])):
        answer = hit(records, problem)
        assert (answer.record.pick, answer.record.purpose, answer.exact) == (
            challenger,
            "step",
            True,
        )
    defaults = (POLICY.default(FORWARD).name, POLICY.default(BACKWARD).name)
    assert pipeline.steps == {PICKS: CHALLENGERS, DEFAULTS: defaults}
    assert pipeline.problems == [FORWARD, BACKWARD, BACKWARD]
    assert (result.source, result.picks_us, result.defaults_us) == ("measured", 270.0, 300.0)
    assert result.gain == pytest.approx(300.0 / 270.0 - 1.0)
    said = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert said["step"]["picks_us"] == 270.0
    assert said["backward"]["purpose"] == "step"


class SlowTogether(FakePipeline):
    """A pipeline whose challengers are fast alone, and slow in a step."""

    def measure_steps(self, *arguments: Any, **options: Any) -> tuple[list[Timing], bool]:
        alone, self.time_us = self.time_us, lambda name: 300.0 if name in CHALLENGERS else 100.0
        timings = super().measure_steps(*arguments, **options)
        self.time_us = alone
        return timings


def test_picks_that_make_the_step_slower_give_way_to_the_defaults(records: RecordStore) -> None:
    pipeline = SlowTogether(time_us=times, confirmed_ratio=1.1)
    for _ in range(2):  # measured, then recorded
        result = tune_step(FORWARD, POLICY, records=records, pipeline=pipeline, top_k=1)
        for half in result.results:
            assert half.pick == half.default
            assert hit(records, half.problem).record.pick == half.default.name
    assert pipeline.confirmations  # the picks had won by themselves
    assert not result.reverted  # what was recorded is not tried again
    fresh = RecordStore(records.root / "fresh")
    result = tune_step(FORWARD, POLICY, records=fresh, pipeline=pipeline, top_k=1)
    assert result.reverted
    assert result.gain == pytest.approx(200.0 / 600.0 - 1.0)


def test_each_direction_alone_is_recorded_as_such(records: RecordStore) -> None:
    for problem in (FORWARD, BACKWARD):
        pipeline = FakePipeline(time_us=times)
        tune(problem, POLICY, records=records, pipeline=pipeline, top_k=1)
        assert hit(records, problem).record.purpose == problem.direction


def test_a_step_of_recorded_halves_builds_what_it_times(records: RecordStore) -> None:
    first = FakePipeline(time_us=times, confirmed_ratio=1.1)
    tune_step(BACKWARD, POLICY, records=records, pipeline=first, top_k=1)
    for path in records.root.rglob("*.step.jsonl"):
        path.unlink()
    again = FakePipeline(time_us=times)
    result = tune_step(BACKWARD, POLICY, records=records, pipeline=again, top_k=1)
    assert [candidate.status for candidate in result.results] == ["recorded", "recorded"]
    assert again.measured == []
    assert set(again.built) == {name for pair in again.steps.values() for name in pair}
    assert result.picks_us == 270.0


def test_rounds_of_steps_are_kept_and_a_race_that_has_ended_is_not_run_again(
    records: RecordStore,
) -> None:
    killed = FakePipeline(time_us=times, confirmed_ratio=1.1, interrupt_in="step")
    with pytest.raises(KeyboardInterrupt):
        tune_step(FORWARD, POLICY, records=records, pipeline=killed, top_k=1)
    path = records.path(BACKWARD, "H100", GPU.gpu_name).with_suffix(".step.jsonl")

    def lines(kind: str) -> int:
        return path.read_text().count(f'"{kind}":')

    assert (lines("round"), lines("over")) == (1, 0)
    for again, rounds in ((FakePipeline(time_us=times), 6), (FakePipeline(time_us=times), 6)):
        result = tune_step(FORWARD, POLICY, records=records, pipeline=again, top_k=1)
        assert (result.picks_us, result.defaults_us) == (270.0, 300.0)
        assert result.gain == pytest.approx(300.0 / 270.0 - 1.0)
        assert (lines("round"), lines("over")) == (rounds, 1)
    assert (killed.steps != {}, again.steps) == (True, {})
    with settings.override(always_tune=True):
        fresh = FakePipeline(time_us=times, confirmed_ratio=1.1)
        tune_step(FORWARD, POLICY, records=records, pipeline=fresh, top_k=1)
    assert (len(fresh.steps), lines("round"), lines("end")) == (2, 12, 1)
    records.remove({str(path.with_name(path.name.removesuffix(".step.jsonl") + ".json"))})
    assert not path.exists()


def test_halves_that_were_recorded_alone_belong_to_the_step_from_then_on(
    records: RecordStore,
) -> None:
    for problem in (FORWARD, BACKWARD):
        tune(problem, POLICY, records=records, pipeline=FakePipeline(time_us=times), top_k=1)
    entries = [hit(records, problem).record.entries for problem in (FORWARD, BACKWARD)]
    pipeline = FakePipeline(time_us=times)
    result = tune_step(BACKWARD, POLICY, records=records, pipeline=pipeline, top_k=1)
    assert [candidate.status for candidate in result.results] == ["recorded", "recorded"]
    assert [candidate.to_json()["purpose"] for candidate in result.results] == ["step", "step"]
    for problem, before in zip((FORWARD, BACKWARD), entries, strict=True):
        assert hit(records, problem).record.purpose == "step"
        assert hit(records, problem).record.entries == before
    assert pipeline.measured == []


def test_budgets_are_separate_and_the_backward_takes_the_other_by_default(
    records: RecordStore,
) -> None:
    for order, expected in ((9.0, 9.0), (None, 5.0)):
        pipeline = FakePipeline(time_us=times)
        store = RecordStore(records.root / str(expected))
        seen: list[Event] = []
        tune_step(
            FORWARD,
            POLICY,
            records=store,
            pipeline=pipeline,
            top_k=1,
            budget_seconds=5.0,
            listener=seen.append,
            backward_budget_seconds=order,
        )
        assert 0.3 * expected < pipeline.budget_seconds <= 0.8 * expected  # the rest is to confirm
        left = {
            name: max(e.seconds_left or 0.0 for e in seen if e.message.startswith(f"{name}: "))
            for name in ("forward", "backward")
        }
        assert left["forward"] <= 5.0 < left["forward"] + 3.0
        assert left["backward"] <= expected < left["backward"] + 3.0


def test_without_a_gpu_the_estimates_are_added_up(records: RecordStore) -> None:
    pipeline = FakePipeline(gpu=False, environment=Environment())
    result = tune_step(FORWARD, POLICY, records=records, pipeline=pipeline, top_k=1)
    assert result.source == "predicted"
    assert result.backward is not None
    estimates = {
        row.candidate: row.estimate.us for candidate in result.results for row in candidate.rows
    }
    assert result.picks_us == pytest.approx(
        estimates[result.forward.pick] + estimates[result.backward.pick]
    )
    assert result.defaults_us is not None
    assert result.picks_us is not None
    assert result.picks_us <= result.defaults_us
    assert pipeline.steps == {}


def test_equal_picks_and_defaults_are_timed_once(records: RecordStore) -> None:
    pipeline = FakePipeline()
    result = tune_step(FORWARD, POLICY, records=records, pipeline=pipeline, top_k=1)
    assert list(pipeline.steps) == [PICKS]
    assert (result.picks_us, result.defaults_us, result.gain) == (200.0, 200.0, 0.0)


def test_a_default_that_does_not_build_leaves_the_picks_alone(records: RecordStore) -> None:
    failing = POLICY.default(BACKWARD).name
    pipeline = FakePipeline(
        time_us=times,
        confirmed_ratio=1.1,
        build_outcome=lambda n: BuildFailed(reason="no", log="/l") if n == failing else None,
    )
    result = tune_step(FORWARD, POLICY, records=records, pipeline=pipeline, top_k=2)
    assert list(pipeline.steps) == [PICKS]
    assert result.picks_us == 270.0
    assert (result.defaults_us, result.gain) == (None, None)


def test_ctrl_c_in_the_forward_search_ends_the_step(records: RecordStore) -> None:
    pipeline = FakePipeline(interrupt_in="build")
    result = tune_step(FORWARD, POLICY, records=records, pipeline=pipeline)
    assert result.interrupted
    assert result.backward is None
    assert result.source == "unknown"
    assert result.results == (result.forward,)


def test_determinism_is_asked_of_the_backward_only(records: RecordStore) -> None:
    pipeline = FakePipeline(time_us=times)
    strict = replace(BACKWARD, deterministic=True)
    result = tune_step(strict, POLICY, records=records, pipeline=pipeline, top_k=2)
    assert result.backward is not None
    assert result.backward.problem == strict
    assert result.forward.problem == FORWARD
    assert all(pipeline.claims.values())
    free = FakePipeline(time_us=times)
    tune(BACKWARD, POLICY, records=records, pipeline=free, top_k=4)
    assert free.claims == {
        candidate.name: candidate.deterministic
        for candidate in POLICY.legal(BACKWARD)
        if candidate.name in free.claims
    }


def test_a_problem_or_its_fields_without_a_direction(records: RecordStore) -> None:
    assert problems_of_step(BACKWARD) == problems_of_step(FORWARD) == (FORWARD, BACKWARD)
    result = tune_step(
        device_type="H100",
        effort="none",
        records=records,
        pipeline=FakePipeline(),
        seqlen_q=512,
        deterministic=True,
    )
    assert result.backward is not None
    assert result.backward.problem == Problem(
        direction="backward", seqlen_q=512, seqlen_k=512, deterministic=True
    )
    assert result.source == "predicted"
    with pytest.raises(TypeError, match="not both"):
        tune_step(FORWARD, POLICY, causal=True)
    with pytest.raises(TypeError, match="both directions"):
        tune_step(device_type=POLICY, direction="backward")
