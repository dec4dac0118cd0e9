"""Tensors for the functions of other packages, and the formulas that their results are compared with, in fp64."""

from __future__ import annotations

import math

import torch

Tensors = list[torch.Tensor]
LENGTHS = [(7, 7), (5, 9), (9, 5), (1, 33)]


def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> Tensors:
    generator = torch.Generator().manual_seed(sum(shapes[0]))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def make_three(sq: int, sk: int, dim: int = 16, dim_v: int = 16) -> Tensors:
    """q, k and v as flash_attn has them: a batch of 3, 4 heads on 2."""
    return make((3, sq, 4, dim), (3, sk, 2, dim), (3, sk, 2, dim_v))


def close(out: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), exact.double(), rtol=0.01, atol=0.004)


def bottom_right(sq: int, sk: int) -> torch.Tensor:
    return torch.arange(sk) <= torch.arange(sq)[:, None] + sk - sq


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and LSE of ``[batch, seqlen, heads, dim]`` tensors, differentiable, in fp64; the mask says what is visible."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    lse = s.masked_fill(~mask, -math.inf).logsumexp(-1)
    p = torch.where(mask, (s - lse[..., None].nan_to_num(neginf=0.0)).exp(), 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def check_gradients(o: torch.Tensor, exact: torch.Tensor, inputs: Tensors) -> None:
    """Compare outputs and the gradients of inputs."""
    close(o, exact)
    cotangent = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad((o.float() * cotangent).sum(), inputs)
    expected = torch.autograd.grad((exact * cotangent).sum(), inputs)
    for gradient, other in zip(gradients, expected, strict=True):
        close(gradient, other)
