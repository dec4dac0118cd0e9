"""The time of a backward candidate of retention, family ``sm90``: that of three passes of the forward kernel.

Those of whole sequences run side by side. Those of super-chunks wait for states and their gradients, two chains of
launches, and for each other.
"""

from __future__ import annotations

from dataclasses import replace

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import FP32_BYTES
from ..chunks_sm90.cost import cut_of, launch_of, together
from ..shared import engine
from ..shared.coefficients import Coefficients
from ..shared.estimates import Estimate, Usages
from ..shared.workspace import head_sums_bytes
from .resources import shapes_of


def predict(
    problem: Problem, candidate: Candidate, spec: ArchSpec, usages: Usages, fit: Coefficients
) -> Estimate:
    """The time of a candidate's kernels; ``usages`` of its passes."""
    shapes = tuple(shapes_of(candidate).values())
    tokens, stretch = problem.seqlen_q, shapes[-1].knobs.super_chunk
    divided = 0 < stretch < tokens
    passes = [
        launch_of(problem, shape, spec, usage, fit, tokens, stretch if divided else tokens)
        for shape, usage in zip(shapes, usages, strict=True)
    ]
    auxiliary = engine.AuxiliaryWork()
    if partial := sum(head_sums_bytes(problem)):  # written and read
        auxiliary = auxiliary.plus(2 * partial, spec, fit)
    if not divided:
        return engine.in_sequence([together(passes, spec, fit)], auxiliary, spec)
    count, pieces = cut_of(problem, candidate, min(shape.slices for shape in shapes))
    states = FP32_BYTES * problem.batch * problem.heads_q * problem.dim_qk * problem.dim_v
    # States are written, read and written by the scan, and read by dq; their gradients by dk and dv.
    for readers in (1, 2):
        moved = states * (count + 1) * (3 * pieces + readers)
        auxiliary = auxiliary.plus(moved, spec, fit)
    scan_us = (count + 1) * pieces * fit.chunk_sm90_scan_clk / spec.sm_clock_mhz
    auxiliary = replace(auxiliary, us=auxiliary.us + 2 * scan_us)
    sums = [
        launch_of(
            problem, shape, spec, usage, fit, stretch * count, stretch // pieces, states_only=True
        )
        for shape, usage in zip(shapes[::2], usages[::2], strict=True)
    ]
    launches = [
        together([launch], spec, fit, behind=place > 0)
        for place, launch in enumerate((*sums, *passes))
    ]
    return engine.in_sequence(launches, auxiliary, spec)
