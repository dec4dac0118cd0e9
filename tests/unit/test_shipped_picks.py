"""The picks that come with the package must be of the kernels that come with it, and rest on evidence."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.codegen.render import include_closure, include_root, render
from attention_autotuner.codegen.source_digest import source_digest
from attention_autotuner.errors import RecordError
from attention_autotuner.kernels import legality
from attention_autotuner.tuning.record_schema import TuningRecord
from attention_autotuner.tuning.shipped import ShippedPicks, read_shipped
from attention_autotuner.tuning.validity import Miss, PresentKernels, check
from benchmarks.settling import all_evidence
from tests.knob_schemas import KnobsOfAnotherDay

TUNED = Path(str(files("attention_autotuner.tuned")))
FILES = sorted(path.name for path in TUNED.iterdir() if path.name.endswith(".jsonl"))
H200 = "nvidia-h200.jsonl"
MAX_LINE_BYTES = 1_320  # of a pick and its proof, on average: what every installation carries


def picks(name: str = H200) -> list[TuningRecord]:
    """The records of a file whose picks' kernels have the knobs that they had."""
    kept = ShippedPicks(TUNED / name).kept()
    return [item.record for item in kept if item.record is not None and not item.field]


def holding(records: list[TuningRecord], root: Path | None = None) -> list[TuningRecord]:
    """The records whose picks hold by their source, with headers from another folder."""
    present = PresentKernels(source=lambda item: source_digest(render(item), root))
    return [item for item in records if not isinstance(check(item.picked, present), Miss)]


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """A copy of all headers, to be edited."""
    return Path(shutil.copytree(include_root(), tmp_path / "include"))


def test_the_h200_has_picks() -> None:
    assert H200 in FILES
    assert len(picks()) == len(read_shipped(TUNED / H200).lines) >= 183


@pytest.mark.parametrize("name", FILES)
def test_shipped_picks_are_legal_and_of_the_present_kernels(name: str) -> None:
    records = picks(name)
    assert records
    for record in records:
        proof = check(record.picked, PresentKernels())
        assert not isinstance(proof, Miss), (
            f"{record.problem.describe()}: {proof} since this pick was timed; run "
            "`attention-autotuner records rekey --shipped`, and for what it cannot carry over "
            f"`python -m benchmarks.run all --suite attention_{record.problem.direction} --ship "
            "python/attention_autotuner/tuned` on the GPU"
        )
        assert legality.check(record.candidate, resolve(record.arch).spec) is None
        assert record.picked.code_digest is not None
    assert (TUNED / name).stat().st_size < MAX_LINE_BYTES * len(records)


def test_a_file_of_problems_is_said_to_be_no_file_of_picks(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text('{"seqlen_q": 64}\n')
    with pytest.raises(RecordError, match=r"problems\.jsonl .* is no file of picks: .*'schema'"):
        read_shipped(tmp_path / "problems.jsonl")


def test_every_shipped_pick_rests_on_its_line_of_evidence() -> None:
    file = read_shipped(TUNED / H200)
    # Evidence stays where a default has replaced the pick: models learn from it, and not from races of picks alone.
    said = all_evidence(TUNED, file.gpu_name)
    assert {line["evidence"] for line in file.lines} <= set(said)
    for line, record in zip(file.lines, picks(), strict=True):
        measured = said[line["evidence"]]
        assert (measured.problem, measured.arch) == (record.problem, record.arch)
        assert (measured.pick, measured.default) == (record.pick, record.default)
        mine, whole = record.picked.measurement, measured.picked.measurement
        assert mine is not None
        assert whole is not None
        assert mine.median_us == pytest.approx(whole.median_us, rel=1e-5)
        assert mine.ratio_to_best == pytest.approx(whole.ratio_to_best, rel=1e-5)


# --- what disturbs them ---------------------------------------------------------------------------


def test_a_comment_in_every_header_leaves_every_pick_valid(headers: Path) -> None:
    records = picks()
    for path in headers.rglob("*.*"):
        text = path.read_text(encoding="utf-8")
        path.write_text(f"/* a comment\n   of two lines */ // and one more\n\n{text}\n\n", "utf-8")
    assert len(holding(records, headers)) == len(records)


def test_a_moved_header_leaves_every_pick_valid(headers: Path) -> None:
    header, moved = (
        "attention_autotuner/common/scalars.cuh",
        "attention_autotuner/whole_numbers.cuh",
    )
    (headers / header).rename(headers / moved)
    count = 0
    for path in headers.rglob("*.*"):
        text = path.read_text(encoding="utf-8")
        new = text.replace(f'#include "{header}"', f"#include <{moved}>")
        count += new != text
        path.write_text(new, encoding="utf-8")
    assert count
    assert len(holding(picks(), headers)) == len(picks())


def test_a_change_of_one_kernel_asks_for_that_kernel_alone(headers: Path) -> None:
    name = "attention_backward_sm90/mainloop.cuh"
    path = headers / "attention_autotuner" / name
    path.write_text(
        path.read_text(encoding="utf-8") + "\nstatic constexpr int kMore = 1;\n", "utf-8"
    )
    records = picks()
    lost = {item.candidate.kernel for item in records} - {
        item.candidate.kernel for item in holding(records, headers)
    }
    assert lost == {"attention_backward_sm90"}
    kept = {item.problem for item in holding(records, headers)}
    for record in records:
        uses = f"attention_autotuner/{name}" in include_closure(render(record.candidate).text)
        assert (record.problem in kept) == (not uses)


def test_a_knob_more_of_one_kernel_drops_no_record_of_another(
    knobs_of_another_day: KnobsOfAnotherDay,
) -> None:
    before = picks()
    knobs_of_another_day("attention_forward_sm90")
    after = picks()
    lost = {item.problem for item in before} - {item.problem for item in after}
    assert lost == {
        item.problem for item in before if item.candidate.kernel == "attention_forward_sm90"
    }
    assert lost
    assert {item.candidate.kernel for item in after} == {
        item.candidate.kernel for item in before
    } - {"attention_forward_sm90"}
