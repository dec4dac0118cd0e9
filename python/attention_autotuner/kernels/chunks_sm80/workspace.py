"""Device memory of retention's passes over chunks beside their tensors: twins of ``Workspace`` in the entries."""

from __future__ import annotations

from ...core.candidate import Candidate
from ...core.problem import Problem
from ..shared.super_chunks import ENOUGH_PIECES, SuperChunks
from ..shared.workspace import ELEMENT_BYTES, SUM_BYTES, layout_bytes, states_bytes
from .knobs import ChunkPass, ChunksKnobs, knobs_of
from .resources import shape_of

PAIR_ROWS, PAIR_WARPS = 64, 4  # of the kernel over pairs of tokens; see chunks_sm80/gamma.cuh
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
    return ELEMENT_BYTES * problem.batch * problem.heads_q * cut.chunks * knobs.chunk**2


def _forward_bytes(problem: Problem, candidate: Candidate) -> int:
    knobs = knobs_of(candidate)
    ((name, output),) = knobs.passes.items()
    ctas = problem.batch * problem.heads_q * _slices(candidate, name, output)
    cut = SuperChunks.of(problem.seqlen_q, knobs.chunk, knobs.super_chunk, ctas)
    states = states_bytes(problem, cut) if cut.supers > 1 else 0
    scores = _score_bytes(problem, cut, knobs) if output.scores == "precomputed" else 0
    return layout_bytes((states, scores))


def _backward_bytes(problem: Problem, candidate: Candidate, dgamma: bool) -> int:
    knobs = knobs_of(candidate)
    sequences = problem.batch * problem.heads_q
    slices = {name: _slices(candidate, name, item) for name, item in knobs.passes.items()}
    if dgamma:
        wanted, ctas = gamma_super_chunk(candidate), ENOUGH_PIECES
    else:
        wanted, ctas = knobs.super_chunk, sequences * min(slices["dq"], slices["dv"])
    cut = SuperChunks.of(problem.seqlen_q, knobs.chunk, wanted, ctas)
    sizes = []
    if dgamma or cut.supers > 1:
        sizes += [states_bytes(problem, cut)] * 2  # and their gradients
    if problem.heads_q != problem.heads_kv:
        rows = sequences * problem.seqlen_q
        sizes += [SUM_BYTES * rows * problem.dim_qk, SUM_BYTES * rows * problem.dim_v]
    if dgamma:
        pass_warps = {name: item.num_threads // 32 for name, item in knobs.passes.items()}
        warps = [-(-cut.super_chunk // PAIR_ROWS) * PAIR_WARPS]
        warps += [slices[name] * pass_warps[name] for name in ("dv", "dq")]
        sizes += [SUM_BYTES * sequences * cut.supers * count for count in warps]
    precomputed = {name for name, item in knobs.passes.items() if item.scores == "precomputed"}
    sizes += [
        _score_bytes(problem, cut, knobs) for names in ({"dv"}, {"dq", "dk"}) if precomputed & names
    ]
    return layout_bytes(sizes)
