"""The main job, ``tune --all``, which ``make tune`` runs: all that this machine can do for one problem.

With a GPU: tune it, then call ``flash_attn_func`` on real input and check the answer. Without one: generate, build and
rank for each architecture, look for spills in the main loops, and say what was left out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from ..arch import Policy, detect
from ..codegen.problem import Problem
from ..dispatch import tune
from ..errors import UnsupportedArchitectureError
from ..tuning.result import TuneResult
from .console import finite, print_json, print_line, progress
from .options import problem_json, problem_of
from .results import artifact_of, files_of, listener, print_result
from .status import FAILED, INTERRUPTED, OK

ARCHITECTURES = ("A100", "RTX4090", "H100")
MIN_BUILT = 2  # usable kernels that each architecture must come to
TOP_K = 8  # candidates beside the default, where --top-k does not say
LEFT_OUT = (
    "left out, for want of a GPU: checking the kernels against the reference, measuring them, recording a pick, and "
    "running flash_attn_func on one"
)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a call of ``flash_attn_func`` gave.

    Attributes:
        shape: of the output.
        ok: whether it agrees with the reference.
        reason: why not, or empty.
        max_error, max_allowed: largest absolute error, and the most that the rule allows.
    """

    shape: tuple[int, ...]
    ok: bool
    reason: str
    max_error: float
    max_allowed: float

    def to_json(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "shape": list(self.shape),
            "ok": self.ok,
            "reason": self.reason,
            "max_error": finite(self.max_error),
            "max_allowed": finite(self.max_allowed),
        }


def run_all(arguments: argparse.Namespace) -> int:
    """Do what this machine can; fails when a kernel is wrong or an architecture has too few usable ones."""
    problem = problem_of(arguments)
    try:
        present: Policy | None = detect()
    except UnsupportedArchitectureError as error:
        present, why = None, str(error)
    else:
        why = ""
    devices: list[Policy | str] = [present] if present is not None else list(ARCHITECTURES)
    results: list[TuneResult] = []
    for device in devices:
        result = search(arguments, problem, device)
        results.append(result)
        if not arguments.json:
            print_result(result)
            print_line()
        if result.interrupted:
            break
    interrupted = any(result.interrupted for result in results)
    served = serve(problem) if present is not None and not interrupted else None
    complaints = [] if interrupted or arguments.effort == "none" else complaints_of(results)
    if served is not None and not served.ok:
        complaints.append(f"flash_attn_func is wrong: {served.reason}")
    if arguments.json:
        print_json(
            {
                "problem": problem_json(problem),
                "gpu": None if present is None else present.spec.name,
                "no_gpu": why,
                "results": [result.to_json() for result in results],
                "served": None if served is None else served.to_json(),
                "files": [path for result in results for path in files_of(result)],
                "left_out": "" if present is not None else LEFT_OUT,
                "complaints": complaints,
            }
        )
    else:
        _print_end(why, served, complaints)
    if interrupted:
        return INTERRUPTED
    return FAILED if complaints else OK


def search(arguments: argparse.Namespace, problem: Problem, device: Policy | str) -> TuneResult:
    """Tune for one GPU; wider, unless ``--top-k`` fixes the width, while what is best spills in its main loop."""
    widths = [arguments.top_k] if arguments.top_k else [TOP_K, 2 * TOP_K, 4 * TOP_K]
    while True:
        with progress(quiet=arguments.json) as show:
            result = tune(
                problem,
                device,
                effort=arguments.effort,
                budget_seconds=arguments.budget_seconds,
                top_k=widths.pop(0),
                confirm=not arguments.no_confirm,
                listener=listener(show),
            )
        done = result.interrupted or result.status != "predicted" or arguments.effort == "none"
        if done or not widths or not complaints_of([result]):
            return result


def complaints_of(results: list[TuneResult]) -> list[str]:
    """What must not be: too few usable kernels, or a spill in the main loop of the best-ranked."""
    complaints = []
    for result in results:
        if result.status == "recorded":
            continue
        built = [row for row in result.rows if row.artifact is not None and row.outcome.ok]
        if len(built) < MIN_BUILT:
            complaints.append(f"{result.arch}: {len(built)} usable kernels, expected {MIN_BUILT}")
        for row in built[:MIN_BUILT]:
            artifact = artifact_of(row)
            if artifact is not None and artifact.report.loop_spills:
                complaints.append(f"{result.arch}: {artifact.name} spills in its main loop")
    return complaints


def serve(problem: Problem) -> Served:
    """Call ``flash_attn_func`` on fresh input and hold its output against the reference."""
    from .. import reference
    from ..ops import flash_attn_func
    from ..tuning.bindings import make_inputs

    inputs = make_inputs(problem, seed=1)
    q, k, v = inputs.q, inputs.k, inputs.v
    causal, alignment = problem.causal, problem.causal_alignment
    output = flash_attn_func(q, k, v, causal=causal, causal_alignment=alignment)
    truth, _ = reference.attention(q, k, v, causal=causal, causal_alignment=alignment)
    low, _ = reference.attention_low(q, k, v, causal=causal, causal_alignment=alignment)
    verdict = reference.check(output, truth, low)
    return Served(
        shape=tuple(output.shape),
        ok=verdict.ok,
        reason=verdict.reason,
        max_error=verdict.max_error,
        max_allowed=verdict.max_allowed,
    )


def _print_end(why: str, served: Served | None, complaints: list[str]) -> None:
    if why:
        print_line(f"no GPU: {why}")
        print_line(LEFT_OUT)
    if served is not None and served.ok:
        print_line(
            f"flash_attn_func ran with the pick: output {list(served.shape)}, max error "
            f"{served.max_error:.2e} (allowed {served.max_allowed:.2e})"
        )
    for complaint in complaints:
        print_line(f"not as it should be: {complaint}")
