"""References and error bounds of masked, normalised retention, forward and backward.

The reference is the formula in fp32; the bound comes from the formula in the input dtype. Where X overflows fp16, the
low-precision result is computed with a scale that is some binary orders smaller, which changes r and nothing else. With
a gradient through r, dX is a difference that may cancel, while a kernel reads a rounded o: that rounding widens the
bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from attention_autotuner.operations.bindings import TORCH_DTYPES
from attention_autotuner.reference import (
    decay_mask,
    retnet_attention,
    retnet_attention_backward,
    retnet_attention_low,
)

from .cases import Layout
from .guarded_buffers import GuardedBuffer, make_input, make_output, place_input
from .retnet_cases import RetnetCase

Tensors = dict[str, GuardedBuffer]
Reference = tuple[str, torch.Tensor, torch.Tensor]
Views = Mapping[str, torch.Tensor]

FLIPPED: dict[Layout, Layout] = {
    "batch_broadcast": "heads_broadcast",
    "heads_broadcast": "batch_broadcast",
}
MASK_LAYOUTS: dict[Layout, Layout] = {
    "transposed": "transposed",
    "padded": "padded",
    "unaligned": "unaligned",
}  # layout of the mask by the layout of q; otherwise dense
OTHER_OUTPUT: dict[Layout, Layout] = {
    "dense": "transposed",
    "transposed": "padded",
    "padded": "dense",
}  # layout of o by the layout of the gradients
LARGE = 3000.0  # times a normal number: with dot products of a few, X exceeds 65504
FP32_ROUNDING = 2.0**-22  # of a sum, over the sum of its terms' magnitudes


def make_mask(case: RetnetCase, generator: torch.Generator) -> torch.Tensor:
    """The values of an explicit mask, ``[heads_q | 1, seqlen_q, seqlen_k]`` in the input dtype.

    Above the diagonal of a causal problem, where the caller promised zeros, there is noise.
    """
    p, device = case.problem, generator.device
    shape = (1 if case.shared else p.heads_q, p.seqlen_q, p.seqlen_k)
    noise = torch.randn(shape, device=device, generator=generator)
    rows = torch.arange(p.seqlen_q, device=device)[:, None] + p.seqlen_k - p.seqlen_q
    distance = rows - torch.arange(p.seqlen_k, device=device)
    if case.values == "retnet":
        heads = torch.arange(shape[0], device=device)[:, None, None]
        mask = (distance.abs() * torch.log1p(-(2.0 ** (-3.0 - heads)))).exp()
        mask = mask / mask.sum(-1, keepdim=True).sqrt().clamp(min=2**-12)  # rows may see no key
    else:
        mask = {
            "normal": lambda: noise,
            "negative": lambda: -noise.abs(),
            "zero_rows": lambda: noise * (torch.arange(p.seqlen_q, device=device)[:, None] % 3 > 0),
            "sparse": lambda: noise * (noise > 1.5),
            "ones": lambda: torch.ones_like(noise),
            "large": lambda: LARGE * (1.0 + noise.abs()),
            "small": lambda: 1e-4 * noise,
        }[case.values]()
    if p.causal:
        mask = torch.where(distance < 0, noise, mask)
    return mask.to(TORCH_DTYPES[p.dtype])


def make_inputs(case: RetnetCase, generator: torch.Generator) -> Tensors:
    """q, k, v and the mask ``[1, heads, seqlen_q, seqlen_k]``, or the logarithms of the decays."""
    p, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
    rows_q, rows_k = (p.batch, p.heads_q, p.seqlen_q), (p.batch, p.heads_kv, p.seqlen_k)
    flipped = FLIPPED.get(case.inputs, case.inputs)  # so that outputs stay varied
    made = {
        "q": make_input((*rows_q, p.dim_qk), flipped, dtype, generator),
        "k": make_input((*rows_k, p.dim_qk), case.inputs, dtype, generator),
        "v": make_input((*rows_k, p.dim_v), case.inputs, dtype, generator),
    }
    if case.explicit:
        layout = MASK_LAYOUTS.get(case.inputs, "dense")
        made["mask"] = place_input(make_mask(case, generator)[None], layout)
    else:
        log2 = case.log2_gamma().to(generator.device)
        made["log2_gamma"] = place_input(log2[None, None, None], "dense")
    return made


def options_of(case: RetnetCase, small: float = 1.0) -> dict[str, Any]:
    """Keyword arguments of the reference, for a scale ``small`` times the case's."""
    clamp = case.r_clamp_max
    return {
        "scale": case.true_scale * small,
        "causal": case.problem.causal,
        "normalize": case.normalize,
        "r_clamp_max": None if clamp is None else max(1.0, clamp * small),
    }


def mask_of(case: RetnetCase, inputs: Views) -> torch.Tensor:
    """The mask ``[heads_q | 1, seqlen_q, seqlen_k]``: the explicit mask, or the powers of the decays in fp32."""
    if case.explicit:
        return inputs["mask"][0]
    p = case.problem
    gamma = inputs["log2_gamma"].flatten().double().exp2()
    return decay_mask(gamma, p.heads_q, p.seqlen_q, p.seqlen_k, gamma.device).float()


class RetnetForwardCall:
    """Inputs, outputs and references of the forward pass: o and, where the case wants it, r."""

    def scalars(self, case: RetnetCase) -> Mapping[str, float]:
        """Scale and normaliser."""
        clamp = math.inf if case.r_clamp_max is None else case.r_clamp_max
        return {"scale": case.true_scale, "r_clamp_max": clamp, "normalize": int(case.normalize)}

    def inputs(self, case: RetnetCase, *, seed: int, device: torch.device) -> Tensors:
        """See :func:`make_inputs`."""
        return make_inputs(case, torch.Generator(device=device).manual_seed(seed))

    def outputs(self, case: RetnetCase, device: torch.device) -> Tensors:
        """Poisoned; r has a last axis of one element."""
        p = case.problem
        rows = (p.batch, p.heads_q, p.seqlen_q)
        made = {"o": make_output((*rows, p.dim_v), case.output, TORCH_DTYPES[p.dtype], device)}
        if case.r:
            made["r"] = make_output((*rows, 1), "dense", torch.float32, device)
        return made

    def references(self, case: RetnetCase, inputs: Views) -> Iterator[Reference]:
        """References of o and r."""
        (q, k, v), mask = (inputs[name] for name in "qkv"), mask_of(case, inputs)
        o_ref, r_ref = retnet_attention(q, k, v, mask, **options_of(case))
        small = 2.0**-case.shrink
        o_low, r_low = retnet_attention_low(q, k, v, mask, **options_of(case, small))
        if case.shrink:
            # Rows that the smaller scale takes below r's least value have no error bound of their own.
            o_low = torch.where((r_ref * small > 2.0)[..., None], o_low.float(), o_ref)
        yield "o", o_ref, o_low
        if case.r:
            r_low = r_low / small
            r_low = r_low + torch.copysign(rounding_of_r(case, inputs), r_low - r_ref)
            yield "r", r_ref[..., None], r_low[..., None]


class RetnetBackwardCall:
    """Inputs, outputs and references of the backward pass: dq, dk, dv and, where the case wants it, dmask."""

    def scalars(self, case: RetnetCase) -> Mapping[str, float]:
        """Scale and normaliser."""
        clamp = math.inf if case.r_clamp_max is None else case.r_clamp_max
        return {"scale": case.true_scale, "r_clamp_max": clamp, "r_grad": int(case.r_grad)}

    def inputs(self, case: RetnetCase, *, seed: int, device: torch.device) -> Tensors:
        """The inputs of the forward pass, dout, its r and, for a gradient through r, its o."""
        p, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
        generator = torch.Generator(device=device).manual_seed(seed)
        made = make_inputs(case, generator)
        shape = (p.batch, p.heads_q, p.seqlen_q, p.dim_v)
        made["dout"] = make_input(shape, case.gradient, dtype, generator)
        views = {name: buffer.view for name, buffer in made.items()}
        q, k, v = (views[name] for name in "qkv")
        o, r = retnet_attention(q, k, v, mask_of(case, views), **options_of(case))
        if case.normalize:
            made["r"] = place_input(r[..., None], "dense")
        if case.r_grad:
            made["o"] = place_input(o.to(dtype), OTHER_OUTPUT[case.output])
        return made

    def outputs(self, case: RetnetCase, device: torch.device) -> Tensors:
        """Poisoned; dmask ``[1, heads, seqlen_q, seqlen_k]``."""
        p, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
        rows_q, rows_k = (p.batch, p.heads_q, p.seqlen_q), (p.batch, p.heads_kv, p.seqlen_k)
        shapes = {
            "dq": (*rows_q, p.dim_qk),
            "dk": (*rows_k, p.dim_qk),
            "dv": (*rows_k, p.dim_v),
        }
        made = {
            name: make_output(shape, case.output, dtype, device) for name, shape in shapes.items()
        }
        if case.has("dmask"):
            scores = (1, 1 if case.shared else p.heads_q, p.seqlen_q, p.seqlen_k)
            made["dmask"] = make_output(scores, "dense", dtype, device)
        return made

    def references(self, case: RetnetCase, inputs: Views) -> Iterator[Reference]:
        """References of all gradients."""
        mask, wanted = mask_of(case, inputs), case.has("dmask")
        r_grad = case.has("r_grad")
        q, k, v = (inputs[name] for name in "qkv")
        refs = retnet_attention_backward(
            inputs["dout"].float(),
            q.float(),  # otherwise the reference would be rounded
            k.float(),
            v.float(),
            mask.float(),
            need_dmask=wanted,
            r_grad=r_grad,
            **options_of(case),
        )
        lows = retnet_attention_backward(
            inputs["dout"],
            q,
            k,
            v,
            mask,
            need_dmask=wanted,
            r_grad=r_grad,
            dtype=q.dtype,
            **options_of(case, 2.0**-case.shrink),
        )
        widths = rounding_through_r(case, inputs) if r_grad else {}
        for name, ref, low in zip(("dq", "dk", "dv", "dmask"), refs, lows, strict=True):
            if ref is None or low is None:
                continue
            low = low.float()
            if name in widths:
                low = low + torch.copysign(widths[name], low - ref)
            if name == "dmask":
                ref, low = ref[None], low[None]
            yield name, ref, low


def rounding_of_r(case: RetnetCase, inputs: Views) -> torch.Tensor:
    """The error of r from sums in fp32: ``[batch, heads_q, seqlen_q]``."""
    q, k, v = (inputs[name].float() for name in "qkv")
    options = options_of(case) | {"scale": abs(case.true_scale), "r_clamp_max": None}
    sums = retnet_attention(q.abs(), k.abs(), v[..., :1], mask_of(case, inputs).abs(), **options)[1]
    return FP32_ROUNDING * sums


def rounding_through_r(case: RetnetCase, inputs: Views) -> dict[str, torch.Tensor]:
    """The error of gradients through r from a rounded o and from sums in fp32; elementwise, fp32.

    The rounding shifts ``rowsum(dO * O)`` by some delta a row, hence dX by ``sign(X) delta / r``. Where X is so near 0
    that the order of a sum decides its sign, dX is off by ``2 rowsum(dO * O) / r``. Rows with a clamped r have no such
    error.
    """
    p = case.problem
    group = p.heads_q // p.heads_kv
    q, o, dout, r = (inputs[name].float() for name in ("q", "o", "dout", "r"))
    k = inputs["k"].float().repeat_interleave(group, dim=1)
    mask = mask_of(case, inputs).float()
    if p.causal:
        rows = torch.arange(p.seqlen_q, device=q.device)[:, None] + p.seqlen_k - p.seqlen_q
        mask = mask.masked_fill(torch.arange(p.seqlen_k, device=q.device) > rows, 0.0)
    s = case.true_scale * (q @ k.mT)
    sums = FP32_ROUNDING * abs(case.true_scale) * (q.abs() @ k.abs().mT)
    no_sure_sign = ((s.abs() < sums) & (mask != 0)).float()
    terms = dout * o
    unit = torch.finfo(TORCH_DTYPES[p.dtype]).eps / 4  # of a rounded value, root mean square
    delta = unit * terms.square().sum(-1, keepdim=True).sqrt()
    # A band of few rows has no average: there the actual rounding of o counts, where it is larger.
    exact = retnet_attention(inputs["q"], inputs["k"], inputs["v"], mask, **options_of(case))[0]
    delta = delta.maximum((dout * (exact - o)).sum(-1, keepdim=True).abs())
    delta = delta + FP32_ROUNDING * terms.abs().sum(-1, keepdim=True)
    top = math.inf if case.r_clamp_max is None else case.r_clamp_max
    clamped = (r <= 1.0) | (r >= top)
    delta = (delta / r).masked_fill(clamped, 0.0)
    turned = 2.0 * (terms.sum(-1, keepdim=True).abs() / r).masked_fill(clamped, 0.0)
    turned = turned * no_sure_sign * mask.abs()
    ds = mask.abs() * s.sign()  # of dS = sign(X) mask delta / r, without the row's factor
    dk = (ds * delta).square().mT @ q.square()
    roundings = {
        "dq": (case.true_scale * delta * (ds @ k)).abs()
        + abs(case.true_scale) * (turned @ k.abs()),
        "dk": abs(case.true_scale) * dk.unflatten(1, (p.heads_kv, group)).sum(2).sqrt()
        + abs(case.true_scale) * (turned.mT @ q.abs()).unflatten(1, (p.heads_kv, group)).sum(2),
        "dv": torch.zeros_like(inputs["v"], dtype=torch.float32),
    }
    if case.has("dmask"):
        squares = (delta * s).masked_fill(mask == 0, 0.0).square().sum(0)
        roundings["dmask"] = (squares.sum(0, keepdim=True) if case.shared else squares).sqrt()
    return roundings
