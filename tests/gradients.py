"""Helpers of gradient tests on the CPU and on a GPU: inputs in every layout, a verifier, poisoned memory, a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from attention_autotuner import flash_attn_func
from attention_autotuner.api.shared import launch
from attention_autotuner.core.problem import Problem
from attention_autotuner.reference import (
    Bands,
    attention,
    attention_backward,
    attention_low,
    check,
)
from attention_autotuner.serving import runtime

FP32_ROUNDING = 2.0**-22  # of a sum, over the sum of its terms' magnitudes
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Layout = Callable[[torch.Tensor], torch.Tensor]


def make(
    problem: Problem, *, seed: int = 0, device: str = "cpu", requires_grad: bool = True
) -> Three:
    """Dense q, k and v of a problem."""
    p, dtype = problem, DTYPES[problem.dtype]
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=dtype, device=device)
        for shape in (
            (p.batch, p.heads_q, p.seqlen_q, p.dim_qk),
            (p.batch, p.heads_kv, p.seqlen_k, p.dim_qk),
            (p.batch, p.heads_kv, p.seqlen_k, p.dim_v),
        )
    )
    for x in (q, k, v):
        x.requires_grad_(requires_grad)
    return q, k, v


# --- the same values in other places --------------------------------------------------------------


def transposed(x: torch.Tensor) -> torch.Tensor:
    """``[batch, seqlen, heads, dim]`` in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def padded(x: torch.Tensor) -> torch.Tensor:
    """Rows 16 bytes apart, with NaN between them."""
    storage = torch.full(
        (*x.shape[:-1], x.shape[-1] + 8), torch.nan, dtype=x.dtype, device=x.device
    )
    view = storage[..., : x.shape[-1]]
    view.copy_(x)
    return view


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """Dense from an address that is no multiple of 16 bytes."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
    return flat.copy_(x.flatten()).view(x.shape)


def odd_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows an odd number of elements apart, with NaN between them."""
    storage = torch.full(
        (*x.shape[:-1], x.shape[-1] + 1), torch.nan, dtype=x.dtype, device=x.device
    )
    view = storage[..., : x.shape[-1]]
    view.copy_(x)
    return view


def columns_first(x: torch.Tensor) -> torch.Tensor:
    """The last dim with another stride than 1."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def one_row(x: torch.Tensor) -> torch.Tensor:
    """The first row everywhere: stride 0 in all dims but the last."""
    return x[:1, :1, :1].expand(x.shape)


def one_value(x: torch.Tensor) -> torch.Tensor:
    """The first value everywhere, as a gradient from ``sum()`` is: stride 0 in all dims."""
    return x.flatten()[0].expand(x.shape)


LAYOUTS: tuple[Layout, ...] = (transposed, padded, unaligned, odd_rows, columns_first)
"""The layouts that keep every value."""


# --- verification ---------------------------------------------------------------------------------


def errors_of(
    computed: tuple[torch.Tensor, ...],
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    tensors: Three,
    **options: Any,
) -> list[str]:
    """The errors of gradients of q, k and v by the rule of the measuring protocol, one line for each wrong gradient."""
    q, k, v = (x.detach() for x in tensors)
    exact = attention_backward(
        grad_o,
        grad_lse,
        q.double(),
        k.double(),
        v.double(),
        dtype=torch.float64,
        **options,
    )
    rounded = [x.clone().requires_grad_() for x in (q, k, v)]
    outputs = attention_low(*rounded, **options)
    pairs = [(o, g) for o, g in zip(outputs, (grad_o, grad_lse), strict=True) if g is not None]
    low = torch.autograd.grad(
        [o for o, _ in pairs], rounded, [g for _, g in pairs], materialize_grads=True
    )
    errors = []
    roundings = _rounding_of_delta(grad_o, grad_lse, exact, (q, k, v), **options)
    problem = Problem(
        seqlen_q=q.shape[2],
        seqlen_k=k.shape[2],
        **{name: options[name] for name in ("causal", "causal_alignment") if name in options},
    )
    for name, mine, ref, bound, rounding in zip(
        ("dq", "dk", "dv"), computed, exact, low, roundings, strict=True
    ):
        bound = bound.double() + torch.copysign(rounding, bound.double() - ref)
        comparison = check(mine, ref, bound, Bands.of(problem, name, ref.dim()))
        if not comparison:
            errors.append(f"{name}: {comparison.reason}")
    return errors


def _rounding_of_delta(
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    exact: Three,
    tensors: Three,
    **options: Any,
) -> Three:
    """The error of each gradient from a rounded O and a sum in fp32, as in :mod:`.numerics.gradients`.

    Any kernel that reads a rounded O has this error; in rows that see one key, or nearly, there is no other.
    """
    q, k, v = (x.double() for x in tensors)
    if grad_o is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    o = attention(q, k, v, dtype=torch.float64, **options)[0]
    o_rounded, dout = o.to(tensors[0].dtype).double(), grad_o.double()
    shift = (dout * (o - o_rounded)).sum(-1)
    signs = 1.0 - 2.0 * (torch.arange(o.shape[2], device=o.device) % 2)
    shift = shift + signs * FP32_ROUNDING * (dout * o_rounded).abs().sum(-1)
    moved = shift if grad_lse is None else grad_lse.double() + shift
    near = attention_backward(grad_o, moved, q, k, v, dtype=torch.float64, **options)
    dq, dk, dv = ((a - b).abs() for a, b in zip(near, exact, strict=True))
    return dq, dk, dv


def same_bits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """True when two groups of tensors agree bit for bit, NaN included."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every output and workspace of plans made from now on arrive full of NaN."""
    allocator = launch.allocator

    def poisoning(device: torch.device) -> launch.Allocate:
        allocate = allocator(device)

        def filled(
            shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
        ) -> torch.Tensor:
            x = allocate(shape, strides, dtype)
            # All bits set are NaN in every float type that a workspace may hold.
            return x.fill_(255 if dtype == torch.uint8 else torch.nan)

        return filled

    monkeypatch.setattr(launch, "allocator", poisoning)
    forget_plans()


def forget_plans() -> None:
    """Clear the plans, so that the next call of every kind makes a new plan."""
    runtime.forget("plans", "replays")


# --- a model --------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Grouped-query self-attention between projections, with a residual."""

    def __init__(self, *, heads_q: int = 4, heads_kv: int = 2, dim: int = 64) -> None:
        super().__init__()
        self.heads_q, self.heads_kv, self.dim = heads_q, heads_kv, dim
        width = heads_q * dim
        self.into = torch.nn.Linear(width, (heads_q + 2 * heads_kv) * dim)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, seqlen, heads_q * dim]`` to the same."""
        batch, seqlen, width = x.shape
        heads = self.into(x).view(batch, seqlen, -1, self.dim).transpose(1, 2)
        q, k, v = heads.split([self.heads_q, self.heads_kv, self.heads_kv], dim=1)
        o = flash_attn_func(q, k, v, causal=True)
        mixed: torch.Tensor = self.out(o.transpose(1, 2).reshape(batch, seqlen, width))
        return x + mixed


def make_block(*, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Block:
    """A block with fixed weights."""
    torch.manual_seed(seed)
    return Block().to(device=device, dtype=dtype)


def loss_of(block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A loss that every output takes part in."""
    return block(x).float().square().mean()
