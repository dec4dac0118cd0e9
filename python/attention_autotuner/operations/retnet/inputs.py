"""The ways to call retnet's kernels: a mask or a decay, normalised or not, and which gradients are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...core.problem import Problem
from ..attention.inputs import FP32_SUM, moved_off, shift_of_delta
from ..retention.reference import decay_mask
from ..shared import binding
from ..shared.binding import Binding, Normal, Reference
from ..shared.blocks import full_precision
from ..shared.gammas import gammas_of, log2_gammas
from ..shared.tensors import Inputs, Shapes
from .masks import decaying_mask, random_mask, spread_sums
from .reference import retnet_attention, retnet_attention_backward, retnet_attention_low

EDGE_WIDTH = 2.0**-6  # of a sum of terms in bf16, relative


@dataclass(frozen=True, kw_only=True)
class _Way:
    """The options of both directions.

    Attributes:
        note: as :class:`.Binding` has it.
        shared: one mask of any values serves all heads; else every head has its own.
        any_values: the mask is random rather than decaying.
        at_limits: rows of an explicit mask are scaled such that some have r = 1, some more than 4, and some between.
        edge: which decays, see :func:`.log2_gammas`.
        normalize: whether rows are divided by r.
        r_clamp_max: the most that r may be.
        sign: of the scale.
    """

    note: str = ""
    shared: bool = False
    any_values: bool = False
    at_limits: bool = False
    edge: int | None = None
    normalize: bool = True
    r_clamp_max: float | None = None
    sign: int = 1

    def factors(self, problem: Problem, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The mask, or the decay, as params name it."""
        if problem.mask == "decay":
            return {"log2_gamma": log2_gammas(problem.heads_q, device, self.edge)}
        if self.any_values:
            mask = random_mask(problem, 1 if self.shared else problem.heads_q, seed, device)
        else:
            mask = decaying_mask(problem, device)
        return {"mask": spread_sums(problem, mask) if self.at_limits else mask}

    def scalars(self, problem: Problem) -> dict[str, float]:
        """Params beside sizes; scores are about as large as one."""
        limit = {} if self.r_clamp_max is None else {"r_clamp_max": self.r_clamp_max}
        return {"scale": self.sign * problem.dim_qk**-0.5, **limit}

    def rules(self, problem: Problem) -> dict[str, Any]:
        """The same for the reference."""
        return {
            "scale": self.sign * problem.dim_qk**-0.5,
            "causal": problem.causal,
            "normalize": self.normalize,
            "r_clamp_max": self.r_clamp_max,
        }


def _mask_of(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """The mask, or what the decay would be as one, in fp32."""
    log2 = inputs.tensors.get("log2_gamma")
    if log2 is None:
        return inputs.tensors["mask"].float()
    return decay_mask(
        gammas_of(log2), problem.heads_q, problem.seqlen_q, problem.seqlen_k, log2.device
    ).float()


class _Head(NamedTuple):
    """One head of one batch, in fp32.

    Attributes:
        batch, head: which.
        scale: of the scores.
        q, k: ``[seqlen_q, dim]`` and ``[seqlen_k, dim]``.
        s: scores times the scale.
        mask: shaped alike, 0 where nobody looks.
    """

    batch: int
    head: int
    scale: float
    q: torch.Tensor
    k: torch.Tensor
    s: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RetNetForward(_Way):
    """o and, unless r is 1 everywhere, r from q, k, v and a mask or a decay."""

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """See :meth:`.Binding.inputs`."""
        tensors = Normal(problem, seed, device).qkv()
        scalars = self.scalars(problem) | {"normalize": int(self.normalize)}
        return Inputs(tensors=tensors | self.factors(problem, seed, device), scalars=scalars)

    def output_shapes(self, problem: Problem) -> Shapes:
        """See :meth:`.Binding.output_shapes`."""
        return binding.output_shapes(problem, "r" if self.normalize else "")

    def references(self, problem: Problem, inputs: Inputs) -> Iterator[Reference]:
        """See :meth:`.Binding.references`.

        r is summed in fp32 while the formula's is that of rounded X, which in a row of few keys may be exact by luck.
        """
        read, mask = (inputs.q, inputs.k, inputs.v), _mask_of(problem, inputs)
        o_ref, r_ref = retnet_attention(*read, mask, **self.rules(problem))
        o_low, r_low = retnet_attention_low(*read, mask.to(inputs.q.dtype), **self.rules(problem))
        yield "o", o_ref, o_low
        if self.normalize:
            yield "r", r_ref, moved_off(r_ref, r_low, self._rounding_of_r(problem, inputs, mask))

    def _rounding_of_r(self, problem: Problem, inputs: Inputs, mask: torch.Tensor) -> torch.Tensor:
        """The rounding of sums in fp32 in every r: ``[batch, heads_q, seqlen_q]``.

        The terms of a score add up to at most the product of the norms, those of r to at most the sum of such products.
        """
        scale, group = abs(self.rules(problem)["scale"]), problem.heads_q // problem.heads_kv
        magnitudes = mask.abs()
        if problem.causal:
            magnitudes = magnitudes.tril(problem.causal_offset)
        keys = inputs.k.float().norm(dim=-1).repeat_interleave(group, dim=1)
        terms = (magnitudes @ keys.permute(1, 2, 0)).permute(2, 0, 1)
        widths: torch.Tensor = FP32_SUM * scale * inputs.q.float().norm(dim=-1) * terms
        return widths


@dataclass(frozen=True, kw_only=True)
class RetNetBackward(_Way):
    """dq, dk, dv and perhaps dmask from dout and what the forward read and left.

    Attributes:
        r_grad: gradients flow through r.
        dmask: the gradient of the mask is wanted.
    """

    r_grad: bool = False
    dmask: bool = False

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """See :meth:`.Binding.inputs`; r and o are the reference of the forward pass, o rounded."""
        normal = Normal(problem, seed, device)
        tensors = normal.qkv()
        q, k, v = tensors.values()
        tensors["dout"] = normal.dout()
        tensors |= self.factors(problem, seed, device)
        scalars = self.scalars(problem) | {"r_grad": int(self.r_grad)}
        if self.normalize:
            mask = _mask_of(problem, Inputs(tensors=tensors))
            o, tensors["r"] = retnet_attention(q, k, v, mask, **self.rules(problem))
            if self.r_grad:
                tensors["o"] = o.to(q.dtype)
                undecided = self._at_an_edge(problem, tensors, mask)
                undecided |= self._of_no_sure_sign(problem, tensors, mask)
                tensors["dout"] = tensors["dout"].masked_fill(undecided[..., None], 0.0)
        return Inputs(tensors=tensors, scalars=scalars)

    def _at_an_edge(
        self, problem: Problem, tensors: dict[str, torch.Tensor], mask: torch.Tensor
    ) -> torch.Tensor:
        """``[batch, heads, rows]``: rows whose sum is so near a limit of r that a rounding decides about r's gradient.

        They are given no gradient, or the formula's rounding would excuse anything.
        """
        fine = 2.0**-10  # a mask so much larger lifts all sums that matter above the lower limit
        rules = self.rules(problem) | {"r_clamp_max": None}
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        total = retnet_attention(q, k, v, mask / fine, **rules)[1] * fine
        limits = (1.0,) if self.r_clamp_max is None else (1.0, self.r_clamp_max)
        near = [(total - limit).abs() < EDGE_WIDTH * limit for limit in limits]
        return torch.stack(near).any(0)

    def _of_no_sure_sign(
        self, problem: Problem, tensors: dict[str, torch.Tensor], mask: torch.Tensor
    ) -> torch.Tensor:
        """``[batch, heads, rows]``: rows where some X is so near 0 that the order of a sum in fp32 decides its sign.

        The other sign moves that dX by ``2 delta / r``: far more than any rounding, and no kernel's fault. They are few
        and given no gradient either.
        """
        values = torch.zeros(tensors["q"].shape[:3], dtype=torch.bool, device=mask.device)
        for scored in self._heads(problem, tensors["q"], tensors["k"], mask):
            sums = FP32_SUM * abs(scored.scale) * (scored.q.abs() @ scored.k.abs().mT)
            values[scored.batch, scored.head] = ((scored.s.abs() < sums) & (scored.mask != 0)).any(
                -1
            )
        return values

    def _heads(
        self, problem: Problem, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor
    ) -> Iterator[_Head]:
        """Scores and mask of one head after the other, in fp32."""
        scale, group = self.rules(problem)["scale"], problem.heads_q // problem.heads_kv
        rows = torch.arange(problem.seqlen_q, device=q.device)[:, None] + problem.causal_offset
        hidden = torch.arange(problem.seqlen_k, device=q.device) > rows
        for batch in range(problem.batch):
            for head in range(problem.heads_q):
                queries, keys = q[batch, head].float(), k[batch, head // group].float()
                part = mask[head % mask.shape[0]]
                with full_precision():
                    s = scale * (queries @ keys.mT)
                part = part.masked_fill(hidden, 0.0) if problem.causal else part
                yield _Head(batch, head, scale, queries, keys, s, part)

    def output_shapes(self, problem: Problem) -> Shapes:
        """See :meth:`.Binding.output_shapes`."""
        shapes = binding.gradient_shapes(problem)
        if self.dmask:
            heads = 1 if self.shared else problem.heads_q
            mask = (heads, problem.seqlen_q, problem.seqlen_k)
            shapes["dmask"] = (mask, binding.TORCH_DTYPES[problem.dtype])
        return shapes

    def references(self, problem: Problem, inputs: Inputs) -> Iterator[Reference]:
        """See :meth:`.Binding.references`.

        Through r, a gradient is a sum of differences as attention's is: what the rounding of o that a kernel is handed
        is worth widens the distance of the formula from the reference.
        """
        dout, mask = inputs.tensors["dout"], _mask_of(problem, inputs)
        read = (inputs.q, inputs.k, inputs.v)
        rules = self.rules(problem) | {"r_grad": self.r_grad}
        # In fp32, or the reference would be rounded to their dtype.
        q, k, v = (tensor.float() for tensor in read)
        refs = retnet_attention_backward(
            dout.float(), q, k, v, mask, need_dmask=self.dmask, **rules
        )
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (*read, mask.to(dout.dtype))]
            o, _ = retnet_attention_low(leaves[0], leaves[1], leaves[2], leaves[3], **rules)
            lows = torch.autograd.grad(o, leaves if self.dmask else leaves[:3], dout)
        shifts: dict[str, torch.Tensor] = {}
        if self.r_grad:
            o_exact, _ = retnet_attention(q, k, v, mask, **self.rules(problem))
            shift = shift_of_delta(inputs, o_exact)
            shifts = self._effect_of_shift(problem, inputs, mask, shift)
        names = ("dq", "dk", "dv", "dmask")
        for name, ref, low in zip(names, refs, lows, strict=False):
            if ref is None:
                continue
            low = low.float()
            if name in shifts:
                low = moved_off(ref, low, shifts[name])
            yield name, ref, low

    def _effect_of_shift(
        self, problem: Problem, inputs: Inputs, mask: torch.Tensor, shift: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The most that gradients move when ``rowsum(dout o)`` moves by a shift, one head after the other."""
        q, k, r = inputs.q, inputs.k, inputs.tensors["r"]
        group = problem.heads_q // problem.heads_kv
        moved = {
            name: torch.zeros_like(x, dtype=torch.float32) for name, x in (("dq", q), ("dk", k))
        }
        if self.dmask:
            moved["dmask"] = torch.zeros_like(mask[:1] if self.shared else mask)
        limit = float("inf") if self.r_clamp_max is None else self.r_clamp_max
        through = (shift / r).masked_fill((r <= 1) | (r >= limit), 0.0)
        for scored in self._heads(problem, q, k, mask):
            dx = (scored.s * scored.mask).sign() * through[scored.batch, scored.head, :, None]
            ds = scored.scale * dx * scored.mask
            with full_precision():
                moved["dq"][scored.batch, scored.head] = ds @ scored.k
                moved["dk"][scored.batch, scored.head // group] += ds.mT @ scored.q
            if self.dmask:
                moved["dmask"][scored.head % moved["dmask"].shape[0]] += dx * scored.s
        return {name: tensor.abs() for name, tensor in moved.items()}


EXPLICIT_FORWARD: tuple[Binding, ...] = (
    RetNetForward(),
    RetNetForward(any_values=True, shared=True, note=", with one mask of any values for all heads"),
    RetNetForward(at_limits=True, r_clamp_max=4.0, note=", with r at most 4"),
    RetNetForward(any_values=True, normalize=False, sign=-1, note=", not normalised"),
)
EXPLICIT_BACKWARD: tuple[Binding, ...] = (
    RetNetBackward(),
    RetNetBackward(
        any_values=True,
        shared=True,
        r_grad=True,
        dmask=True,
        note=", through r and to one mask for all heads",
    ),
    RetNetBackward(
        at_limits=True, r_clamp_max=4.0, r_grad=True, note=", through r, which is at most 4"
    ),
    RetNetBackward(
        any_values=True, normalize=False, sign=-1, dmask=True, note=", not normalised, to the mask"
    ),
)
DECAY_FORWARD: tuple[Binding, ...] = (
    RetNetForward(),
    RetNetForward(edge=1, r_clamp_max=4.0, note=", with r at most 4 and gammas of all sizes"),
    RetNetForward(edge=3, normalize=False, sign=-1, note=", not normalised, gammas of all sizes"),
)
DECAY_BACKWARD: tuple[Binding, ...] = (
    RetNetBackward(),
    RetNetBackward(edge=1, r_clamp_max=4.0, r_grad=True, note=", through r, gammas of all sizes"),
    RetNetBackward(edge=3, normalize=False, sign=-1, note=", not normalised, gammas of all sizes"),
)


def ways(problem: Problem) -> tuple[Binding, ...]:
    """The ways to call the kernels of a retnet problem, the one that is timed first."""
    if problem.mask == "decay":
        return DECAY_FORWARD if problem.direction == "forward" else DECAY_BACKWARD
    return EXPLICIT_FORWARD if problem.direction == "forward" else EXPLICIT_BACKWARD
