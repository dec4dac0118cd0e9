"""What a candidate's translation unit includes and instantiates: one row for each operation that a kernel serves."""

from __future__ import annotations

from dataclasses import dataclass

from ..arch.h100 import H100_SPEC
from ..arch.rtx4090 import RTX4090_SPEC
from .candidate import Candidate
from .knobs import BackwardKnobs, ForwardKnobs, Knobs, ParallelKnobs
from .problem import Mask, Op
from .retention_knobs import (
    ChunkwiseKnobs,
    RecurrentKnobs,
    RetentionBackwardKnobs,
    WgmmaChunkwiseKnobs,
)
from .wgmma_knobs import WgmmaBackwardKnobs, WgmmaForwardKnobs


@dataclass(frozen=True, kw_only=True)
class KernelEntry:
    """The C++ side of a kernel, as rendered text names it.

    Attributes:
        kernel: folder of the kernel's headers under ``include/attention_autotuner``.
        header: the one in it that has the host side.
        type: class template of the host side, over a config.
        enough_ctas: of a backward: CTAs of a pass over keys fewer than these share query heads. A constant of the
            kernel and not of the GPU at hand, as workspaces and the bits of results depend on it.
    """

    kernel: str
    header: str = "entry.cuh"
    type: str
    enough_ctas: int | None = None


_ENOUGH_CTAS_SM80 = (
    2 * RTX4090_SPEC.num_sms
)  # two a SM of the GPU with most that the family is tuned for
_ENOUGH_CTAS_SM90 = H100_SPEC.num_sms  # CTAs are persistent, one a SM


_ENTRIES: dict[tuple[Op, type[Knobs]], KernelEntry] = {
    ("attention", ForwardKnobs): KernelEntry(
        kernel="scores_forward_sm80", header="attention_entry.cuh", type="AttentionForwardEntry"
    ),
    ("retnet", ForwardKnobs): KernelEntry(
        kernel="scores_forward_sm80", header="retnet_entry.cuh", type="RetNetForwardEntry"
    ),
    ("retention", ParallelKnobs): KernelEntry(
        kernel="scores_forward_sm80", header="retention_entry.cuh", type="ParallelEntry"
    ),
    ("attention", BackwardKnobs): KernelEntry(
        kernel="scores_backward_sm80",
        header="attention_entry.cuh",
        type="AttentionBackwardEntry",
        enough_ctas=_ENOUGH_CTAS_SM80,
    ),
    ("retnet", BackwardKnobs): KernelEntry(
        kernel="scores_backward_sm80",
        header="retnet_entry.cuh",
        type="RetNetBackwardEntry",
        enough_ctas=_ENOUGH_CTAS_SM80,
    ),
    ("retnet", WgmmaForwardKnobs): KernelEntry(
        kernel="scores_forward_sm90", type="ForwardSm90Entry"
    ),
    ("retnet", WgmmaBackwardKnobs): KernelEntry(
        kernel="scores_backward_sm90", type="BackwardSm90Entry", enough_ctas=_ENOUGH_CTAS_SM90
    ),
    ("retention", ChunkwiseKnobs): KernelEntry(kernel="chunks_sm80", type="ChunksEntry"),
    ("retention", RetentionBackwardKnobs): KernelEntry(
        kernel="chunks_sm80", header="backward_entry.cuh", type="ChunksBackwardEntry"
    ),
    ("retention", WgmmaChunkwiseKnobs): KernelEntry(kernel="chunks_sm90", type="ChunksSm90Entry"),
    ("retention", RecurrentKnobs): KernelEntry(kernel="recurrent_sm80", type="RecurrentEntry"),
}

_SCORE_MODS: dict[tuple[Op, Mask], str] = {
    ("attention", "none"): "softmax",
    ("retnet", "explicit"): "masked",
    ("retnet", "decay"): "decayed",
    ("retention", "none"): "decayed",
}


def kernel_entry(candidate: Candidate) -> KernelEntry:
    """The header and the type that a candidate is an instantiation of."""
    return _ENTRIES[candidate.op, type(candidate.knobs)]


def score_mod(candidate: Candidate) -> str:
    """What a candidate's kernels make of scores: ``softmax``, ``masked`` or ``decayed``."""
    return _SCORE_MODS[candidate.op, candidate.mask]
