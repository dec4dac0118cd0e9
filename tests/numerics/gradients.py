"""References and error bounds of attention backward.

The reference is the gradient in fp32; the bound comes from the error of the formula run eagerly in the input dtype. A
gradient of attention is a sum of differences ``dP - delta``, and where they cancel (a row that sees one key, or nearly)
the eager formula can be exact, while a kernel that reads a rounded O and sums in fp32 cannot be. So the bound is
widened by these two roundings, to first order: far below the eager formula's own error everywhere else. Where
probabilities, or the gradients of their scores, are below the normal numbers of a dtype, the bound is also widened by
the underflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from attention_autotuner.operations.bindings import TORCH_DTYPES
from attention_autotuner.reference import attention, attention_backward, attention_low

from .cases import Case, Layout
from .guarded_buffers import GuardedBuffer, make_input, make_output, place_input

Tensors = dict[str, GuardedBuffer]
NAMES = ("dq", "dk", "dv")
OTHER_OUTPUT: dict[Layout, Layout] = {
    "dense": "transposed",
    "transposed": "padded",
    "padded": "dense",
}  # layout of o by the layout of the gradients
FP32_ROUNDING = 2.0**-22  # of a sum, over the sum of its terms' magnitudes


def underflow_of(dtype: torch.dtype) -> float:
    """The largest error below the normal numbers: half the spacing of subnormals, or in fp32 the whole number.

    The exponentials of GPUs flush subnormal fp32 results to zero.
    """
    info = torch.finfo(dtype)
    return max(info.tiny * info.eps / 2, torch.finfo(torch.float32).tiny)


def scalars_of(case: Case) -> dict[str, float]:
    """The softmax scale of a case, by its name in the C ABI."""
    default = float(case.problem.dim_qk**-0.5)
    return {"softmax_scale": default if case.scale is None else case.scale}


class BackwardCall:
    """Inputs, outputs and references of attention backward: dq, dk and dv.

    Args:
        make_inputs: makes q, k and v.
    """

    def __init__(self, make_inputs: Callable[[Case, torch.Generator], Tensors]) -> None:
        self._make_inputs = make_inputs

    def scalars(self, case: Case) -> Mapping[str, float]:
        """The softmax scale."""
        return scalars_of(case)

    def inputs(self, case: Case, *, seed: int, device: torch.device) -> Tensors:
        """q, k, v, the o and lse of a forward pass, dout and, where the case has it, dlse."""
        p, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
        generator = torch.Generator(device=device).manual_seed(seed)
        made = self._make_inputs(case, generator)
        rows = (p.batch, p.heads_q, p.seqlen_q)
        made["dout"] = make_input((*rows, p.dim_v), case.gradient, dtype, generator)
        if case.lse:
            made["dlse"] = make_input((*rows, 1), "dense", torch.float32, generator)
        o, lse = attention(*(made[name].view for name in ("q", "k", "v")), **case.options)
        made["o"] = place_input(o.to(dtype), OTHER_OUTPUT[case.output])
        made["lse"] = place_input(lse[..., None], "dense")
        return made

    def outputs(self, case: Case, device: torch.device) -> Tensors:
        """The three gradients."""
        p, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
        rows_q, rows_k = (p.batch, p.heads_q, p.seqlen_q), (p.batch, p.heads_kv, p.seqlen_k)
        shapes = ((*rows_q, p.dim_qk), (*rows_k, p.dim_qk), (*rows_k, p.dim_v))
        return {
            name: make_output(shape, case.output, dtype, device)
            for name, shape in zip(NAMES, shapes, strict=True)
        }

    def references(
        self, case: Case, inputs: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, reference and widened low-precision result of every gradient."""
        read = tuple(inputs[name] for name in ("q", "k", "v"))
        dout = inputs["dout"]
        dlse = inputs["dlse"][..., 0] if case.lse else None
        # In fp32, as the reference would otherwise be rounded to the dtype of its inputs.
        read_fp32 = (tensor.float() for tensor in read)
        refs = attention_backward(dout, dlse, *read_fp32, **case.options)
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in read]
            o, lse = attention_low(*leaves, **case.options)
            ends = [(o, dout)] if dlse is None else [(o, dout), (lse, dlse)]
            lows = torch.autograd.grad([end for end, _ in ends], leaves, [g for _, g in ends])
        widths = rounding(case, inputs)
        for name, ref, low in zip(NAMES, refs, lows, strict=True):
            error = low.float() - ref
            yield name, ref, low.float() + torch.copysign(widths[name], error)


def rounding_of_lse(
    case: Case, inputs: Mapping[str, torch.Tensor], lse: torch.Tensor
) -> torch.Tensor:
    """The error of LSE from fp32 sums: over the head dim, over exponentials, and of the logarithm with the maximum."""
    p = case.problem
    scale = p.dim_qk**-0.5 if case.scale is None else case.scale
    q = inputs["q"].float()
    k = inputs["k"].float().repeat_interleave(p.heads_q // p.heads_kv, dim=1)
    terms = abs(scale) * q.norm(dim=-1) * k.norm(dim=-1).amax(-1, keepdim=True)
    return FP32_ROUNDING * (terms + lse.masked_fill(lse.isinf(), 0.0).abs())


def rounding(case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The error of each gradient from a rounded O, fp32 sums, and underflow of P and dS; elementwise, fp32.

    Args:
        case: defines mask and scale.
        inputs: q, k, v, o, lse and dout by name.
    """
    p = case.problem
    scale = p.dim_qk**-0.5 if case.scale is None else case.scale
    group = p.heads_q // p.heads_kv
    q, o, dout = (inputs[name].float() for name in ("q", "o", "dout"))
    k, v = (inputs[name].float().repeat_interleave(group, dim=1) for name in ("k", "v"))
    lse = inputs["lse"]
    probabilities = (scale * (q @ k.mT) - lse.masked_fill(lse.isinf(), 0.0)).exp()
    probabilities = probabilities.masked_fill(lse.isinf(), 0.0)
    if p.causal:
        rows = torch.arange(p.seqlen_q, device=q.device)[:, None]
        hidden = torch.arange(p.seqlen_k, device=q.device) > rows + p.causal_offset
        probabilities = probabilities.masked_fill(hidden, 0.0)
    unit = torch.finfo(TORCH_DTYPES[p.dtype]).eps / 4  # of a rounded value, root mean square
    of_delta = unit * (dout * o).square().sum(-1, keepdim=True).sqrt()
    # A band of few rows has no average: there the actual rounding of o counts, where it is larger.
    exact = attention(*(inputs[name] for name in ("q", "k", "v")), **case.options)[0]
    of_delta = of_delta.maximum((dout * (exact - o)).sum(-1, keepdim=True).abs())
    of_sums = FP32_ROUNDING * (dout.abs() @ v.abs().mT)
    squares = (probabilities * (of_delta + of_sums)).square()
    seen = torch.ones_like(probabilities).masked_fill(lse.isinf(), 0.0)
    if p.causal:
        seen = seen.masked_fill(hidden, 0.0)

    def over_queries(terms: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Root of the sum of squares over the queries of all heads of a group."""
        return (terms.mT @ rows.square()).unflatten(1, (p.heads_kv, group)).sum(2).sqrt()

    lost = underflow_of(TORCH_DTYPES[p.dtype])
    return {
        "dq": abs(scale) * ((squares @ k.square()).sqrt() + lost * (seen @ k.square()).sqrt()),
        "dk": abs(scale) * (over_queries(squares, q) + lost * over_queries(seen, q)),
        "dv": lost * over_queries(seen, dout),
    }
