"""Retention of packed sequences and its gradients, in plain PyTorch: a loop over the sequences.

Tensors have one batch entry, the rows of all sequences one after the other; states have an entry for each sequence.
Rows behind the last sequence give zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from ..shared.blocks import zeros
from .reference_backward import Gradients, retention_backward

States = tuple[torch.Tensor, torch.Tensor]


def rows_of(cu_seqlens: torch.Tensor) -> list[slice]:
    """The rows of each sequence; ``cu_seqlens`` is int32 ``[sequences + 1]``, from 0, ascending."""
    return [slice(*ends) for ends in pairwise(cu_seqlens.tolist())]


def _entry(states: torch.Tensor | None, sequence: int) -> torch.Tensor | None:
    return None if states is None else states[sequence : sequence + 1]


def retention_packed(
    reference: Callable[..., States],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gamma: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None,
    initial_state: torch.Tensor | None = None,
    **options: Any,
) -> States:
    """O ``[1, heads_q, total, dim_v]`` and the final states, differentiable by autograd.

    Args:
        reference: of one sequence, such as :func:`.retention_chunkwise`.
        q: ``[1, heads_q, total, dim_qk]``.
        k: ``[1, heads_kv, total, dim_qk]``.
        v: ``[1, heads_kv, total, dim_v]``.
        gamma: as ``reference`` takes it, as are the options.
        cu_seqlens: int32 ``[sequences + 1]``, from 0, ascending: where each sequence ends; None where batch entries
            are sequences.
        initial_state: ``[sequences, heads_q, dim_qk, dim_v]``; zeros when None.
        options: see gamma.
    """
    if cu_seqlens is None:
        return reference(q, k, v, gamma, initial_state=initial_state, **options)
    pieces, states, end = [], [], 0
    for sequence, rows in enumerate(rows_of(cu_seqlens)):
        three = (x[:, :, rows] for x in (q, k, v))
        state = _entry(initial_state, sequence)
        piece, state = reference(*three, gamma, initial_state=state, **options)
        pieces.append(piece)
        states.append(state)
        end = rows.stop
    behind = pieces[0].new_zeros((*q.shape[:2], q.shape[2] - end, v.shape[3]))
    return torch.cat([*pieces, behind], dim=2), torch.cat(states)


def retention_packed_backward(
    grad_o: torch.Tensor | None,
    grad_state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gamma: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None,
    initial_state: torch.Tensor | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of the same, as :func:`.retention_backward` gives them; that of gamma is a sum over the sequences."""
    if cu_seqlens is None:
        named = {"initial_state": initial_state, **options}
        return retention_backward(grad_o, grad_state, q, k, v, gamma, **named)
    dq, dk, dv = map(zeros, (q, k, v))
    states, of_gamma = [], []
    for sequence, rows in enumerate(rows_of(cu_seqlens)):
        *gradients, state, share = retention_backward(
            None if grad_o is None else grad_o[:, :, rows],
            _entry(grad_state, sequence),
            q[:, :, rows],
            k[:, :, rows],
            v[:, :, rows],
            gamma,
            initial_state=_entry(initial_state, sequence),
            **options,
        )
        for whole, part in zip((dq, dk, dv), gradients, strict=True):
            whole[:, :, rows] = part
        states.append(state)
        of_gamma += [] if share is None else [share]
    return dq, dk, dv, torch.cat(states), torch.stack(of_gamma).sum(0) if of_gamma else None
