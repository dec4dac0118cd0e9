"""Resources that the passes over chunks of a retention candidate take from an SM, as pure formulas over their knobs.

Shared memory is what the traits of the pass compute; register counts are estimates made before the compiler's report.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...arch.occupancy import KernelNeeds
from ...core.candidate import Candidate
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..shared import workspace
from ..shared.passes import launch_needs
from ..shared.super_chunks import ENOUGH_PIECES, SuperChunks
from ..shared.workspace import cut_of, layout_bytes, states_bytes
from .knobs import ChunkPass, ChunksKnobs, knobs_of


@dataclass(frozen=True, kw_only=True)
class ChunkShape:
    """A pass over chunks with what its formulas need of the candidate.

    Attributes:
        name: ``output``, ``states`` (of the parallel form, which uses Y and Z alone), ``dq``, ``dk`` or ``dv``.
        knobs: the pass.
        chunk: tokens of one step.
        super_chunk: tokens that one CTA takes; 0 for all.
        depth: head dim of X and Y, padded to whole tiles of 16 columns for every depth warp.
        width: padded head dim of Z, of which a CTA takes ``columns``.
    """

    name: str
    knobs: ChunkPass
    chunk: int
    super_chunk: int = 0
    depth: int
    width: int

    @property
    def slices(self) -> int:
        """CTAs that share a head's chunks, each with its columns; the last may reach beyond the width."""
        return -(-self.width // self.knobs.columns)

    @property
    def columns_per_warp(self) -> int:
        """Columns that a warp owns."""
        return self.knobs.columns // self.knobs.column_warps

    @property
    def state_registers(self) -> int:
        """Registers of a thread for its elements of the fp32 state."""
        return self.columns_per_warp * (self.depth // self.knobs.depth_warps) // 32


def shape_of(
    name: str, knobs: ChunkPass, chunk: int, super_chunk: int, padded_dims: tuple[int, int]
) -> ChunkShape:
    """A pass for padded head dims (of q and k, of v): dq and dk have the deep side in v, all others in q and k."""
    inner, width = padded_dims[::-1] if name in ("dq", "dk") else padded_dims
    step = 16 * max(1, knobs.depth_warps)
    return ChunkShape(
        name=name,
        knobs=knobs,
        chunk=chunk,
        super_chunk=super_chunk,
        depth=-(-inner // step) * step,
        width=width,
    )


def smem_bytes(shape: ChunkShape) -> int:
    """Dynamic shared memory of one CTA, bytes; a launch for states alone takes as much."""
    knobs, chunk = shape.knobs, shape.chunk
    precomputed = knobs.scores == "precomputed"
    tiles = 2 * chunk * shape.depth + chunk * knobs.columns
    scores = chunk * chunk
    stages = knobs.num_stages * (tiles + (scores if precomputed else 0))
    exchanged = knobs.columns if precomputed else max(knobs.columns, chunk)
    sums = FP32_BYTES * chunk * exchanged * (knobs.depth_warps - 1)
    return (stages + (0 if precomputed else scores)) * ELEMENT_BYTES + sums


def output_registers(shape: ChunkShape) -> int:
    """Registers of a thread for its elements of the output."""
    return shape.chunk * shape.columns_per_warp // 32


def score_registers(shape: ChunkShape) -> int:
    """Registers of a thread for the scores that it computes."""
    if shape.knobs.scores == "precomputed":
        return 0
    return shape.chunk * shape.chunk // (32 * shape.knobs.column_warps)


def fragment_registers(shape: ChunkShape) -> int:
    """Registers of a thread for the state, and for the output or the scores, whichever takes more."""
    return shape.state_registers + max(output_registers(shape), score_registers(shape))


def wanted_registers(shape: ChunkShape) -> int:
    """Registers of a thread for all that is live at once: state, output, scores and their packed decays."""
    scores = score_registers(shape)
    return shape.state_registers + output_registers(shape) + scores + scores // 2


def needs(shape: ChunkShape) -> KernelNeeds:
    """Resources that a pass takes."""
    return launch_needs(shape.knobs, smem_bytes(shape), fragment_registers(shape), shape.name)


PAIR_ROWS, PAIR_WARPS = 64, 4  # of the kernel over pairs of tokens; see common/gamma.cuh
MIN_GAMMA_SUPER_CHUNK = 128


def workspace_bytes(problem: Problem, candidate: Candidate, *, dgamma: bool = False) -> int:
    """Bytes of a candidate's workspace.

    Args:
        problem: gives the sizes.
        candidate: of either direction.
        dgamma: whether the gradient of log2 gamma is wanted.
    """
    if candidate.direction == "forward":
        return _forward_bytes(problem, candidate)
    return _backward_bytes(problem, candidate, dgamma)


def gamma_super_chunk(candidate: Candidate) -> int:
    """Tokens of a super-chunk where the gradient of gamma is wanted."""
    tokens = MIN_GAMMA_SUPER_CHUNK
    while tokens < max(candidate.padded_dim_qk, candidate.padded_dim_v):
        tokens *= 2
    return min(tokens, knobs_of(candidate).super_chunk or tokens)


def _slices(candidate: Candidate, name: str, knobs: ChunkPass) -> int:
    padded_dims = (candidate.padded_dim_qk, candidate.padded_dim_v)
    return shape_of(name, knobs, knobs_of(candidate).chunk, 0, padded_dims).slices


def _score_bytes(problem: Problem, cut: SuperChunks, knobs: ChunksKnobs) -> int:
    """Bytes of the scores of all chunks."""
    return ELEMENT_BYTES * problem.extents[0] * problem.heads_q * cut.chunks * knobs.chunk**2


def _forward_bytes(problem: Problem, candidate: Candidate) -> int:
    knobs = knobs_of(candidate)
    ((name, output),) = knobs.passes.items()
    ctas = problem.batch * problem.heads_q * _slices(candidate, name, output)
    cut = cut_of(problem, chunk=knobs.chunk, wanted=knobs.super_chunk, ctas=ctas)
    states = states_bytes(problem, cut) if cut.divided else 0
    scores = _score_bytes(problem, cut, knobs) if output.scores == "precomputed" else 0
    return layout_bytes((states, scores))


def _backward_bytes(problem: Problem, candidate: Candidate, dgamma: bool) -> int:
    knobs = knobs_of(candidate)
    sequences = problem.extents[0] * problem.heads_q
    slices = {name: _slices(candidate, name, item) for name, item in knobs.passes.items()}
    if dgamma:
        wanted, ctas = gamma_super_chunk(candidate), ENOUGH_PIECES
    else:
        wanted, ctas = knobs.super_chunk, sequences * min(slices["dq"], slices["dv"])
    cut = cut_of(problem, chunk=knobs.chunk, wanted=wanted, ctas=ctas, always=dgamma)
    sizes = []
    if dgamma or cut.divided:
        sizes += [states_bytes(problem, cut)] * 2  # and their gradients
    sizes += workspace.head_sums_bytes(problem)
    if dgamma:
        pass_warps = {name: item.num_threads // 32 for name, item in knobs.passes.items()}
        warps = [-(-cut.super_chunk // PAIR_ROWS) * PAIR_WARPS]
        warps += [slices[name] * pass_warps[name] for name in ("dv", "dq")]
        sizes += [FP32_BYTES * sequences * cut.supers * count for count in warps]
    precomputed = {name for name, item in knobs.passes.items() if item.scores == "precomputed"}
    sizes += [
        _score_bytes(problem, cut, knobs) for names in ({"dv"}, {"dq", "dk"}) if precomputed & names
    ]
    return layout_bytes(sizes)
