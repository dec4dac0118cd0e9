"""The ways to call attention's kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ...core.problem import Problem
from ..shared import binding
from ..shared.binding import Binding, Normal, Reference
from ..shared.tensors import Inputs, Shapes
from .reference import attention, attention_backward, attention_bounded, attention_low

FP32_SUM = 2.0**-22  # error of a sum in fp32, over the sum of its terms' magnitudes
GROWTH = (0.1, 8.0)  # of keys, from one end of the sequence to the other


class AttentionForward:
    """o and lse from q, k and v, over all keys or, where the problem has bounds, over those.

    Args:
        bounded: the bounds differ between batch entries, and NaN lies beyond them; else they leave all keys in.
        growing: keys grow along the sequence, towards its end in one half of the heads and towards its start in the
            other. Maxima of a row of normal scores stand after a tile or two; here a loop in either direction meets new
            ones to its end, by steps both above and below the threshold of a lazy rescale of O.
    """

    def __init__(self, *, bounded: bool = False, growing: bool = False) -> None:
        self._bounded = bounded
        self._growing = growing
        self.note = ", each batch entry with keys of its own" if bounded else ""
        self.note += ", with scores that grow along the keys" if growing else ""

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """See :meth:`.Binding.inputs`."""
        tensors = Normal(problem, seed, device).qkv()
        if self._growing:
            grow(tensors["k"], seed)
        if problem.key_bounds:
            ranges = key_ranges(problem.seqlen_k)
            rows = [ranges[(b + seed) % len(ranges)] for b in range(problem.batch)]
            if not self._bounded:
                rows = [(0, problem.seqlen_k)] * problem.batch
            bounds = torch.tensor(rows, dtype=torch.int32, device=device)
            tensors |= {"starts_k": bounds[:, 0].contiguous()}
            tensors |= {"seqlens_k": bounds[:, 1].contiguous()}
            for b, (begin, end) in enumerate(rows):
                for x in (tensors["k"], tensors["v"]):
                    x[b, :, : max(begin, 0)] = math.nan
                    x[b, :, max(end, 0) :] = math.nan
        return Inputs(tensors=tensors)

    def output_shapes(self, problem: Problem) -> Shapes:
        """See :meth:`.Binding.output_shapes`."""
        return binding.output_shapes(problem, "lse")

    def references(self, problem: Problem, inputs: Inputs) -> Iterator[Reference]:
        """See :meth:`.Binding.references`.

        LSE is kept in fp32 while the formula's is that of rounded scores, which in a row of few keys may be exact by
        luck.
        """
        q, k, v, mask = inputs.q, inputs.k, inputs.v, _mask(problem)
        mask |= {name: inputs.tensors.get(name) for name in ("seqlens_k", "starts_k")}
        o_ref, lse_ref = attention_bounded(q, k, v, **mask)
        o_low, lse_low = attention_low(q, k, v, **mask)
        yield "o", o_ref, o_low
        yield "lse", lse_ref, moved_off(lse_ref, lse_low, rounding_of_lse(q, k, lse_ref))


class AttentionBackward:
    """dq, dk and dv from q, k, v, o, lse and dout.

    Args:
        lse_gradient: LSE has a gradient too.
    """

    def __init__(self, *, lse_gradient: bool = False) -> None:
        self._lse_gradient = lse_gradient
        self.note = ", with a gradient of LSE" if lse_gradient else ""

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """See :meth:`.Binding.inputs`; o and lse are the reference of the forward pass, rounded."""
        normal = Normal(problem, seed, device)
        tensors = normal.qkv()
        q, k, v = tensors.values()
        o, lse = attention(q, k, v, **_mask(problem))
        tensors |= {"o": o.to(q.dtype), "lse": lse, "dout": normal.dout()}
        if self._lse_gradient:
            tensors["dlse"] = normal.floats(*lse.shape)
        return Inputs(tensors=tensors)

    def output_shapes(self, problem: Problem) -> Shapes:
        """See :meth:`.Binding.output_shapes`."""
        return binding.gradient_shapes(problem)

    def references(self, problem: Problem, inputs: Inputs) -> Iterator[Reference]:
        """See :meth:`.Binding.references`.

        A gradient of attention is a sum of differences, of which ``delta = rowsum(dout o)`` is one side. Where they
        cancel, in rows that see one key or nearly, the eager formula can be exact, while no kernel that is handed a
        rounded o and sums in fp32 can. What these two are worth widens the distance of the formula from the reference;
        a shift of delta acts as a gradient of LSE does.
        """
        mask, read = _mask(problem), (inputs.q, inputs.k, inputs.v)
        dout, dlse = inputs.tensors["dout"], inputs.tensors.get("dlse")
        # In fp32, or the reference would be rounded to their dtype.
        in_fp32 = [tensor.float() for tensor in read]
        refs = attention_backward(dout, dlse, *in_fp32, **mask)
        shift = shift_of_delta(inputs, attention(*in_fp32, **mask)[0])
        shifted = attention_backward(
            dout, shift if dlse is None else dlse + shift, *in_fp32, **mask
        )
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in read]
            o, lse = attention_low(*leaves, **mask)
            lows = binding.gradients_of_formula([(o, dout), (lse, dlse)], leaves)
        for name, ref, near, low in zip(("dq", "dk", "dv"), refs, shifted, lows, strict=True):
            yield name, ref, moved_off(ref, low.float(), (near - ref).abs())


def moved_off(ref: torch.Tensor, low: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """The formula's result, moved off the reference by a width, elementwise."""
    return low + torch.copysign(width, low - ref)


def rounding_of_lse(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The rounding of sums in fp32 in the LSE of every row: ``[batch, heads_q, seqlen_q]``.

    A score is a sum over the head dim, whose terms' magnitudes add up to at most the norms' product; the LSE is the
    largest score plus the logarithm of a sum.

    Args:
        q: ``[batch, heads_q, seqlen_q, dim_qk]``.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``; keys that are NaN are not read.
        lse: of the reference, minus infinity in rows that see no key.
    """
    return FP32_SUM * (most_scores(q, k) + lse.masked_fill(lse.isinf(), 0.0).abs())


def most_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A bound of each row's scores, and of the sums of their terms' magnitudes; arguments as of rounding_of_lse."""
    largest_key = k.float().norm(dim=-1).nan_to_num(0.0).amax(-1, keepdim=True)
    largest_key = largest_key.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = float(q.shape[-1] ** -0.5)
    most: torch.Tensor = scale * q.float().norm(dim=-1) * largest_key
    return most


def shift_of_delta(inputs: Inputs, o_exact: torch.Tensor) -> torch.Tensor:
    """The distance of a kernel's rowsum(dout o) from the reference: the rounding of o and that of a sum in fp32."""
    o, dout = inputs.tensors["o"].float(), inputs.tensors["dout"].float()
    # Errors of rows add at random.
    signs = 1.0 - 2.0 * (torch.arange(o.shape[2], device=o.device) % 2)
    return (dout * (o_exact - o)).sum(-1) + signs * FP32_SUM * (dout * o).abs().sum(-1)


def grow(k: torch.Tensor, seed: int) -> None:
    """Multiply keys in place by :data:`GROWTH` along the sequence, in a direction that alternates with heads.

    Args:
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``.
        seed: exchanges the directions, for tensors of one head.
    """
    batch, heads, length, _ = k.shape
    # In fp32: fp16 does not count to the lengths of sequences, and may give NaN beyond 65504 keys.
    factors = torch.linspace(*GROWTH, length, device=k.device, dtype=torch.float32).to(k.dtype)
    index = torch.arange(batch * heads, device=k.device).view(batch, heads, 1, 1)
    k *= torch.where((index + seed) % 2 == 0, factors[:, None], factors.flip(0)[:, None])


def key_ranges(seqlen_k: int) -> list[tuple[int, int]]:
    """First keys and ends that a kernel has to be right for: none, one, odd and all, beyond the tensor, exchanged."""
    few, many = seqlen_k // 3, seqlen_k - seqlen_k // 4
    return [
        *((0, few | 1), (0, 0), (few, seqlen_k), (0, 1), (few, many), (0, seqlen_k)),
        *((seqlen_k - 1, seqlen_k), (many, few), (-5, seqlen_k + 7)),
    ]


def _mask(problem: Problem) -> dict[str, Any]:
    return {"causal": problem.causal, "causal_alignment": problem.causal_alignment}


FORWARD: tuple[Binding, ...] = (AttentionForward(), AttentionForward(growing=True))
BOUNDED: tuple[Binding, ...] = (FORWARD[0], AttentionForward(bounded=True), FORWARD[1])
BACKWARD: tuple[Binding, ...] = (AttentionBackward(), AttentionBackward(lse_gradient=True))


def ways(problem: Problem) -> tuple[Binding, ...]:
    """The ways to call the kernels of an attention problem, the one that is timed first."""
    if problem.compiled_modifications:
        from . import modified_inputs  # stands on this module

        return modified_inputs.ways(problem)
    if problem.direction == "backward":
        return BACKWARD
    return BOUNDED if problem.key_bounds else FORWARD
