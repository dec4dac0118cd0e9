"""`records` and what it does, with digests of machine code that are said and not compiled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import A100
from attention_autotuner.cli import main, recording
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.render import kernel_digest, render
from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.codegen.source_digest import source_digest
from attention_autotuner.codegen.store import Store
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed, Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import rekeying
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.record_schema import CandidateEntry, TuningRecord, space_digest
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.rekeying import rekey, wanted
from attention_autotuner.tuning.shipped import read_shipped
from attention_autotuner.tuning.shipping import ship, shipped
from tests.knob_schemas import KnobsOfAnotherDay
from tests.record_entries import entry

COMPILER = {"nvcc": "13.0.88", "cutlass": "4.2.0"}
GPU = Environment(
    gpu_name="NVIDIA H200", num_sms=132, compute_capability="9.0", nvcc="13.0.88", cutlass="4.2.0"
)
TARGET = BuildTarget(arch="90")
PROBLEM = Problem(dim_qk=64, dim_v=64)
PICK, DEFAULT, THIRD = A100().legal(PROBLEM)[:3]
SOURCE = source_digest(render(PICK))

Capture = pytest.CaptureFixture[str]


def timed(candidate: Candidate, source: str, code: str | None, **changes: Any) -> CandidateEntry:
    made = entry(candidate, 100.0, source_digest=source, code_digest=code, environment=GPU.digest)
    return replace(made, **changes)


def record(first: CandidateEntry, problem: Problem = PROBLEM, **changes: Any) -> TuningRecord:
    others = [timed(item, source_digest(render(item)), "c") for item in (DEFAULT, THIRD)]
    values: dict[str, Any] = {
        "problem": problem.bucketed(), "measured_problem": problem, "purpose": "forward",
        "arch": "H100", "space_digest": space_digest([PICK]), "pick": PICK.name,
        "default": DEFAULT.name, "confirmed": True, "entries": (first, *others),
        "environment": GPU, "environments": {GPU.digest: GPU},
    }  # fmt: skip
    return TuningRecord(**values | changes)


def rekeyed(
    first: CandidateEntry, code: str | Outcome | None, compiler: dict[str, str] | None = None
) -> tuple[CandidateEntry | None, str, str]:
    """The pick's new entry, its state, and why."""
    codes = {} if code is None else {(PICK, TARGET): code}
    new, said = rekey(record(first), codes, compiler=compiler or COMPILER)
    assert [item.pick for item in said] == [True, False]
    assert said[1].state == "valid"
    return None if new is None else new.picked, said[0].state, said[0].reason


# --- one entry ------------------------------------------------------------------------------------


def test_what_holds_is_left_alone() -> None:
    whole = timed(PICK, SOURCE, "code")
    assert rekeyed(whole, None) == (None, "valid", "")
    assert wanted([record(whole)], every=True) == []


def test_a_missing_code_digest_is_filled_in_while_the_source_holds() -> None:
    bare = timed(PICK, SOURCE, None)
    assert wanted([record(bare), record(bare)], every=True) == [(PICK, TARGET)]
    assert rekeyed(bare, "code") == (timed(PICK, SOURCE, "code"), "filled", "")
    other = rekeyed(bare, "code", {**COMPILER, "nvcc": "13.1.2"})
    assert other[:2] == (None, "valid")
    assert "nvcc (13.1.2, it was measured with 13.0.88)" in other[2]


def test_an_entry_of_the_schema_before_gets_both_while_its_bytes_hold() -> None:
    exact = kernel_digest(render(PICK))
    old = timed(PICK, "", None, kernel_digest=exact)
    assert wanted([record(old)], every=False) == [(PICK, TARGET)]
    assert rekeyed(old, "code") == (timed(PICK, SOURCE, "code"), "filled", "")
    lost = timed(PICK, "", None, kernel_digest="edited")
    assert wanted([record(lost)], every=False) == []
    assert rekeyed(lost, "code")[:2] == (None, "unknown")


def test_the_same_machine_code_carries_a_measurement_over() -> None:
    moved = timed(PICK, "before", "code")
    assert wanted([record(moved)], every=False) == [(PICK, TARGET)]
    assert rekeyed(moved, "code") == (timed(PICK, SOURCE, "code"), "carried", "")
    assert rekeyed(moved, "other")[:2] == (None, "changed")
    state, reason = rekeyed(moved, "other", {**COMPILER, "cutlass": "4.3"})[1:]
    assert (state, "so does cutlass" in reason) == ("unknown", True)
    assert rekeyed(moved, BuildFailed(reason="no such name"))[1] == "unknown"
    assert "no such name" in rekeyed(moved, BuildFailed(reason="no such name"))[2]
    assert rekeyed(moved, None)[1:] == ("unknown", "it was not built")


def test_other_knobs_are_no_matter_where_source_or_code_is_the_same() -> None:
    assert rekeyed(timed(PICK, SOURCE, "code", knob_schema="before"), None) == (
        timed(PICK, SOURCE, "code"), "valid", "",
    )  # fmt: skip
    moved = timed(PICK, "before", "code", knob_schema="before")
    assert rekeyed(moved, "code")[1] == "carried"


def test_pick_and_default_are_looked_at_unless_all_are_asked_for() -> None:
    third = replace(record(timed(PICK, SOURCE, "c")).entries[2], code_digest=None)
    item = record(timed(PICK, SOURCE, "c"))
    item = replace(item, entries=(*item.entries[:2], third))
    assert wanted([item], every=False) == []
    assert wanted([item], every=True) == [(THIRD, TARGET)]
    assert len(rekey(item, {}, compiler=None)[1]) == 2
    assert len(rekey(item, {}, compiler=None, every=True)[1]) == 3


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordStore]:
    """The user's records; what is built has the machine code `code`."""

    class Tools:
        def identity(self) -> dict[str, str]:
            return COMPILER

    def build_codes(keys: Any, **options: Any) -> dict[Any, str]:
        return dict.fromkeys(keys, "code")

    monkeypatch.setattr(recording, "find_toolchain", Tools)
    monkeypatch.setattr(recording, "find_disassembler", lambda: Path("cuobjdump"))
    monkeypatch.setattr(recording, "build_codes", build_codes)
    with settings.override(cache_dir=tmp_path / "cache"):
        yield RecordStore(tmp_path / "cache" / "records")


def said(capsys: Capture, *arguments: str, status: int = 0) -> Any:
    assert main(["records", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_own_records_are_verified_and_rekeyed(store: RecordStore, capsys: Capture) -> None:
    store.put(record(timed(PICK, "before", "code")))
    store.put(record(timed(PICK, "before", "other"), replace(PROBLEM, causal=True)))
    before = said(capsys, "verify", status=1)
    assert (before["valid"], before["total"]) == (0, 2)
    assert all("records rekey" in item["reason"] for item in before["records"])
    answer = said(capsys, "rekey", status=1)
    assert answer["states"] == {"carried": 1, "changed": 1, "valid": 2}
    assert answer["written"] == 1
    after = said(capsys, "verify", status=1)
    assert (after["valid"], after["total"]) == (1, 2)
    assert said(capsys, "verify", "*d64")["records"][0]["proof"] == "source"
    assert said(capsys, "rekey", "*d64")["written"] == 0


def test_records_are_listed_shown_and_removed(store: RecordStore, capsys: Capture) -> None:
    kept = store.put(record(timed(PICK, SOURCE, "code")))
    store.put(record(timed(PICK, SOURCE, "code"), replace(PROBLEM, causal=True)))
    listed = said(capsys, "ls")["records"]
    assert [item["pick"] for item in listed] == [PICK.name] * 2
    assert {item["kernel"] for item in listed} == {"scores_forward_sm80"}
    assert said(capsys, "show", "*d64")["records"] == [json.loads(json.dumps(kept.to_json()))]
    assert main(["records", "show", "*d64"]) == 0
    assert SOURCE[:16] in capsys.readouterr().out
    assert main(["records", "ls"]) == 0
    assert "2 records" in capsys.readouterr().out
    assert [item["problem"] for item in said(capsys, "rm", "* causal")["removed"]] == [
        replace(PROBLEM, causal=True).bucketed().describe()
    ]
    assert [item.problem for _, item in store.records()] == [PROBLEM.bucketed()]


def test_a_record_of_another_schema_is_listed_with_the_reason(
    store: RecordStore, capsys: Capture
) -> None:
    store.put(record(timed(PICK, SOURCE, "code")))
    (path,) = store.root.glob("*/*/*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 1}))
    (item,) = said(capsys, "ls")["records"]
    assert (item["pick"], item["reason"]) == (None, "schema 1")
    assert said(capsys, "verify", status=1)["records"][0]["field"] == "schema"
    assert said(capsys, "rekey", status=1)["states"] == {"unknown": 1}
    assert json.loads(path.read_text())["schema"] == 1


def test_a_file_of_picks_is_rekeyed_line_by_line(
    store: RecordStore, tmp_path: Path, capsys: Capture
) -> None:
    lost = record(timed(PICK, "before", "other"), replace(PROBLEM, causal=True))
    held = record(timed(PICK, "before", "code"))
    path = ship(tmp_path, "NVIDIA H200", [held, lost])
    lines = read_shipped(path).lines
    answer = said(capsys, "rekey", "--file", str(path), status=1)
    assert answer["states"] == {"carried": 1, "changed": 1, "valid": 2}
    now = read_shipped(path).lines
    assert [item == other for item, other in zip(lines, now, strict=True)] == [False, True]
    first, second = shipped(tmp_path, "NVIDIA H200")
    assert (first.picked.source_digest, second.picked.source_digest) == (SOURCE, "before")
    assert now[0]["evidence"] == lines[0]["evidence"]
    assert said(capsys, "rm", "* causal", "--file", str(path))["removed"]
    assert len(read_shipped(path).lines) == 1
    assert main(["records", "ls", "--file", str(tmp_path / "none.jsonl")]) == 1


def test_knobs_of_another_day_are_named_and_need_no_build(
    store: RecordStore, capsys: Capture, knobs_of_another_day: KnobsOfAnotherDay
) -> None:
    store.put(record(timed(PICK, SOURCE, "code")))
    knobs_of_another_day(PICK.kernel)
    (item,) = said(capsys, "verify", status=1)["records"]
    assert item["field"] == "knob_schema"
    assert said(capsys, "rekey")["states"] == {"valid": 2}
    assert said(capsys, "verify")["valid"] == 1


def test_nothing_is_carried_over_without_a_disassembler(
    store: RecordStore, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(record(timed(PICK, "before", "code")))
    monkeypatch.setattr(recording, "find_disassembler", lambda: None)
    assert main(["records", "rekey"]) == 1
    assert "cuobjdump" in capsys.readouterr().err


def test_a_digest_that_counts_the_code_of_the_host_is_taken_again_while_the_source_holds(
    store: RecordStore, capsys: Capture
) -> None:
    former = "1" * 64
    store.put(record(timed(PICK, SOURCE, former)))
    store.put(record(timed(PICK, "before", former), replace(PROBLEM, causal=True)))
    before = said(capsys, "verify", status=1)["records"]
    assert sorted(item["proof"] or item["field"] for item in before) == ["source", "source_digest"]
    answer = said(capsys, "rekey", status=1)
    assert answer["states"] == {"filled": 1, "unknown": 1, "valid": 2}
    codes = {item.picked.source_digest: item.picked.code_digest for _, item in store.records()}
    assert codes == {SOURCE: "code", "before": None}


@pytest.mark.parametrize("former", [None, "1" * 64])
def test_an_artifact_from_before_code_digests_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, former: str | None
) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"code")
    store = Store(tmp_path / "store")
    artifact = Artifact(
        name=PICK.name, digest="1" * 64, path=library, report=parse_ptxas(""), kernel_digest="k",
        target=TARGET, toolchain=COMPILER, build_seconds=1.0, build_peak_bytes=1, code_digest=former,
    )  # fmt: skip
    artifact = store.publish(source="", library=library, log="", artifact=artifact)
    artifact = Artifact.from_json(artifact.to_json(), artifact.path)
    batches = []

    def build(kernels: Any, target: BuildTarget, **options: Any) -> list[Any]:
        batches.append([kernel.name for kernel in kernels])
        return [artifact if len(batches) == 1 else replace(artifact, code_digest="code")]

    monkeypatch.setattr(rekeying, "build", build)
    codes = rekeying.build_codes([(PICK, TARGET)], toolchain=None, store=store)  # type: ignore[arg-type]
    assert codes == {(PICK, TARGET): "code"}
    assert batches == [[PICK.name]] * 2
    assert not artifact.path.parent.exists()
