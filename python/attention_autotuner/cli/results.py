"""A search for people: its progress, its ranking, and the files it wrote."""

from __future__ import annotations

from typing import Any

from ..codegen.artifact import Artifact
from ..codegen.entries import DamagedError, read_artifact
from ..errors import ArtifactError
from ..operations.params import workspace_bytes
from ..tuning.result import Row, TuneResult
from ..tuning.spills import spilled_bytes
from ..tuning.step import StepResult
from .console import cell, microseconds, named, print_line, print_table, ratio
from .names import knob_headings, knobs

MIB = 1 << 20


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
        return workspace_bytes(result.problem, row.artifact, row.candidate.launch_knobs)
    except ArtifactError:
        return None


def result_json(result: TuneResult | StepResult) -> dict[str, Any]:
    """A search or a step for ``--json``: the result, with each kernel's workspace."""
    said = result.to_json()
    if isinstance(result, StepResult):
        halves = {half.problem.direction: result_json(half) for half in result.results}
        return said | halves
    for shown, row in zip(said["candidates"], result.rows, strict=True):
        shown["workspace_bytes"] = workspace_of(result, row)
    return said


def print_result(result: TuneResult | StepResult, gpu: str | None = None) -> None:
    """Print a ranking, best first, and where its record and kernels are kept; of a step both, and its time.

    Args:
        result: of a search.
        gpu: the GPU that it was for, by default the name of its policy.
    """
    if isinstance(result, StepResult):
        _print_step(result, gpu)
        return
    headings = knob_headings(result.problem)
    title = f"{result.problem.describe()} on {gpu or result.arch}: "
    title += f"{result.status} ranking of {len(result.rows)} candidates"
    if result.record is not None:
        title += f", tuned for {result.record.purpose}"
    workspace = ["workspace MiB"] if result.problem.direction == "backward" else []
    columns = ["#", "candidate", *headings, "regs", "spills B", *workspace]
    columns += ["estimate us", "limiter", "measured us", "of best", "fate"]
    print_table(
        title,
        columns,
        [_cells(place, row, result) for place, row in enumerate(result.rows, start=1)],
        spare=("limiter", "of best"),
        rare=headings,
        notes=[
            (str(place), f"{row.outcome.kind}: {named(row.outcome.reason)}")
            for place, row in enumerate(result.rows, start=1)
            if not row.outcome.ok
        ],
    )
    gain = "" if result.gain is None else f", {100 * result.gain:.1f} % faster than the default"
    how = "" if result.status != "measured" or not gain else _confirmation(result)
    predicted = result.predicted_gain if gain else None
    said = "" if predicted is None else f"; predicted {100 * predicted:.1f} %"
    kept = result.pick == result.default and not result.interrupted
    if result.status == "predicted" and kept:
        usable = (row for row in result.rows if row.outcome.ok)
        fastest = min(usable, key=lambda row: row.estimate.us, default=None)
        if fastest is not None and fastest.candidate != result.pick:
            how = ", the default: nothing was measured, and no estimate is far enough below its"
    print_line(f"pick: {named(result.pick.name)}{gain}{how}{said}")
    if result.interrupted:
        print_line("interrupted: this is the best so far")
    if result.record_path is not None:
        print_line(f"wrote {result.record_path}")
    kernels = [row.artifact for row in result.rows if row.artifact is not None]
    if kernels:
        # Each lies in a folder of its name.
        print_line(f"kernels: {len(kernels)} in {kernels[0].parent.parent}")


def _print_step(result: StepResult, gpu: str | None) -> None:
    for ranking in result.results:
        print_result(ranking, gpu)
        print_line()
    if result.source == "unknown":
        print_line("step: not timed")
        return
    gain = "" if result.gain is None else f", {100 * result.gain:.1f} % faster"
    gain = ", a tie" if result.tied else gain
    print_line(
        f"step, {result.source}: {microseconds(result.picks_us)} us with the picks, "
        f"{microseconds(result.defaults_us)} us with the defaults{gain}"
        + (": the defaults serve" if result.reverted else "")
    )


def files_of(result: TuneResult) -> list[str]:
    """Paths of the record and the libraries of a search."""
    paths = [] if result.record_path is None else [str(result.record_path)]
    return paths + [str(row.artifact) for row in result.rows if row.artifact is not None]


def _confirmation(result: TuneResult) -> str:
    return " (confirmed by a second process)" if result.confirmed else " (not confirmed)"


def _cells(place: int, row: Row, result: TuneResult) -> list[str]:
    artifact, timing = artifact_of(row), row.timing
    report = None if artifact is None else artifact.report
    workspace = []
    if result.problem.direction == "backward":
        size = workspace_of(result, row)
        workspace = ["-" if size is None else f"{size / MIB:,.1f}"]
    fate = "lost" if row.fate == "ok" else row.fate
    if row.tied:
        fate = "tied"
    if row.candidate == result.pick:
        fate = "pick"
    elif row.outcome.ok and row.candidate == result.default:
        fate = "default"
    candidate = [str(place), named(row.candidate.name), *knobs(row.candidate)]
    built = [cell(report and report.registers), cell(report and spilled_bytes(report)), *workspace]
    estimated = [microseconds(row.estimate.us), row.estimate.limiter]
    measured = ["-", "-"]
    if timing is not None:
        ratio_to_best = ratio(timing.ratio_to_best, timing.ratio_high)
        measured = [microseconds(timing.median_us), ratio_to_best]
    return [*candidate, *built, *estimated, *measured, fate]
