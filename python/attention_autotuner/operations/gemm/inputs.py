"""The way to call gemm's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...core.problem import Problem
from ..shared import binding
from ..shared.binding import Binding, Reference
from ..shared.tensors import Inputs, Shapes
from .reference import gemm


@dataclass(frozen=True, kw_only=True)
class GemmForward:
    """o from a and b, each ``[1, 1, rows, columns]`` as it lies in memory."""

    note: str = ""

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """See :meth:`.Binding.inputs`."""
        p, generator = problem, torch.Generator(device=device).manual_seed(seed)
        shapes = {"a": (p.seqlen_q, p.dim_qk), "b": (p.dim_qk, p.dim_v)}
        return Inputs(
            tensors={
                name: torch.randn(
                    (1, 1, *(shape if lies == "n" else shape[::-1])),
                    dtype=binding.TORCH_DTYPES[p.dtype],
                    device=device,
                    generator=generator,
                )
                for (name, shape), lies in zip(shapes.items(), p.operands, strict=True)
            }
        )

    def output_shapes(self, problem: Problem) -> Shapes:
        """See :meth:`.Binding.output_shapes`."""
        return binding.output_shapes(problem)

    def references(self, problem: Problem, inputs: Inputs) -> Iterator[Reference]:
        """See :meth:`.Binding.references`."""
        a, b = factors(problem, inputs)
        yield "o", gemm(a, b), a @ b


def factors(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """A ``[1, 1, m, k]`` and B ``[1, 1, k, n]`` as views of the tensors."""
    a, b = (
        inputs.tensors[name] if lies == "n" else inputs.tensors[name].mT
        for name, lies in zip("ab", problem.operands, strict=True)
    )
    return a, b


FORWARD: tuple[Binding, ...] = (GemmForward(),)


def ways(problem: Problem) -> tuple[Binding, ...]:
    """The way to call the kernels of a gemm problem."""
    return FORWARD
