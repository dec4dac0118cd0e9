"""A candidate's knobs as the cells of a table, each kind of knobs in words of its own."""

from __future__ import annotations

from ..codegen.candidate import Candidate
from ..codegen.knobs import BackwardKnobs, ForwardKnobs, ParallelKnobs
from ..codegen.problem import Problem
from ..codegen.retention_knobs import (
    ChunkwiseKnobs,
    RecurrentKnobs,
    RetentionBackwardKnobs,
    WgmmaChunkwiseKnobs,
)
from ..codegen.wgmma_knobs import WgmmaBackwardKnobs, WgmmaForwardKnobs


def knob_headings(problem: Problem) -> list[str]:
    """The columns of :func:`knobs`, for the candidates of a problem."""
    if problem.op == "retention":
        return ["family", "form", "chunks", "kernels", "more"]
    if problem.direction == "backward":
        return ["family", "plan", "passes", "schedule", "more"]
    return ["family", "tile", "warps", "stages", "slices", "schedule", "more"]


def knobs(candidate: Candidate) -> list[str]:
    """A candidate's knobs as cells under :func:`knob_headings`."""
    c = candidate.knobs
    if isinstance(c, (BackwardKnobs, WgmmaBackwardKnobs)):
        return _backward(candidate, c)
    if isinstance(c, ForwardKnobs):
        return _forward(candidate, c)
    if isinstance(c, WgmmaForwardKnobs):
        tile, groups = f"{c.block_m}x{c.block_n}", f"{c.warpgroups} groups"
        slices = f"v/{c.v_slices}" if c.v_slices > 1 else "-"
        order = c.cta_order.replace("_", " ")
        return [candidate.family, tile, groups, str(c.num_stages), slices, order, _more(candidate)]
    more = _more(candidate)
    if isinstance(c, ParallelKnobs):
        kernels = f"rows:{c.rows.label} states:{c.states.label}"
        return [candidate.family, "parallel", str(c.chunk), kernels, more]
    if isinstance(c, RecurrentKnobs):
        kernels = f"{c.columns} columns {c.warps} warps"
        bound = f"{c.ctas_per_sm} CTAs/SM" if c.ctas_per_sm > 1 else ""
        return [candidate.family, "recurrent", "-", kernels, _more(candidate, bound)]
    if isinstance(c, WgmmaChunkwiseKnobs):
        kernels = f"{c.columns} columns {c.warpgroups} groups {c.num_stages} stages"
        bound = f"{c.ctas_per_sm} CTAs/SM" if c.ctas_per_sm > 1 else ""
        return [candidate.family, "chunkwise", _chunks(c), kernels, _more(candidate, bound)]
    passes = {"output": c.output} if isinstance(c, ChunkwiseKnobs) else c.passes
    kernels = " ".join(f"{name}:{one.label}" for name, one in passes.items())
    return [candidate.family, "chunkwise", _chunks(c), kernels, more]


def _chunks(c: ChunkwiseKnobs | WgmmaChunkwiseKnobs | RetentionBackwardKnobs) -> str:
    return f"{c.chunk} of {c.super_chunk}" if c.super_chunk else str(c.chunk)


def _more(candidate: Candidate, *words: str) -> str:
    """What else is to say, or a dash."""
    copies = "" if candidate.copy_bytes == 16 else f"{candidate.copy_bytes}-byte copies"
    return ", ".join(word for word in (*words, copies) if word) or "-"


def _backward(candidate: Candidate, c: BackwardKnobs | WgmmaBackwardKnobs) -> list[str]:
    return [
        candidate.family,
        c.plan if isinstance(c, BackwardKnobs) else "split",
        " ".join(f"{name}:{one.label}" for name, one in c.passes.items()),
        c.cta_order.replace("_", " "),
        _more(candidate, "deterministic" if c.deterministic else ""),
    ]


def _forward(candidate: Candidate, c: ForwardKnobs) -> list[str]:
    slices = []
    if c.k_slice != candidate.class_qk:
        slices.append(f"k{c.k_slice}")
    if c.v_slices > 1:
        slices.append(f"v/{c.v_slices}")
    return [
        candidate.family,
        f"{c.block_m}x{c.block_n}",
        f"{c.warps_m}x{c.warps_n}",
        str(c.num_stages),
        " ".join(slices) or "-",
        ("persistent " if c.persistent else "") + c.cta_order.replace("_", " "),
        _more(
            candidate,
            "Q in registers" if c.q_in_registers else "",
            "QK ahead" if c.qk_ahead else "",
            f"{c.ctas_per_sm} CTAs/SM" if c.ctas_per_sm > 1 else "",
        ),
    ]
