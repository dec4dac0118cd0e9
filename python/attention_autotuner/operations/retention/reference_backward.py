"""The gradients of retention with decay, chunk by chunk, in plain PyTorch.

With the names of :mod:`.retention`, for a chunk of L tokens that begins with state S and ends with S'::

    A  = Q K^T * D                        dA = dO V^T * D
    dQ = scale (dA K + diag(gamma^(i+1)) dO S^T)
    dK = scale dA^T Q + diag(gamma^(L-1-j)) V dS'^T
    dV = scale A^T dO + diag(gamma^(L-1-j)) K dS'
    dS = gamma^L dS' + scale (diag(gamma^(i+1)) Q)^T dO

A term that holds ``gamma^n`` gives the gradient of gamma n times its own share of the loss, over gamma: n is ``i-j``
inside the chunk, ``i+1`` for what a token sees of S, ``L-1-j`` for what S' keeps of one, and L for what it keeps of S.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

from ...errors import UnsupportedProblemError
from ..shared.blocks import full_precision, zeros
from .reference import CHUNK, Decays, Sequence, check_state, chunks_with_decays

CHECKPOINT_EVERY = 16
"""Chunks from one kept state to the next."""

Chunk = tuple[slice, Decays]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"]


def retention_backward(
    grad_o: torch.Tensor | None,
    grad_state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gamma: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    need_dgamma: bool = False,
    chunk: int = CHUNK,
    checkpoint_every: int = CHECKPOINT_EVERY,
    dtype: torch.dtype | None = None,
) -> Gradients:
    """Gradients of any form of retention, with states recomputed from a few kept ones.

    Args:
        grad_o: ``[batch, heads_q, seqlen, dim_v]``; None for zero.
        grad_state: of the final state, ``[batch, heads_q, dim_qk, dim_v]``, fp32 or fp64; None for zero.
        q: as given to :func:`.retention_recurrent`, as are the rest.
        k: ``[batch, heads_kv, seqlen, dim_qk]``.
        v: ``[batch, heads_kv, seqlen, dim_v]``.
        gamma: ``[heads_q]``, each in (0, 1]; ``1 - 2^(-5-h)`` when None.
        scale: ``1 / sqrt(dim_qk)`` when None.
        initial_state: ``[batch, heads_q, dim_qk, dim_v]``; zeros when None.
        need_dgamma: whether the gradient of gamma is wanted.
        chunk: tokens summed at a time.
        checkpoint_every: chunks from one kept state to the next; those between are recomputed, and held together.
        dtype: of the computation; None for fp32, or fp64 where q is. States and their gradients are summed in fp32 at
            least.

    Returns:
        Gradients of q, k and v in their tensors' dtypes; of the initial state, given or not, in its dtype or that of
        the final state; and of gamma in its dtype, or None.

    Raises:
        UnsupportedProblemError: shapes, gamma or a state do not fit, or the gradient of an absent gamma is wanted.
    """
    if need_dgamma and gamma is None:
        raise UnsupportedProblemError("the gradient of gamma needs a gamma, got None")
    if checkpoint_every < 1:
        raise UnsupportedProblemError(
            f"checkpoint_every must be at least 1 chunk, got {checkpoint_every}"
        )
    with torch.no_grad(), full_precision():
        sequence = Sequence.of(q, k, v, gamma, scale, initial_state, dtype)
        if grad_o is None:
            grad_o = q.new_zeros(()).expand(*q.shape[:3], v.shape[-1])
        if grad_state is None:
            grad_state = torch.zeros_like(sequence.state)
        check_state("grad_state", grad_state, tuple(sequence.state.shape))
        ds = grad_state.to(sequence.state.dtype)
        dq, dk, dv = map(zeros, (q, k, v))
        shares = torch.zeros_like(sequence.log2)  # of the loss by log gamma
        chunks = list(chunks_with_decays(sequence, chunk))
        kept = list(islice(_states(sequence, chunks, sequence.state), 0, None, checkpoint_every))
        for index in reversed(range(len(kept))):
            segment = chunks[index * checkpoint_every : (index + 1) * checkpoint_every]
            states = list(_states(sequence, segment, kept[index]))
            for (tokens, decays), state in zip(reversed(segment), reversed(states), strict=True):
                go = grad_o[:, :, tokens].to(sequence.dtype)
                if need_dgamma:
                    shares += _log_gamma_shares(sequence, tokens, decays, state, go, ds)
                gradients, ds = _chunk_gradients(sequence, tokens, decays, state, go, ds)
                for total, part in zip((dq, dk, dv), gradients, strict=True):
                    total[:, :, tokens] = part
        dinitial = ds if initial_state is None else ds.to(initial_state.dtype)
        if gamma is None or not need_dgamma:
            return dq, dk, dv, dinitial, None
        return dq, dk, dv, dinitial, (shares / sequence.log2.exp2()).to(gamma)


def _states(sequence: Sequence, chunks: list[Chunk], state: torch.Tensor) -> Iterator[torch.Tensor]:
    """The states before each of some chunks, from the first of them."""
    for tokens, decays in chunks:
        yield state
        _, keys, values = sequence.read(tokens)
        state = sequence.advance(state, keys, values, decays)


def _chunk_gradients(
    sequence: Sequence,
    tokens: slice,
    decays: Decays,
    state: torch.Tensor,
    go: torch.Tensor,
    ds: torch.Tensor,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Gradients of a chunk's q, k and v, the latter two summed over groups, and of the state before it.

    Args:
        sequence: the sequence.
        tokens: of the chunk.
        decays: of its length.
        state: before the chunk.
        go: gradient of its outputs.
        ds: gradient of the state after it.
    """
    queries, keys, values = sequence.read(tokens)
    before, after = state.to(sequence.dtype), ds.to(sequence.dtype)
    a = (queries @ keys.mT) * decays.inside
    da = (go @ values.mT) * decays.inside
    dq = sequence.scale * (da @ keys + decays.entering * (go @ before.mT))
    dk = sequence.scale * (da.mT @ queries) + decays.leaving * (values @ after.mT)
    dv = sequence.scale * (a.mT @ go) + decays.leaving * (keys @ after)
    seen = sequence.scale * ((decays.entering * queries).mT @ go)
    grads = dq, sequence.over_groups(dk), sequence.over_groups(dv)
    return grads, (decays.whole * ds + seen).to(ds.dtype)


def _log_gamma_shares(
    sequence: Sequence,
    tokens: slice,
    decays: Decays,
    state: torch.Tensor,
    go: torch.Tensor,
    ds: torch.Tensor,
) -> torch.Tensor:
    """The share of a chunk in the gradient of log gamma: fp64 ``[heads_q]``; arguments as :func:`_chunk_gradients`."""
    queries, keys, values = sequence.read(tokens)
    length = tokens.stop - tokens.start
    index = torch.arange(length, dtype=torch.float64, device=queries.device)
    inside = (queries @ keys.mT) * decays.inside * (go @ values.mT)
    entering = (decays.entering * queries) @ state.to(sequence.dtype) * go
    leaving = (decays.leaving * keys) @ ds.to(sequence.dtype) * values
    terms = (
        sequence.scale * (index[:, None] - index) * inside.double(),
        sequence.scale * (index + 1)[:, None] * entering.double(),
        (length - 1 - index)[:, None] * leaving.double(),
        length * decays.whole * (state.double() * ds.double()),
    )
    return torch.stack([term.sum((0, 2, 3)) for term in terms]).sum(0)
