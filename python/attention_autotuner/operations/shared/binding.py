"""The common base of all operations' bindings: the protocol, and normal tensors of a problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from ...core.problem import Problem
from .tensors import Inputs, Shapes

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
COPY_ELEMENTS = 8  # of one 16-byte access

Reference = tuple[str, torch.Tensor, torch.Tensor]
"""An output's name, its fp32 reference, and the formula in the input dtype."""


class Binding(Protocol):
    """One way to call the kernels of one direction."""

    @property
    def note(self) -> str:
        """The difference of this way, as the end of a sentence; empty for the ordinary call."""

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """Normal inputs, off 16-byte alignment where the problem says so.

        Args:
            problem: gives shapes and dtype.
            seed: of the numbers; the same seed gives the same ones on the same kind of device.
            device: where.
        """

    def output_shapes(self, problem: Problem) -> Shapes:
        """Shape and dtype of every output by its name; those that this way does not want are absent."""

    def references(self, problem: Problem, inputs: Inputs) -> Iterator[Reference]:
        """The reference of every output."""


def output_shapes(problem: Problem, of_rows: str = "") -> Shapes:
    """Shape and dtype of o and, by its name, of an fp32 value of every row."""
    batch, of_q, _ = problem.extents
    rows = (batch, problem.heads_q, of_q)
    o: Shapes = {"o": ((*rows, problem.dim_v), TORCH_DTYPES[problem.dtype])}
    return {**o, of_rows: (rows, torch.float32)} if of_rows else o


def gradients_of_formula(
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]], leaves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Autograd's gradients by leaves, from outputs and their gradients; an output without one is passed over."""
    pairs = [(output, gradient) for output, gradient in outputs if gradient is not None]
    return torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs])


def gradient_shapes(problem: Problem) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of dq, dk and dv."""
    p, dtype = problem, TORCH_DTYPES[problem.dtype]
    batch, rows_q, rows_k = p.extents
    return {
        "dq": ((batch, p.heads_q, rows_q, p.dim_qk), dtype),
        "dk": ((batch, p.heads_kv, rows_k, p.dim_qk), dtype),
        "dv": ((batch, p.heads_kv, rows_k, p.dim_v), dtype),
    }


class Normal:
    """Normal tensors of a problem, one after the other from one seed.

    Args:
        problem: gives shapes, dtype and alignment.
        seed: of the numbers.
        device: where.

    Attributes:
        device: see above.
    """

    def __init__(self, problem: Problem, seed: int, device: torch.device) -> None:
        self._problem = problem
        self.device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def dout(self) -> torch.Tensor:
        """``[batch, heads_q, seqlen_q, dim_v]``."""
        p = self._problem
        return self._tensor(p.heads_q, p.extents[1], p.dim_v)

    def qkv(self) -> dict[str, torch.Tensor]:
        """q, k and v by name, in this order."""
        shapes = gradient_shapes(self._problem)
        return {name: self._tensor(*shapes[f"d{name}"][0][1:]) for name in ("q", "k", "v")}

    def floats(self, *shape: int) -> torch.Tensor:
        """Contiguous fp32."""
        return torch.randn(shape, device=self.device, generator=self._generator)

    def _tensor(self, heads: int, rows: int, columns: int) -> torch.Tensor:
        batch = self._problem.extents[0]
        offset = 0 if self._problem.alignment_bytes == 16 else 1  # elements
        flat = torch.randn(
            batch * heads * rows * columns + offset,
            dtype=TORCH_DTYPES[self._problem.dtype],
            device=self.device,
            generator=self._generator,
        )
        return flat[offset:].view(batch, heads, rows, columns)
