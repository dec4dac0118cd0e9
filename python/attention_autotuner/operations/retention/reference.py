"""Retention with decay in its three forms, and its gradients, in plain PyTorch.

``S_t = gamma S_{t-1} + k_t^T v_t``, ``o_t = scale q_t S_t``, from ``S_{-1} = initial_state``; gamma in (0, 1] per query
head. Tensors are ``[batch, heads, seqlen, dim]``; K and V may have fewer heads (GQA), while every query head keeps a
state of its own, ``[batch, heads_q, dim_qk, dim_v]``, in fp32 or fp64. The parallel form sums the recurrence, with
``D_ij = gamma^(i-j)`` where ``i >= j`` and 0 elsewhere::

    O  = scale ((Q K^T * D) V + diag(gamma^(i+1)) Q S)
    S' = gamma^L S + (diag(gamma^(L-1-j)) K)^T V

and the chunkwise form does so for L tokens at a time. :func:`retention_recurrent` is the definition, and the others are
held against it by the tests.

Every power of gamma is ``exp2(n log2 gamma)`` of its own n >= 0, taken in fp64 before it is rounded: no quotient of
powers that could overflow, and what underflows is nothing beside what it is added to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import UnsupportedProblemError
from ..shared.blocks import MAX_SCORES, full_precision, summing_dtype

CHUNK = 64
"""Tokens summed at a time by the chunkwise form."""


def default_log2_gamma(heads: int) -> torch.Tensor:
    """``log2(1 - 2^(-5-h))`` for each head h: fp64 ``[heads]``, exact where the gamma itself would round to 1."""
    powers = torch.arange(-5, -5 - heads, -1, dtype=torch.float64)
    return torch.log1p(-powers.exp2()) / math.log(2)


def log2_gamma(gamma: torch.Tensor | None, heads: int, device: torch.device) -> torch.Tensor:
    """The logarithm of each head's decay: fp64 ``[heads]`` on a device, differentiable by gamma.

    Args:
        gamma: ``[heads]``, any float dtype; None for the usual ``1 - 2^(-5-h)``.
        heads: number of query heads.
        device: where it is needed.

    Raises:
        UnsupportedProblemError: the shape is another, or a gamma lies outside (0, 1]; what is traced has no values to
            be checked.
    """
    if gamma is None:
        return default_log2_gamma(heads).to(device)
    if tuple(gamma.shape) != (heads,) or not gamma.is_floating_point():
        raise UnsupportedProblemError(
            f"gamma must be floats [{heads}], one per query head, got {gamma.dtype} {list(gamma.shape)}"
        )
    traced = type(gamma.detach()) is not torch.Tensor
    for head, value in enumerate([] if traced else gamma.detach().tolist()):
        if not 0 < value <= 1:
            raise UnsupportedProblemError(f"gamma must lie in (0, 1], got {value} for head {head}")
    return gamma.to(device, torch.float64).log2()


@dataclass(frozen=True, kw_only=True)
class Decays:
    """The powers of gamma that a chunk of L tokens needs, all but the last in the dtype of the computation."""

    inside: torch.Tensor
    """``[heads, L, L]``: gamma^(i-j) for i >= j, else 0."""
    entering: torch.Tensor
    """``[heads, L, 1]``: gamma^(i+1), what token i sees of the state before the chunk."""
    leaving: torch.Tensor
    """``[heads, L, 1]``: gamma^(L-1-j), what the state after the chunk keeps of token j."""
    whole: torch.Tensor
    """``[heads, 1, 1]``: gamma^L in fp64, as a rounded one would be felt over thousands of chunks."""

    @classmethod
    def of(cls, log2: torch.Tensor, length: int, dtype: torch.dtype) -> Decays:
        """Of the logarithms ``[heads]`` and L."""
        index = torch.arange(length, dtype=torch.float64, device=log2.device)
        return cls(
            inside=powers_of_distance(log2, index, index).to(dtype),
            entering=powers(log2, index + 1).to(dtype),
            leaving=powers(log2, length - 1 - index).to(dtype),
            whole=powers(log2, index.new_full((1,), length)),
        )


def powers(log2: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """``gamma^n`` in fp64 for some exponents n >= 0: ``[heads, exponents, 1]``."""
    return (exponents * log2[:, None]).exp2()[..., None]


def powers_of_distance(log2: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``gamma^(i-j)`` in fp64 for positions i of rows and j of keys, 0 where ``i < j``: ``[heads, rows, keys]``."""
    distance = rows[:, None] - keys
    decay = (distance.clamp(min=0) * log2[:, None, None]).exp2()
    return decay.masked_fill(distance < 0, 0.0)


def decay_mask(
    gamma: torch.Tensor | None, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device
) -> torch.Tensor:
    """The decay as an explicit mask: ``gamma^(i + seqlen_k - seqlen_q - j)``, 0 above the bottom-right diagonal.

    Args:
        gamma: ``[heads]``, each in (0, 1]; ``1 - 2^(-5-h)`` when None.
        heads: number of query heads.
        seqlen_q: rows.
        seqlen_k: columns.
        device: where it is needed.

    Returns:
        fp64 ``[heads, seqlen_q, seqlen_k]``.

    Raises:
        UnsupportedProblemError: gamma does not fit.
    """
    keys = torch.arange(seqlen_k, dtype=torch.float64, device=device)
    rows = torch.arange(seqlen_q, dtype=torch.float64, device=device) + (seqlen_k - seqlen_q)
    return powers_of_distance(log2_gamma(gamma, heads, device), rows, keys)


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Checked arguments of one call, read a stretch of tokens at a time in the dtype of the computation."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log2: torch.Tensor
    scale: float
    state: torch.Tensor
    """The initial state ``[batch, heads_q, dim_qk, dim_v]``, zeros where none was given."""
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gamma: torch.Tensor | None,
        scale: float | None,
        initial_state: torch.Tensor | None,
        dtype: torch.dtype | None,
    ) -> Sequence:
        """Checks and completes what :func:`retention_recurrent` takes.

        Raises:
            UnsupportedProblemError: shapes, gamma or the state do not fit.
        """
        batch, heads, seqlen, dim_qk = q.shape
        heads_kv = k.shape[1]
        if tuple(k.shape) != (batch, heads_kv, seqlen, dim_qk) or k.shape[:3] != v.shape[:3]:
            raise UnsupportedProblemError(
                "q, k and v must agree in batch, seqlen and (q, k) dim_qk, got "
                f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
            )
        if heads_kv == 0 or heads % heads_kv:
            raise UnsupportedProblemError(
                f"heads_q must be a multiple of heads_kv, got {heads} and {heads_kv}"
            )
        dtype = dtype or summing_dtype(q.dtype)
        shape = (batch, heads, dim_qk, v.shape[-1])
        if initial_state is None:
            initial_state = torch.zeros(shape, dtype=summing_dtype(dtype), device=q.device)
        check_state("initial_state", initial_state, shape)
        return cls(
            q=q,
            k=k,
            v=v,
            log2=log2_gamma(gamma, heads, q.device),
            scale=dim_qk**-0.5 if scale is None else scale,
            state=initial_state.to(summing_dtype(dtype)),
            dtype=dtype,
        )

    @property
    def seqlen(self) -> int:
        """Number of tokens."""
        return self.q.shape[2]

    @property
    def group(self) -> int:
        """Query heads to a K/V head."""
        return self.q.shape[1] // self.k.shape[1]

    def chunks(self, length: int) -> list[slice]:
        """Stretches of ``length`` tokens, the last one maybe shorter."""
        if length < 1:
            raise UnsupportedProblemError(f"a chunk must hold at least 1 token, got {length}")
        return [
            slice(start, min(start + length, self.seqlen))
            for start in range(0, self.seqlen, length)
        ]

    def read(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of some tokens, k and v repeated for every query head."""
        k, v = (x[:, :, tokens].to(self.dtype) for x in (self.k, self.v))
        if self.group > 1:
            k, v = (x.repeat_interleave(self.group, dim=1) for x in (k, v))
        return self.q[:, :, tokens].to(self.dtype), k, v

    def over_groups(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over the query heads of each K/V head."""
        return x.reshape(x.shape[0], self.k.shape[1], self.group, *x.shape[2:]).sum(2)

    def advance(
        self, state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decays: Decays
    ) -> torch.Tensor:
        """The state after a chunk, from the one before it."""
        return (decays.whole * state + (decays.leaving * k).mT @ v).to(state.dtype)


def check_state(name: str, state: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Check a state or its gradient.

    Raises:
        UnsupportedProblemError: it is no fp32 or fp64 tensor of this shape.
    """
    if tuple(state.shape) != shape:
        raise UnsupportedProblemError(
            f"{name} must be [batch, heads_q, dim_qk, dim_v] = {list(shape)}, got {list(state.shape)}"
        )
    if state.dtype not in (torch.float32, torch.float64):
        raise UnsupportedProblemError(f"{name} must be float32 or float64, got {state.dtype}")


def retention_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gamma: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Retention token by token, differentiable by autograd.

    The state is carried in fp64, where 65,536 steps of a gamma near 1 leave no trace of rounding.

    Args:
        q: ``[batch, heads_q, seqlen, dim_qk]``, any float dtype.
        k: ``[batch, heads_kv, seqlen, dim_qk]``.
        v: ``[batch, heads_kv, seqlen, dim_v]``.
        gamma: ``[heads_q]``, each in (0, 1]; ``1 - 2^(-5-h)`` when None.
        scale: any finite number; ``1 / sqrt(dim_qk)`` when None. States are not scaled.
        initial_state: ``[batch, heads_q, dim_qk, dim_v]``, fp32 or fp64; zeros when None.
        dtype: of the computation; None for fp32, or fp64 where q is.

    Returns:
        O ``[batch, heads_q, seqlen, dim_v]`` in the dtype of the computation, and the final state, in fp32, or fp64
        where the computation is.

    Raises:
        UnsupportedProblemError: shapes, gamma or the state do not fit.
    """
    sequence = Sequence.of(q, k, v, gamma, scale, initial_state, dtype)
    state, outputs = sequence.state.double(), []
    decay = powers(sequence.log2, sequence.log2.new_ones(1))
    with full_precision():
        for tokens in sequence.chunks(1):
            queries, keys, values = sequence.read(tokens)
            state = decay * state + keys.mT * values
            outputs.append(sequence.scale * (queries @ state.to(sequence.dtype)))
    return _concatenated(outputs, sequence), state.to(sequence.state.dtype)


def retention_parallel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gamma: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    max_scores: int = MAX_SCORES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Retention by the scores of all pairs of tokens, some rows at a time, differentiable by autograd.

    Arguments, results and errors are those of :func:`retention_recurrent`, but for ``max_scores``, the scores held at
    a time.
    """
    sequence = Sequence.of(q, k, v, gamma, scale, initial_state, dtype)
    queries, keys, values = sequence.read(slice(None))
    index = torch.arange(sequence.seqlen, dtype=torch.float64, device=q.device)
    height = max(1, max_scores // max(1, q.shape[0] * q.shape[1] * sequence.seqlen))
    outputs = []
    with full_precision():
        for rows in sequence.chunks(height):
            seen = slice(rows.stop)
            decay = powers_of_distance(sequence.log2, index[rows], index[seen]).to(sequence.dtype)
            entering = powers(sequence.log2, index[rows] + 1).to(sequence.dtype)
            scores = (queries[:, :, rows] @ keys[:, :, seen].mT) * decay
            carried = (entering * queries[:, :, rows]) @ sequence.state.to(sequence.dtype)
            outputs.append(sequence.scale * (scores @ values[:, :, seen] + carried))
        leaving = powers(sequence.log2, sequence.seqlen - 1 - index).to(sequence.dtype)
        whole = powers(sequence.log2, index.new_full((1,), sequence.seqlen))
        state = whole * sequence.state + (leaving * keys).mT @ values
    return _concatenated(outputs, sequence), state.to(sequence.state.dtype)


def retention_chunkwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gamma: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    chunk: int = CHUNK,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Retention by chunks of tokens: pairs of tokens inside a chunk, the state between chunks.

    Arguments, results and errors are those of :func:`retention_recurrent`, but for ``chunk``, the tokens of a chunk;
    the last may be shorter. Autograd works, but keeps every chunk; :func:`.retention_backward` does not.
    """
    sequence = Sequence.of(q, k, v, gamma, scale, initial_state, dtype)
    state, outputs = sequence.state, []
    with full_precision():
        for tokens, decays in chunks_with_decays(sequence, chunk):
            queries, keys, values = sequence.read(tokens)
            scores = (queries @ keys.mT) * decays.inside
            carried = (decays.entering * queries) @ state.to(sequence.dtype)
            outputs.append(sequence.scale * (scores @ values + carried))
            state = sequence.advance(state, keys, values, decays)
    return _concatenated(outputs, sequence), state


def retention_low(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gamma: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunkwise form in the dtype of the inputs: the rounding that the error rule excuses.

    Options are those of :func:`retention_chunkwise`, but for ``dtype``.

    Returns:
        O in the dtype of q, and the final state in fp32: states are summed in fp32 and rounded for products only.
    """
    return retention_chunkwise(q, k, v, gamma, dtype=q.dtype, **options)


def chunks_with_decays(sequence: Sequence, length: int) -> Iterator[tuple[slice, Decays]]:
    """The chunks of a sequence, each with its powers of gamma, in order."""
    decays, made_for = None, 0
    for tokens in sequence.chunks(length):
        size = tokens.stop - tokens.start
        if decays is None or made_for != size:
            decays, made_for = Decays.of(sequence.log2, size, sequence.dtype), size
        yield tokens, decays


def _concatenated(outputs: list[torch.Tensor], sequence: Sequence) -> torch.Tensor:
    if outputs:
        return torch.cat(outputs, dim=2)
    return sequence.q.new_zeros((*sequence.q.shape[:3], sequence.v.shape[-1]), dtype=sequence.dtype)
