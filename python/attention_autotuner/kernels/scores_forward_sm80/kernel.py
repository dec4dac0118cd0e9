"""Forward over scores, family ``sm80``: attention, retnet, and retention's parallel form."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.candidate import Candidate
from ...core.modifications import PACKED
from ...core.problem import Problem
from ..chunks_sm80.knobs import RENAMED_SCORES
from ..kernel import Entry, Kernel, Traits
from ..shared.cells import FORWARD_COLUMNS, RETENTION_COLUMNS, bound_words, cells, order_words
from ..shared.knobs import RENAMED_ORDERS
from . import cost, resources, rules, space
from .knobs import ForwardKnobs, knobs_of


class ScoresForwardSm80(Kernel[ForwardKnobs]):
    """mma.sync over blocks of query rows, with softmax, a mask or a decay."""

    knobs = ForwardKnobs
    points = staticmethod(space.points)
    default = staticmethod(space.default)
    passes = staticmethod(rules.passes_of)
    predict = staticmethod(cost.predict)
    workspace_bytes = staticmethod(resources.workspace_bytes)
    renamed = RENAMED_ORDERS | RENAMED_SCORES
    pruning = rules.PRUNING_PREDICATES

    def lacks(self, problem: Problem) -> tuple[str, ...] | None:
        """As of any kernel; with a decay or a mask, sequences are not packed."""
        if problem.packed and problem.score != "softmax" and super().lacks(problem) == ():
            return (PACKED,)
        return super().lacks(problem)

    def entry(self, candidate: Candidate) -> Entry:
        """The header and the C++ type of a candidate's entry points."""
        if knobs_of(candidate).states is not None:
            return Entry(cpp_type="ParallelEntry", header="retention_entry.cuh")
        op = "Attention" if candidate.score == "softmax" else "RetNet"
        return Entry(cpp_type=f"{op}ForwardEntry", header=f"{op.lower()}_entry.cuh")

    def describe(self, candidate: Candidate) -> Traits:
        """A candidate's knobs in words that all kernels share."""
        knobs = knobs_of(candidate)
        form = () if knobs.states is None else ("parallel",)
        tile = (knobs.block_m, knobs.block_n, knobs.warps_m, knobs.warps_n)
        return Traits(
            tile=(*form, *tile, knobs.k_slice, knobs.v_slices, knobs.pack_gqa),
            feed=(
                knobs.q_in_registers,
                knobs.qk_ahead,
                knobs.persistent,
                knobs.cta_order,
                knobs.splits,
            ),
            stratum=(
                *form,
                *tile[:2],
                knobs.row_threads // 32,
                knobs.num_stages,
                knobs.split_kv,
            ),
            cells=_cells(candidate, knobs),
            persistent=knobs.persistent,
        )

    def columns(self, problem: Problem) -> tuple[str, ...]:
        """The headings of the cells."""
        return RETENTION_COLUMNS if problem.semantics.carries_state else FORWARD_COLUMNS


def _cells(candidate: Candidate, knobs: ForwardKnobs) -> Mapping[str, str]:
    if knobs.states is not None:
        kernels = f"rows:{knobs.row_label} states:{knobs.states.label}"
        return cells(RETENTION_COLUMNS, candidate, "parallel", str(knobs.chunk), kernels)
    slices = []
    if knobs.k_slice != candidate.padded_dim_qk:
        slices.append(f"k{knobs.k_slice}")
    if knobs.v_slices > 1:
        slices.append(f"v/{knobs.v_slices}")
    if knobs.split_kv:
        slices.append(f"{knobs.splits} splits")
    return cells(
        FORWARD_COLUMNS,
        candidate,
        f"{knobs.block_m}x{knobs.block_n}",
        f"{knobs.warps_m}x{knobs.warps_n}",
        str(knobs.num_stages),
        " ".join(slices) or "-",
        ("persistent " if knobs.persistent else "") + order_words(knobs.cta_order),
        more=(
            "Q in registers" if knobs.q_in_registers else "",
            "QK ahead" if knobs.qk_ahead else "",
            "packed heads" if knobs.pack_gqa else "",
            bound_words(knobs.ctas_per_sm),
        ),
    )
