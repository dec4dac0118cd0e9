from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import H100
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed, LaunchFailed, Ok, TimedOut, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import NoCandidateError, SettingsError, UnsupportedProblemError
from attention_autotuner.kernels.cost_model import Estimate, rank
from attention_autotuner.tuning import tune, tune_step
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.lookup import Hit, Query
from attention_autotuner.tuning.printing import Pace
from attention_autotuner.tuning.progress import Event
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shortlist import shape_of, shortlist
from tests.fake_pipeline import GPU, FakePipeline, fast

PROBLEM = Problem(batch=4, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_k=1024)
POLICY = H100()
DEFAULT = POLICY.default(PROBLEM)


@pytest.fixture
def records(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "records")


@pytest.fixture
def challenger() -> str:
    """The model's best candidate that is not the default."""
    ranked = rank(PROBLEM, POLICY.legal(PROBLEM), POLICY.spec)
    return next(candidate.name for candidate, _ in ranked if candidate != DEFAULT)


# --- what is chosen -------------------------------------------------------------------------------


def test_a_confirmed_gain_replaces_the_default_and_is_recorded(
    records: RecordStore, challenger: str
) -> None:
    pipeline = FakePipeline(time_us=fast(challenger, 90.0), confirmed_ratio=1.10)
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert result.status == "measured"
    assert result.pick.name == challenger
    assert result.gain == pytest.approx(100.0 / 90.0 - 1.0)
    assert result.confirmed
    assert pipeline.confirmations == [(challenger, DEFAULT.name)]
    assert result.rows[0].candidate.name == challenger
    hit = records.find(Query(problem=PROBLEM, arch="H100", environment=GPU))
    assert isinstance(hit, Hit)
    assert hit.record == result.record
    assert hit.record.pick == challenger
    assert {e.candidate.name for e in hit.record.entries} == set(pipeline.built)
    assert result.record_path is not None
    assert result.record_path.is_file()
    json.dumps(result.to_json(), allow_nan=False)


def test_a_gain_that_the_second_process_denies_is_dropped(
    records: RecordStore, challenger: str
) -> None:
    pipeline = FakePipeline(time_us=fast(challenger, 90.0), confirmed_ratio=1.005)
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert result.pick == DEFAULT
    assert result.confirmed
    assert result.record is not None
    assert result.record.pick == DEFAULT.name


def test_a_pick_that_could_not_be_confirmed_says_so(records: RecordStore, challenger: str) -> None:
    for confirm, asked in ((True, 1), (False, 0)):
        pipeline = FakePipeline(time_us=fast(challenger, 90.0), confirmed_ratio=None)
        store = RecordStore(records.root / str(confirm))
        result = tune(PROBLEM, POLICY, records=store, pipeline=pipeline, confirm=confirm)
        assert result.pick.name == challenger
        assert not result.confirmed
        assert len(pipeline.confirmations) == asked


def test_less_than_one_percent_does_not_replace_the_default(
    records: RecordStore, challenger: str
) -> None:
    pipeline = FakePipeline(time_us=fast(challenger, 99.2), confirmed_ratio=1.2)
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert result.pick == DEFAULT
    assert result.gain == 0.0
    assert pipeline.confirmations == []


def test_equal_times_keep_the_default(records: RecordStore) -> None:
    result = tune(PROBLEM, POLICY, records=records, pipeline=FakePipeline())
    assert result.pick == DEFAULT


def test_a_pick_that_fails_in_the_second_process_falls_out(
    records: RecordStore, challenger: str
) -> None:
    hung = TimedOut(reason="it did not end within 20 s")
    pipeline = FakePipeline(time_us=fast(challenger, 90.0), confirmed_ratio=hung)
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert (result.pick, result.gain, result.confirmed) == (DEFAULT, 0.0, True)
    assert result.record is not None
    entry = result.record.entry(challenger)
    assert entry is not None
    assert entry.outcome == hung
    assert records.put(result.record) == result.record


# --- what falls out -------------------------------------------------------------------------------


def test_failures_of_every_stage_are_kept_with_their_reasons(
    records: RecordStore, challenger: str
) -> None:
    ranked = [candidate.name for candidate, _ in shortlist_of(8)]
    failing, wrong, crashed = [name for name in ranked if name not in (DEFAULT.name, challenger)][
        :3
    ]
    pipeline = FakePipeline(
        time_us=fast(challenger, 80.0),
        confirmed_ratio=1.2,
        build_outcome=lambda n: BuildFailed(reason="no", log="/l") if n == failing else None,
        verify_outcome=lambda n: Wrong(reason="off by 3") if n == wrong else Ok(),
        timing_outcome=lambda n: LaunchFailed(reason="gone") if n == crashed else None,
    )
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert result.pick.name == challenger
    outcomes = {row.candidate.name: row.outcome for row in result.rows}
    assert outcomes[failing] == BuildFailed(reason="no", log="/l")
    assert outcomes[wrong] == Wrong(reason="off by 3")
    assert outcomes[crashed] == LaunchFailed(reason="gone")
    assert failing not in pipeline.verified
    assert wrong not in pipeline.measured
    assert result.record is not None
    kept = {entry.candidate.name: entry.outcome for entry in result.record.entries}
    assert kept == outcomes


def test_kernels_that_spill_in_their_loops_are_not_measured(
    records: RecordStore, challenger: str
) -> None:
    pipeline = FakePipeline(spills=lambda name: name == challenger)
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert challenger not in pipeline.measured
    row = next(row for row in result.rows if row.candidate.name == challenger)
    assert row.outcome.kind == "spilled"
    assert "320 bytes" in row.outcome.reason


def test_kernels_whose_products_wait_for_one_another_are_not_measured(
    records: RecordStore, challenger: str
) -> None:
    warning = "C7512: Potential Performance Loss: wgmma.mma_async instructions are serialized"

    class Waiting(FakePipeline):
        def build(self, kernels: Any, progress: Any, stop: Any = bool) -> Any:
            built: Any = super().build(kernels, progress, stop)
            slow = (challenger, POLICY.default(PROBLEM).name)
            return [
                replace(item, report=replace(item.report, warnings=(warning,)))
                if kernel.name in slow
                else item
                for kernel, item in zip(kernels, built, strict=True)
            ]

    pipeline = Waiting()
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert challenger not in pipeline.measured
    assert POLICY.default(PROBLEM).name in pipeline.measured
    row = next(row for row in result.rows if row.candidate.name == challenger)
    assert (row.outcome.kind, row.outcome.reason) == ("serialized", warning)


def test_a_few_spilled_bytes_are_for_the_clock_to_decide(
    records: RecordStore, challenger: str
) -> None:
    def pipeline(gpu: bool) -> FakePipeline:
        return FakePipeline(
            spills=lambda name: name == challenger,
            spilled_each_way=lambda name: 12,
            time_us=fast(challenger, 80.0),
            confirmed_ratio=1.2,
            gpu=gpu,
        )

    assert tune(PROBLEM, POLICY, records=records, pipeline=pipeline(True)).pick.name == challenger
    blind = tune(
        PROBLEM, POLICY, records=RecordStore(records.root / "blind"), pipeline=pipeline(False)
    )
    row = next(row for row in blind.rows if row.candidate.name == challenger)
    assert row.outcome.kind == "spilled"


def test_a_default_that_spills_is_timed_where_it_can_be(records: RecordStore) -> None:
    pipeline = FakePipeline(spills=lambda name: name == DEFAULT.name)
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert DEFAULT.name in pipeline.measured
    assert result.pick == DEFAULT
    blind = FakePipeline(spills=lambda name: name == DEFAULT.name, gpu=False)
    result = tune(PROBLEM, POLICY, records=records, pipeline=blind)
    assert result.pick != DEFAULT
    row = next(row for row in result.rows if row.candidate == DEFAULT)
    assert row.outcome.kind == "spilled"


def test_when_all_spill_they_take_part_after_all(records: RecordStore) -> None:
    pipeline = FakePipeline(spills=lambda name: True)
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert result.status == "measured"
    assert len(pipeline.measured) == len(result.rows)


def test_when_all_spill_those_that_spill_little_come_first(
    records: RecordStore, challenger: str
) -> None:
    pipeline = FakePipeline(
        gpu=False,
        spills=lambda name: True,
        spilled_each_way=lambda name: 12 if name == challenger else 160,
    )
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert result.pick.name == challenger
    assert [row.candidate.name for row in result.rows if row.outcome.ok] == [challenger]
    assert {row.outcome.kind for row in result.rows[1:]} == {"spilled"}


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        (FakePipeline(build_outcome=lambda n: BuildFailed(reason="no nvcc", log="/x")), "no nvcc"),
        (FakePipeline(verify_outcome=lambda n: Wrong(reason="all zeros")), "wrong: all zeros"),
        (FakePipeline(timing_outcome=lambda n: LaunchFailed(reason="busy")), "launch_failed: busy"),
    ],
)
def test_nothing_usable_ends_with_the_table_of_reasons(
    records: RecordStore, pipeline: FakePipeline, words: str
) -> None:
    with pytest.raises(NoCandidateError, match=words) as error:
        tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert DEFAULT.name in str(error.value)
    assert records.count() == 0


# --- how far it goes ------------------------------------------------------------------------------


def test_without_a_gpu_it_ends_after_the_build_and_writes_no_record(records: RecordStore) -> None:
    pipeline = FakePipeline(gpu=False, environment=Environment())
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert result.status == "predicted"
    assert result.record is None
    assert pipeline.built
    assert not pipeline.verified
    assert records.count() == 0
    times = [row.estimate.us for row in result.rows]
    assert times == sorted(times)
    # Nothing is predicted to be clearly faster than the default.
    assert result.rows[0].candidate != result.pick == DEFAULT


def test_effort_none_builds_nothing(records: RecordStore) -> None:
    pipeline = FakePipeline()
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline, effort="none")
    assert result.status == "predicted"
    assert not pipeline.built


def test_effort_full_measures_every_legal_candidate(records: RecordStore) -> None:
    pipeline = FakePipeline()
    tune(PROBLEM, POLICY, records=records, pipeline=pipeline, effort="full")
    assert set(pipeline.measured) == {candidate.name for candidate in POLICY.legal(PROBLEM)}


def test_quick_takes_top_k_and_the_default(records: RecordStore) -> None:
    pipeline = FakePipeline()
    tune(PROBLEM, POLICY, records=records, pipeline=pipeline, top_k=3)
    assert len(pipeline.built) == 4
    assert pipeline.measured[0] == DEFAULT.name


def test_a_budget_bounds_the_rounds(records: RecordStore) -> None:
    pipeline = FakePipeline()
    tune(PROBLEM, POLICY, records=records, pipeline=pipeline, budget_seconds=7.0)
    assert 2.0 <= pipeline.budget_seconds <= 7.0


@pytest.mark.parametrize("phase", ["build", "verify"])
def test_ctrl_c_before_timing_keeps_the_default_and_writes_nothing(
    records: RecordStore, phase: str
) -> None:
    pipeline = FakePipeline(interrupt_in=phase)
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert result.interrupted
    assert result.status == "predicted"
    assert result.pick == DEFAULT
    assert records.count() == 0
    fate = "not built" if phase == "build" else "not timed"
    assert {row.fate for row in result.rows} == {fate}


def test_ctrl_c_while_timing_keeps_the_best_so_far_unconfirmed(
    records: RecordStore, challenger: str
) -> None:
    pipeline = FakePipeline(
        interrupt_in="measure", time_us=fast(challenger, 70.0), confirmed_ratio=1.4
    )
    result = tune(PROBLEM, POLICY, records=records, pipeline=pipeline)
    assert result.interrupted
    assert result.pick.name == challenger
    assert not result.confirmed
    assert pipeline.confirmations == []
    assert result.record is not None


# --- what it remembers ----------------------------------------------------------------------------


def test_a_second_search_measures_nothing(records: RecordStore, challenger: str) -> None:
    first = FakePipeline(time_us=fast(challenger, 90.0), confirmed_ratio=1.1)
    tune(PROBLEM, POLICY, records=records, pipeline=first)
    again = FakePipeline()
    result = tune(PROBLEM, POLICY, records=records, pipeline=again)
    assert result.status == "recorded"
    assert result.pick.name == challenger
    assert again.built == []
    assert result.rows[0].timing is not None
    assert result.rows[0].timing.median_us == 90.0


def test_a_larger_search_measures_only_what_is_new_against_the_old_pick(
    records: RecordStore, challenger: str
) -> None:
    small = FakePipeline(time_us=fast(challenger, 90.0), confirmed_ratio=1.1)
    tune(PROBLEM, POLICY, records=records, pipeline=small, top_k=2)
    large = FakePipeline(time_us=fast(challenger, 90.0), confirmed_ratio=1.1)
    result = tune(PROBLEM, POLICY, records=records, pipeline=large, top_k=6)
    again = set(large.built) & set(small.built)
    assert again == {challenger, DEFAULT.name}
    assert result.pick.name == challenger
    assert result.record is not None
    assert len(result.record.entries) == 7


def test_another_driver_means_measuring_again(records: RecordStore) -> None:
    tune(PROBLEM, POLICY, records=records, pipeline=FakePipeline())
    later = FakePipeline(environment=replace(GPU, driver="590.0"))
    assert tune(PROBLEM, POLICY, records=records, pipeline=later).status == "measured"
    assert later.built


def test_always_tune_ignores_the_record(records: RecordStore) -> None:
    tune(PROBLEM, POLICY, records=records, pipeline=FakePipeline())
    again = FakePipeline()
    with settings.override(always_tune=True):
        assert tune(PROBLEM, POLICY, records=records, pipeline=again).status == "measured"
    assert again.built


# --- arguments and progress -----------------------------------------------------------------------


def test_a_problem_may_be_named_by_its_fields(records: RecordStore) -> None:
    result = tune(
        device_type="H100",
        effort="none",
        records=records,
        pipeline=FakePipeline(),
        seqlen_q=512,
        seqlen_k=512,
        causal=True,
    )
    assert result.problem == Problem(seqlen_q=512, seqlen_k=512, causal=True)
    with pytest.raises(TypeError, match="not both"):
        tune(PROBLEM, POLICY, causal=True)
    with pytest.raises(UnsupportedProblemError, match="dim_qk"):
        tune(device_type=POLICY, dim_qk=7)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"effort": "max"}, SettingsError, "effort='max': must be none, quick or full"),
        ({"effort": 1}, SettingsError, "effort=1: must be none, quick or full"),
        ({"budget_seconds": -1}, SettingsError, "budget_seconds=-1: must be a positive number"),
        ({"budget_seconds": 0}, SettingsError, "budget_seconds=0: must be a positive number"),
        ({"budget_seconds": nan}, SettingsError, "budget_seconds=nan: must be a positive number"),
        ({"budget_seconds": inf}, SettingsError, "budget_seconds=inf: must be a positive number"),
        ({"budget_seconds": "60"}, SettingsError, "budget_seconds='60': must be a positive"),
        ({"budget_seconds": True}, SettingsError, "budget_seconds=True: must be a positive"),
        ({"top_k": -1}, SettingsError, "top_k=-1: must be an integer of at least 0"),
        ({"top_k": 2.5}, SettingsError, "top_k=2.5: must be an integer"),
        ({"batch": 2.5}, UnsupportedProblemError, "batch must be an integer, got 2.5"),
        ({"batch": "4"}, UnsupportedProblemError, "batch must be an integer, got '4'"),
        ({"batch": True}, UnsupportedProblemError, "batch must be an integer, got True"),
        ({"seqlen_q": None}, UnsupportedProblemError, "seqlen_q must be an integer, got None"),
        ({"seqlen_q": nan}, UnsupportedProblemError, "seqlen_q must be an integer, got nan"),
        ({"dim_qk": 64.0}, UnsupportedProblemError, "dim_qk must be an integer, got 64.0"),
        ({"dim_v": [64]}, UnsupportedProblemError, r"dim_v must be an integer, got \[64\]"),
        ({"alignment_bytes": "16"}, UnsupportedProblemError, "alignment_bytes must be an integer"),
        ({"causal": "yes"}, UnsupportedProblemError, "causal must be True or False, got 'yes'"),
        ({"causal": None}, UnsupportedProblemError, "causal must be True or False, got None"),
        ({"deterministic": 1}, UnsupportedProblemError, "deterministic must be True or False, got 1"),
        ({"dtype": None}, UnsupportedProblemError, "dtype must be one of .*, got None"),
        ({"op": ["attention"]}, UnsupportedProblemError, "op must be one of .*, got "),
        ({"seqlenq": 4}, TypeError, "no field 'seqlenq'; its fields: op, direction, dtype"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device_type", [None, POLICY])
def test_a_bad_argument_is_an_error_before_any_work(
    arguments: dict[str, Any], error: type[Exception], message: str, device_type: Any
) -> None:
    """Without a GPU too: None would ask for the present one."""
    with pytest.raises(error, match=message):
        tune(device_type=device_type, pipeline=None, **arguments)
    with pytest.raises(error, match=message):
        tune_step(device_type=device_type, pipeline=None, **arguments)


def test_a_bad_budget_of_the_backward_search_is_an_error_before_the_forward_one() -> None:
    with pytest.raises(SettingsError, match="budget_seconds=-1: must be a positive number"):
        tune_step(device_type=POLICY, backward_budget_seconds=-1)


def test_progress_is_told_by_phase(records: RecordStore, challenger: str) -> None:
    events: list[Event] = []
    pipeline = FakePipeline(time_us=fast(challenger, 90.0), confirmed_ratio=1.1)
    tune(PROBLEM, POLICY, records=records, pipeline=pipeline, listener=events.append)
    phases = [event.phase for event in events]
    assert list(dict.fromkeys(phases)) == [
        "rank",
        "build",
        "verify",
        "measure",
        "confirm",
        "record",
    ]
    assert all(event.done <= event.total for event in events)
    assert events[-1].best_us == 90.0


def test_the_time_left_follows_the_pace_since_the_first_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("attention_autotuner.tuning.printing.time.monotonic", lambda: now)
    pace = Pace()
    assert (
        pace.seconds_left("build", 1, 101) is None
    )  # the first kernel took a time that nobody saw
    now = 104.0
    assert pace.seconds_left("build", 3, 101) == pytest.approx(2.0 * 98)
    assert pace.seconds_left("verify", 0, 4) is None
    now = 105.0
    assert pace.seconds_left("verify", 1, 4) == pytest.approx(3.0)
    assert pace.seconds_left("verify", 4, 4) is None


# --- the shortlist --------------------------------------------------------------------------------


def shortlist_of(top_k: int) -> list[tuple[Candidate, Estimate]]:
    return shortlist(rank(PROBLEM, POLICY.legal(PROBLEM), POLICY.spec), DEFAULT, top_k)


def test_the_shortlist_starts_with_the_default_and_is_not_all_of_one_shape() -> None:
    chosen = [candidate for candidate, _ in shortlist_of(8)]
    assert chosen[0] == DEFAULT
    assert len(chosen) == len(set(chosen)) == 9
    shapes = [shape_of(candidate) for candidate in chosen[1:]]
    assert max(shapes.count(shape) for shape in shapes) <= 2
    assert len(set(shapes)) >= 5


def test_the_shortlist_holds_the_models_best() -> None:
    ranked = rank(PROBLEM, POLICY.legal(PROBLEM), POLICY.spec)
    best = next(candidate for candidate, _ in ranked if candidate != DEFAULT)
    assert shortlist(ranked, DEFAULT, 1)[1][0] == best


def test_a_short_list_of_few_shapes_is_filled_up() -> None:
    ranked = rank(PROBLEM, POLICY.legal(PROBLEM), POLICY.spec)
    ((shape, _),) = Counter(shape_of(candidate) for candidate, _ in ranked).most_common(1)
    twins = [pair for pair in ranked if shape_of(pair[0]) == shape][:6]
    assert len(shortlist(twins, DEFAULT, 5)) >= 5
    with pytest.raises(ValueError, match="at least 0"):
        shortlist(ranked, DEFAULT, -1)
