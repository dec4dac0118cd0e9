"""How a search looks to people: its progress, its ranking, and the files it wrote."""

from __future__ import annotations

from typing import Any

from ..codegen.artifact import Artifact
from ..codegen.entries import DamagedError, read_artifact
from ..errors import ArtifactError
from ..operations.params import workspace_bytes
from ..tuning.progress import Event, Listener
from ..tuning.result import Row, TuneResult
from ..tuning.spills import spilled_bytes
from ..tuning.step import StepResult
from .console import Show, microseconds, print_line, print_table
from .knob_cells import knob_headings, knobs

MIB = 1 << 20


def listener(show: Show) -> Listener:
    """A listener that shows a search's events."""

    def listen(event: Event) -> None:
        show(
            event.phase,
            event.done,
            event.total,
            event.message,
            best_us=event.best_us,
            seconds_left=event.seconds_left,
        )

    return listen


def artifact_of(row: Row) -> Artifact | None:
    """The built artifact of a row, as the store describes it; None where it was not built."""
    if row.artifact is None:
        return None
    try:
        return read_artifact(row.artifact.parent)
    except DamagedError:
        return None


def workspace_of(result: TuneResult, row: Row) -> int | None:
    """Bytes of workspace that a row's kernel takes for the problem; None where it was not built or cannot be loaded."""
    if row.artifact is None:
        return None
    try:
        return workspace_bytes(result.problem, row.artifact)
    except ArtifactError:
        return None


def result_json(result: TuneResult) -> dict[str, Any]:
    """A search for ``--json``: the result, with each kernel's workspace."""
    said = result.to_json()
    for shown, row in zip(said["candidates"], result.rows, strict=True):
        shown["workspace_bytes"] = workspace_of(result, row)
    return said


def step_json(result: StepResult) -> dict[str, Any]:
    """A step for ``--json``: the result, with each kernel's workspace."""
    backward = result.backward
    return result.to_json() | {
        "forward": result_json(result.forward),
        "backward": None if backward is None else result_json(backward),
    }


def print_result(result: TuneResult) -> None:
    """Print a ranking, best first, and where what was learned is kept."""
    rows = [_cells(place, row, result) for place, row in enumerate(result.rows, start=1)]
    title = f"{result.problem.describe()} on {result.arch}: {result.status} ranking of {len(rows)} candidates"
    if result.record is not None:
        title += f", tuned for {result.record.purpose}"
    measures = ["registers", "spills B", "estimate us", "limiter", "measured us", "of best", "fate"]
    if _needs_workspace(result):
        measures.insert(2, "workspace MiB")
    print_table(title, ["#", *knob_headings(result.problem), *measures], rows)
    gain = "" if result.gain is None else f", {100 * result.gain:.1f} % faster than the default"
    how = "" if result.status != "measured" or not gain else _confirmation(result)
    print_line(f"pick: {result.pick.name}{gain}{how}")
    if result.interrupted:
        print_line("interrupted: this is the best so far")
    for path in files_of(result):
        print_line(f"wrote {path}")


def print_step(result: StepResult) -> None:
    """Print both rankings, and what a whole step takes."""
    for one in result.results:
        print_result(one)
        print_line()
    if result.source == "unknown":
        print_line("step: not timed")
        return
    gain = "" if result.gain is None else f", {100 * result.gain:.1f} % faster"
    print_line(
        f"step, {result.source}: {microseconds(result.picks_us)} us with the picks, "
        f"{microseconds(result.defaults_us)} us with the defaults{gain}"
    )


def files_of(result: TuneResult) -> list[str]:
    """What a search left behind: the record and the libraries."""
    paths = [] if result.record_path is None else [str(result.record_path)]
    return paths + [str(row.artifact) for row in result.rows if row.artifact is not None]


def _needs_workspace(result: TuneResult) -> bool:
    return result.problem.direction == "backward"


def _confirmation(result: TuneResult) -> str:
    return " (confirmed by a second process)" if result.confirmed else " (not confirmed)"


def _cells(place: int, row: Row, result: TuneResult) -> list[str]:
    artifact, timing = artifact_of(row), row.timing
    registers = spills = "-"
    if artifact is not None:
        report = artifact.report
        registers = str(report.registers)
        spills = str(spilled_bytes(report))
    workspace = []
    if _needs_workspace(result):
        taken = workspace_of(result, row)
        workspace = ["-" if taken is None else f"{taken / MIB:,.1f}"]
    fate = row.fate if row.outcome.ok else f"{row.outcome.kind}: {row.outcome.reason}"
    if row.candidate == result.pick:
        fate = "pick"
    elif row.outcome.ok and row.candidate == result.default:
        fate = "default"
    return [
        str(place),
        *knobs(row.candidate),
        registers,
        spills,
        *workspace,
        microseconds(row.estimate.us),
        row.estimate.limiter,
        "-" if timing is None else microseconds(timing.median_us),
        "-" if timing is None else f"{timing.ratio_to_best:.3f}",
        fate,
    ]
