"""What differs between the directions of an operation for those who check and time kernels.

A *binding* makes a direction's inputs, names its outputs, and knows the truth they are held against; the rest of
:mod:`.verify` and :mod:`.measure` is the same for all. One direction may have several ways to be called, e.g. with and
without a gradient of LSE; the first is what is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ..codegen.problem import Direction, Op, Problem
from ..reference import attention, attention_backward, attention_low
from .tensors import Inputs, Outputs, Shapes, Workspace, current_device, guarded_outputs

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FP32_SUM = 2.0**-22  # error of a sum in fp32, over the sum of its terms' magnitudes

Truth = tuple[str, torch.Tensor, torch.Tensor]  # name, fp32 truth, the formula in the input dtype


class Binding(Protocol):
    """One way to call the kernels of one direction."""

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """Normal inputs, off 16-byte alignment where the problem says so.

        Args:
            problem: gives shapes and dtype.
            seed: of the numbers; the same seed gives the same ones on the same kind of device.
            device: where.
        """

    def output_shapes(self, problem: Problem) -> Shapes:
        """Shape and dtype of every output by its name."""

    def truths(self, problem: Problem, inputs: Inputs) -> Iterator[Truth]:
        """What every output is held against."""


class AttentionForward:
    """o and lse from q, k and v."""

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """See :meth:`Binding.inputs`."""
        normal = _Normal(problem, seed, device)
        return Inputs(tensors={"q": normal.q(), "k": normal.k(), "v": normal.v()})

    def output_shapes(self, problem: Problem) -> Shapes:
        """See :meth:`Binding.output_shapes`."""
        rows = (problem.batch, problem.heads_q, problem.seqlen_q)
        return {
            "o": ((*rows, problem.dim_v), TORCH_DTYPES[problem.dtype]),
            "lse": (rows, torch.float32),
        }

    def truths(self, problem: Problem, inputs: Inputs) -> Iterator[Truth]:
        """See :meth:`Binding.truths`."""
        q, k, v, mask = inputs.q, inputs.k, inputs.v, _mask(problem)
        o_ref, lse_ref = attention(q, k, v, **mask)
        o_low, lse_low = attention_low(q, k, v, **mask)
        yield "o", o_ref, o_low
        yield "lse", lse_ref, lse_low


class AttentionBackward:
    """dq, dk and dv from q, k, v, o, lse and dout.

    Args:
        lse_gradient: LSE has a gradient too.
    """

    def __init__(self, *, lse_gradient: bool = False) -> None:
        self._lse_gradient = lse_gradient

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """See :meth:`Binding.inputs`; o and lse are the truth of the forward pass, rounded."""
        normal = _Normal(problem, seed, device)
        q, k, v = normal.q(), normal.k(), normal.v()
        o, lse = attention(q, k, v, **_mask(problem))
        tensors = {"q": q, "k": k, "v": v, "o": o.to(q.dtype), "lse": lse, "dout": normal.dout()}
        if self._lse_gradient:
            tensors["dlse"] = normal.dlse()
        return Inputs(tensors=tensors)

    def output_shapes(self, problem: Problem) -> Shapes:
        """See :meth:`Binding.output_shapes`."""
        dtype = TORCH_DTYPES[problem.dtype]
        rows_q = (problem.batch, problem.heads_q, problem.seqlen_q)
        rows_k = (problem.batch, problem.heads_kv, problem.seqlen_k)
        return {
            "dq": ((*rows_q, problem.dim_qk), dtype),
            "dk": ((*rows_k, problem.dim_qk), dtype),
            "dv": ((*rows_k, problem.dim_v), dtype),
        }

    def truths(self, problem: Problem, inputs: Inputs) -> Iterator[Truth]:
        """See :meth:`Binding.truths`.

        A gradient of attention is a sum of differences, of which ``delta = rowsum(dout o)`` is one side. Where they
        cancel, in rows that see one key or nearly, the eager formula can be exact, while no kernel that is handed a
        rounded o and sums in fp32 can. What these two are worth widens the distance of the formula from the truth; a
        shift of delta acts as a gradient of LSE does.
        """
        mask, read = _mask(problem), (inputs.q, inputs.k, inputs.v)
        dout, dlse = inputs.tensors["dout"], inputs.tensors.get("dlse")
        wide = [tensor.float() for tensor in read]  # or the truth would be rounded to their dtype
        refs = attention_backward(dout, dlse, *wide, **mask)
        shift = _shift_of_delta(inputs, attention(*wide, **mask)[0])
        shifted = attention_backward(dout, shift if dlse is None else dlse + shift, *wide, **mask)
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in read]
            o, lse = attention_low(*leaves, **mask)
            given = [(o, dout)] if dlse is None else [(o, dout), (lse, dlse)]
            lows = torch.autograd.grad([out for out, _ in given], leaves, [g for _, g in given])
        for name, ref, near, low in zip(("dq", "dk", "dv"), refs, shifted, lows, strict=True):
            yield name, ref, low.float() + torch.copysign((near - ref).abs(), low.float() - ref)


def _shift_of_delta(inputs: Inputs, o_true: torch.Tensor) -> torch.Tensor:
    """How far a kernel's rowsum(dout o) may be from the truth: by the rounding of o, and by that of a sum in fp32."""
    o, dout = inputs.tensors["o"].float(), inputs.tensors["dout"].float()
    signs = 1.0 - 2.0 * (
        torch.arange(o.shape[2], device=o.device) % 2
    )  # errors of rows add at random
    return (dout * (o_true - o)).sum(-1) + signs * FP32_SUM * (dout * o).abs().sum(-1)


WAYS: dict[tuple[Op, Direction], tuple[Binding, ...]] = {
    ("attention", "forward"): (AttentionForward(),),
    ("attention", "backward"): (AttentionBackward(), AttentionBackward(lse_gradient=True)),
}
"""(op, direction) -> the ways to call its kernels, the one that is timed first."""


def ways_of(problem: Problem) -> tuple[Binding, ...]:
    """The ways to call a problem's kernels, the one that is timed first."""
    return WAYS[problem.op, problem.direction]


def make_inputs(problem: Problem, *, seed: int, device: torch.device | str | None = None) -> Inputs:
    """Inputs of the problem's first way to be called, on the current CUDA device by default."""
    where = current_device() if device is None else torch.device(device)
    return ways_of(problem)[0].inputs(problem, seed=seed, device=where)


def make_outputs(problem: Problem, workspace: Workspace, device: torch.device) -> Outputs:
    """Outputs of a problem, full of NaN between guards of a known pattern."""
    return guarded_outputs(ways_of(problem)[0].output_shapes(problem), workspace, device)


class _Normal:
    """Normal tensors of a problem, one after the other from one seed."""

    def __init__(self, problem: Problem, seed: int, device: torch.device) -> None:
        self._problem = problem
        self._device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def q(self) -> torch.Tensor:
        p = self._problem
        return self._tensor(p.heads_q, p.seqlen_q, p.dim_qk)

    def k(self) -> torch.Tensor:
        p = self._problem
        return self._tensor(p.heads_kv, p.seqlen_k, p.dim_qk)

    def v(self) -> torch.Tensor:
        p = self._problem
        return self._tensor(p.heads_kv, p.seqlen_k, p.dim_v)

    def dout(self) -> torch.Tensor:
        p = self._problem
        return self._tensor(p.heads_q, p.seqlen_q, p.dim_v)

    def dlse(self) -> torch.Tensor:
        p = self._problem
        shape = (p.batch, p.heads_q, p.seqlen_q)
        return torch.randn(shape, device=self._device, generator=self._generator)

    def _tensor(self, heads: int, rows: int, columns: int) -> torch.Tensor:
        batch = self._problem.batch
        offset = 0 if self._problem.alignment_bytes == 16 else 1  # elements
        flat = torch.randn(
            batch * heads * rows * columns + offset,
            dtype=TORCH_DTYPES[self._problem.dtype],
            device=self._device,
            generator=self._generator,
        )
        return flat[offset:].view(batch, heads, rows, columns)


def _mask(problem: Problem) -> dict[str, Any]:
    return {"causal": problem.causal, "causal_alignment": problem.causal_alignment}
