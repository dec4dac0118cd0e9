from __future__ import annotations

import json
import logging
import multiprocessing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed, Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import RecordError, StoreError
from attention_autotuner.kernels.configs import knob_schema
from attention_autotuner.tuning import environment as environment_module
from attention_autotuner.tuning.environment import Environment, collect, parse_smi
from attention_autotuner.tuning.lookup import Hit, Query, distance
from attention_autotuner.tuning.record_schema import (
    CandidateEntry,
    TuningRecord,
    space_digest,
)
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipped import ShippedRecords
from attention_autotuner.tuning.shipping import evidence, evidence_path, ship
from attention_autotuner.tuning.validity import Miss, PresentKernels
from tests import record_entries
from tests.candidates import forward
from tests.knob_schemas import KnobsOfAnotherDay

H200 = Environment(
    gpu_name="NVIDIA H200",
    num_sms=132,
    driver="580.1",
    cuda_driver="13.0",
    cuda_runtime="13.0",
    torch="2.13.0",
    nvcc="13.0.88",
    cutlass="4.2.0",
    time_utc="2030-01-01T00:00:00+00:00",
)
PROBLEM = Problem(seqlen_q=3000, seqlen_k=3000, causal=True)


FAST, SLOW, BROKEN = forward(), forward(block_n=32), forward(block_n=128)


def entry(known: Candidate, us: float | None, outcome: Outcome | None = None) -> CandidateEntry:
    digest = f"digest of {known.name}"
    return record_entries.entry(
        known, us, outcome, environment=H200.digest, source_digest=digest, estimate_us=us
    )


def record(problem: Problem = PROBLEM, **changes: Any) -> TuningRecord:
    values: dict[str, Any] = {
        "problem": problem.bucketed(),
        "measured_problem": problem,
        "purpose": problem.direction,
        "arch": "H100",
        "space_digest": space_digest([FAST, SLOW, BROKEN]),
        "pick": FAST.name,
        "default": SLOW.name,
        "confirmed": True,
        "entries": (
            entry(FAST, 100.0),
            entry(SLOW, 110.0),
            entry(BROKEN, None, BuildFailed(reason="ptxas said no", log="/tmp/build.log")),
        ),
        "environment": H200,
        "environments": {H200.digest: H200},
    }
    return TuningRecord(**values | changes)


EDITED = PresentKernels(source=lambda known: "edited", exact=lambda known: "edited")


def query(problem: Problem = PROBLEM, **changes: Any) -> Query:
    values: dict[str, Any] = {"problem": problem, "arch": "H100", "environment": H200}
    return Query(**values | changes)


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "records")


def hit(answer: Hit | Miss) -> Hit:
    assert isinstance(answer, Hit), answer
    return answer


def missed(answer: Hit | Miss) -> str:
    assert isinstance(answer, Miss), answer
    return answer.field


# --- what goes in comes out -----------------------------------------------------------------------


def test_a_record_survives_json() -> None:
    known = record()
    assert TuningRecord.from_json(json.loads(json.dumps(known.to_json()))) == known


def test_a_record_says_what_it_was_tuned_for(store: RecordStore) -> None:
    store.put(record(purpose="step"))
    assert hit(store.find(query())).record.purpose == "step"
    store.put(record())
    assert hit(store.find(query())).record.purpose == "forward"
    with pytest.raises(RecordError, match="purpose must be 'forward' or 'step'"):
        record(purpose="backward")
    without = record().to_json()
    del without["purpose"]
    with pytest.raises(RecordError, match="lacks the field 'purpose'"):
        TuningRecord.from_json(without)


def test_a_record_of_the_first_schema_is_missed_and_left_alone(store: RecordStore) -> None:
    path = store.path(PROBLEM, "H100", H200.gpu_name)
    path.parent.mkdir(parents=True)
    old = record().to_json() | {"schema": 1}
    del old["purpose"]
    path.write_text(json.dumps(old))
    assert store.find(query()) == Miss(field="schema", expected="3", recorded="1")
    assert list(store.records()) == []
    assert path.is_file()
    store.put(record())
    assert hit(store.find(query())).record == record()


def test_a_record_serves_only_calls_that_ask_for_the_same_determinism() -> None:
    free = replace(PROBLEM, direction="backward")
    strict = replace(free, deterministic=True)
    assert distance(free, free) == 0.0
    assert distance(strict, free) is None
    assert distance(free, strict) is None


def test_a_written_record_is_found_with_every_candidates_own_fate(store: RecordStore) -> None:
    store.put(record())
    answer = hit(store.find(query()))
    assert answer.exact
    assert answer.unverified == ()
    assert answer.record == record()
    assert answer.record.candidate == FAST
    damaged = answer.record.entry(BROKEN.name)
    assert damaged is not None
    assert damaged.outcome == BuildFailed(reason="ptxas said no", log="/tmp/build.log")


def test_lengths_of_one_bucket_share_a_record(store: RecordStore) -> None:
    store.put(record())
    assert hit(store.find(query(replace(PROBLEM, seqlen_q=2049, seqlen_k=4096)))).exact
    assert not hit(store.find(query(replace(PROBLEM, seqlen_q=2048, seqlen_k=2048)))).exact


def test_records_list_what_is_there(store: RecordStore) -> None:
    store.put(record())
    store.put(record(replace(PROBLEM, causal=False)))
    assert {candidate.problem.causal for _, candidate in store.records()} == {False, True}
    assert not list(store.root.rglob("*.tmp"))


# --- hard and soft fields -------------------------------------------------------------------------


def test_nothing_recorded_is_a_miss_of_the_problem(store: RecordStore) -> None:
    assert store.find(query()) == Miss(
        field="problem", expected=PROBLEM.bucketed().describe(), recorded="no record"
    )


def test_another_gpu_is_named_as_the_reason(store: RecordStore) -> None:
    store.put(record())
    answer = store.find(query(environment=replace(H200, gpu_name="NVIDIA A100")))
    assert answer == Miss(field="gpu_name", expected="NVIDIA A100", recorded="NVIDIA H200")


def test_another_sm_count_is_a_miss(store: RecordStore) -> None:
    store.put(record())
    assert missed(store.find(query(environment=replace(H200, num_sms=114)))) == "num_sms"


def test_another_kernel_source_is_a_miss(store: RecordStore) -> None:
    store.put(record())
    same = query(kernels=PresentKernels(source=lambda known: f"digest of {known.name}"))
    assert hit(store.find(same)).record.pick == FAST.name
    answer = store.find(query(kernels=EDITED))
    assert answer == Miss(
        field="source_digest", expected="edited", recorded=f"digest of {FAST.name}"
    )


def test_the_same_machine_code_is_the_same_kernel(store: RecordStore) -> None:
    store.put(record(entries=(replace(entry(FAST, 100.0), code_digest="code"), entry(SLOW, 110.0))))
    same = replace(EDITED, code=lambda known: "code")
    assert hit(store.find(query(kernels=same))).record.pick == FAST.name
    other = replace(EDITED, code=lambda known: "other")
    answer = store.find(query(kernels=other))
    assert answer == Miss(field="code_digest", expected="other", recorded="code")
    unknown = store.find(query(kernels=EDITED))
    assert isinstance(unknown, Miss)
    assert (unknown.field, unknown.expected) == ("source_digest", "edited")
    assert "records rekey" in unknown.advice


def test_other_knobs_of_its_kernel_are_a_miss_that_says_what_helps(
    store: RecordStore, knobs_of_another_day: KnobsOfAnotherDay
) -> None:
    store.put(record())
    then = knob_schema(FAST.kernel)
    knobs_of_another_day("chunks_sm80")
    assert hit(store.find(query())).record.pick == FAST.name
    knobs_of_another_day(FAST.kernel)
    answer = store.find(query())
    assert isinstance(answer, Miss)
    assert (answer.field, answer.recorded) == ("knob_schema", then)
    assert "records rekey" in answer.advice
    assert list(store.records()) == []


def test_another_schema_is_a_miss_and_not_damage(store: RecordStore) -> None:
    store.put(record())
    path = store.path(PROBLEM, "H100", H200.gpu_name)
    path.write_text(json.dumps({"schema": 99, "problem": "of another shape"}))
    assert store.find(query()) == Miss(field="schema", expected="3", recorded="99")
    assert path.exists()


@pytest.mark.parametrize(
    "name", ["driver", "cuda_driver", "cuda_runtime", "torch", "nvcc", "cutlass"]
)
def test_soft_fields_are_served_marked_unless_strict(store: RecordStore, name: str) -> None:
    store.put(record())
    other = Environment.from_json({**H200.to_json(), name: "99"})
    assert hit(store.find(query(environment=other))).unverified == (name,)
    answer = store.find(query(environment=other, strict=True))
    assert answer == Miss(field=name, expected="99", recorded=str(getattr(H200, name)))


def test_soft_fields_that_are_not_known_now_are_not_compared(store: RecordStore) -> None:
    store.put(record())
    bare = Environment(gpu_name=H200.gpu_name, num_sms=132)
    assert hit(store.find(query(environment=bare))).unverified == ()


def test_a_changed_list_of_candidates_is_soft(store: RecordStore) -> None:
    store.put(record())
    answer = hit(store.find(query(space_digest=space_digest([FAST]))))
    assert answer.unverified == ("space_digest",)


def test_clocks_and_time_of_day_do_not_matter(store: RecordStore) -> None:
    store.put(record())
    later = replace(H200, time_utc="2031", sm_clock_mhz=1200.0, power_state="P2")
    assert hit(store.find(query(environment=later))).unverified == ()


def test_every_environment_field_is_hard_soft_or_only_noted() -> None:
    from attention_autotuner.tuning.environment import HARD_FIELDS, SOFT_FIELDS

    noted = {
        "compute_capability",
        "sm_clock_mhz",
        "memory_clock_mhz",
        "max_sm_clock_mhz",
        "power_state",
        "power_draw_w",
        "power_limit_w",
        "temperature_c",
        "python",
        "package",
        "time_utc",
    }
    assert {f.name for f in fields(Environment)} == noted | set(HARD_FIELDS) | set(SOFT_FIELDS)


# --- neighbours -----------------------------------------------------------------------------------


def test_the_nearest_bucket_serves_and_says_so(store: RecordStore) -> None:
    for seqlen in (512, 16384):
        store.put(record(replace(PROBLEM, seqlen_q=seqlen, seqlen_k=seqlen)))
    answer = hit(store.find(query(replace(PROBLEM, seqlen_q=1000, seqlen_k=1000))))
    assert not answer.exact
    assert answer.record.problem.seqlen_q == 512


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": False},
        {"dtype": "bf16"},
        {"dim_qk": 64, "dim_v": 64},
        {"alignment_bytes": 2},
        {"seqlen_q": 64, "seqlen_k": 64},
    ],
)
def test_no_neighbour_of_another_kind_or_far_away_serves(
    store: RecordStore, changes: dict[str, Any]
) -> None:
    store.put(record())
    assert missed(store.find(query(replace(PROBLEM, **changes)))) == "problem"


def test_true_dims_of_the_same_class_are_neighbours() -> None:
    near = distance(PROBLEM, replace(PROBLEM, dim_qk=120))
    assert near == 0.25
    assert distance(PROBLEM, PROBLEM) == 0.0
    assert distance(PROBLEM, replace(PROBLEM, batch=8)) == 1.0
    assert distance(PROBLEM, replace(PROBLEM, heads_kv=4)) == 2.0


def test_few_tiles_are_no_neighbours_of_many() -> None:
    """The pick of 16 x 32 heads of 1024 tokens took 33 us at 2 x 20, where the default takes 26."""
    many = Problem(batch=16, heads_q=32, heads_kv=32, seqlen_q=1024, seqlen_k=1024)
    assert distance(many, replace(many, batch=4, heads_q=20, heads_kv=20)) is not None
    few = replace(many, batch=2, heads_q=20, heads_kv=20)
    assert distance(few, many) is None
    assert distance(many, few) is None
    assert distance(few, replace(few, batch=1)) == 1.0
    assert distance(few, replace(few, seqlen_q=512, seqlen_k=512)) == 2.0
    long = Problem(batch=4, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_k=4096)
    assert distance(long, replace(long, heads_kv=2)) == 3.0
    gradients = replace(long, direction="backward")
    assert distance(gradients, replace(gradients, heads_kv=2)) is None  # blocks of keys are few


# --- merging, damage, races -----------------------------------------------------------------------


def test_adding_a_candidate_keeps_the_others_timings(store: RecordStore) -> None:
    store.put(record())
    new = forward(num_stages=1)
    later = replace(H200, time_utc="2030-01-02")
    timing = replace(entry(new, 90.0).measurement, environment=later.digest)  # type: ignore[type-var]
    merged = store.put(
        record(
            pick=new.name,
            entries=(replace(entry(new, 90.0), measurement=timing),),
            environment=later,
            environments={later.digest: later},
        )
    )
    assert {known.candidate.name for known in merged.entries} == {
        new.name,
        FAST.name,
        SLOW.name,
        BROKEN.name,
    }
    assert set(merged.environments) == {later.digest, H200.digest}
    answer = hit(store.find(query(environment=later)))
    assert answer.record.candidate == new
    kept = answer.record.entry(FAST.name)
    assert kept is not None
    assert kept.measurement is not None
    assert answer.record.environments[kept.measurement.environment] == H200


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 99}', "\x00\xff", '{"schema": 2}', '{"schema": 3}']
)
def test_a_damaged_record_is_set_aside_logged_and_missed(
    store: RecordStore, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = store.path(PROBLEM, "H100", H200.gpu_name)
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        answer = store.find(query())
    assert isinstance(answer, Miss)
    if text != '{"schema": 99}':  # that one is another schema, not damage
        assert not path.exists()
        assert "damaged tuning record" in caplog.text
        assert list((store.root / "quarantine").iterdir())
    store.put(record())
    assert hit(store.find(query())).exact


def test_a_record_whose_pick_is_missing_is_damage(store: RecordStore) -> None:
    store.put(record())
    path = store.path(PROBLEM, "H100", H200.gpu_name)
    document = json.loads(path.read_text())
    document["pick"] = "nobody"
    path.write_text(json.dumps(document))
    assert missed(store.find(query())) == "record"
    assert not path.exists()


def test_records_check_themselves() -> None:
    with pytest.raises(RecordError, match="bucketed"):
        replace(record(), problem=PROBLEM)
    with pytest.raises(RecordError, match="pick"):
        record(pick=BROKEN.name)
    with pytest.raises(RecordError, match="duplicates"):
        record(entries=(entry(FAST, 1.0), entry(FAST, 2.0)))


def test_an_unwritable_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(StoreError, match="file"):
        RecordStore(blocked / "records").put(record())
    assert missed(RecordStore(blocked / "records").find(query())) == "problem"


def _put_one(arguments: tuple[Path, int]) -> None:
    root, index = arguments
    known = forward(block_m=64, block_n=16 * (index + 1))
    RecordStore(root).put(record(pick=known.name, entries=(entry(known, 100.0 + index),)))


def test_many_processes_lose_nothing(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.map(_put_one, [(tmp_path, index) for index in range(8)])
    answer = hit(RecordStore(tmp_path).find(query()))
    assert len(answer.record.entries) == 8


# --- shipped picks --------------------------------------------------------------------------------


def test_shipped_records_are_read_by_gpu_and_keep_only_measured_entries(tmp_path: Path) -> None:
    path = ship(tmp_path, "NVIDIA H200", [record()])
    assert path.name == "nvidia-h200.jsonl"
    shipped = ShippedRecords(tmp_path)
    answer = hit(shipped.find(query()))
    assert answer.layer == "shipped"
    assert {known.candidate.name for known in answer.record.entries} == {FAST.name, SLOW.name}
    said = evidence(evidence_path(tmp_path, "NVIDIA H200"))
    assert list(said.values()) == [record()]
    assert missed(shipped.find(query(environment=replace(H200, gpu_name="GPU")))) == "problem"
    assert missed(shipped.find(query(environment=Environment()))) == "gpu_name"
    assert missed(shipped.find(query(environment=replace(H200, num_sms=1)))) == "num_sms"
    assert not hit(shipped.find(query(replace(PROBLEM, batch=8)))).exact


def test_shipped_picks_of_forwards_serve_the_lengths_that_were_measured(tmp_path: Path) -> None:
    ship(tmp_path, "NVIDIA H200", [record()])
    for seqlen, serves in ((2993, True), (3008, True), (2992, False), (3009, False), (9000, False)):
        asked = query(replace(PROBLEM, seqlen_q=seqlen, seqlen_k=seqlen))
        assert isinstance(ShippedRecords(tmp_path).find(asked), Hit) == serves


def test_a_damaged_shipped_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "nvidia-h200.jsonl").write_text("{")
    with pytest.raises(RecordError, match="nvidia-h200"):
        ShippedRecords(tmp_path).find(query())


def test_the_packages_own_shipped_records_are_readable() -> None:
    here = ShippedRecords().find(query(environment=replace(H200, gpu_name="no such GPU")))
    assert missed(here) == "problem"


# --- the environment ------------------------------------------------------------------------------


def test_the_environment_of_any_machine_has_python_and_time() -> None:
    here = collect(nvcc="13.0.88")
    assert here.python
    assert here.time_utc
    assert here.nvcc == "13.0.88"
    assert Environment.from_json(json.loads(json.dumps(here.to_json()))) == here


def test_nvidia_smi_is_read_with_what_it_does_not_know() -> None:
    here = parse_smi("1980, 3201, 1980, P0, 121.30, [N/A], 40, 580.95.05\n")
    assert here["sm_clock_mhz"] == 1980.0
    assert here["power_state"] == "P0"
    assert here["power_limit_w"] is None
    assert here["driver"] == "580.95.05"
    assert parse_smi("No devices were found") == {}


def test_the_drivers_version_is_read_without_starting_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def smi(gpu: str) -> dict[str, str]:
        asked.append(gpu)
        return {"driver": "570.1"}

    device = {"gpu_name": "NVIDIA H200", "num_sms": 132, "uuid": "GPU-1"}
    file = tmp_path / "version"
    monkeypatch.setattr(environment_module, "_read_driver", lambda index: dict(device))
    monkeypatch.setattr(environment_module, "_read_smi", smi)
    monkeypatch.setattr(environment_module, "_DRIVER_FILES", (tmp_path / "absent", file))
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue\nGCC 12.3.0\n")
    assert collect(state=False).driver == "580.159.04"
    assert asked == []
    file.unlink()
    assert collect(state=False).driver == "570.1"
    assert collect().driver == "570.1"
    assert asked == ["GPU-1", "GPU-1"]
