"""References and error bounds of retention with decay, forward and backward.

The reference is the chunkwise formula in fp32, or fp64 where a case is long or its states grow large; the bound comes
from the same formula in the input dtype. Outputs are linear in v and the initial state, so where a state would overflow
fp16 the low-precision result is computed on values that are some binary orders smaller, and scaled back; kernels must
do the same in one way or another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from attention_autotuner.operations.bindings import TORCH_DTYPES
from attention_autotuner.reference import retention_backward, retention_chunkwise, retention_low

from .cases import Layout
from .guarded_buffers import GuardedBuffer, make_input, make_output, place_input
from .retention_cases import RetentionCase

Tensors = dict[str, GuardedBuffer]
Reference = tuple[str, torch.Tensor, torch.Tensor]
Views = Mapping[str, torch.Tensor]

LONG = 16384  # least number of tokens with an fp64 reference
CHUNK = 256  # chunk of the reference
ROWS = 1024  # rows of token pairs computed together
FLIPPED: dict[Layout, Layout] = {
    "batch_broadcast": "heads_broadcast",
    "heads_broadcast": "batch_broadcast",
}


def make_inputs(case: RetentionCase, generator: torch.Generator) -> Tensors:
    """q, k, v, the logarithms of the decays and, where the case has one, the initial state."""
    p, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
    rows_q, rows_k = (p.batch, p.heads_q, p.seqlen_q), (p.batch, p.heads_kv, p.seqlen_k)
    flipped = FLIPPED.get(case.inputs, case.inputs)  # so that outputs stay varied
    made = {
        "q": make_input((*rows_q, p.dim_qk), flipped, dtype, generator),
        "k": make_input((*rows_k, p.dim_qk), case.inputs, dtype, generator),
        "v": make_input((*rows_k, p.dim_v), case.inputs, dtype, generator),
    }
    for name, mean in zip("kv", case.bias, strict=True):
        if mean:
            made[name] = place_input(made[name].view + mean, case.inputs)
    log2 = case.log2_gamma().to(generator.device)
    made["log2_gamma"] = place_input(log2[None, None, None], "dense")
    if case.initial:
        made["initial_state"] = make_input(_states(case), "dense", torch.float32, generator)
    return made


def _states(case: RetentionCase) -> tuple[int, int, int, int]:
    p = case.problem
    return p.batch, p.heads_q, p.dim_qk, p.dim_v


class RetentionForwardCall:
    """Inputs, outputs and references of the forward pass, for every form: o and, where wanted, the final state."""

    def scalars(self, case: RetentionCase) -> Mapping[str, float]:
        """The scale."""
        return {"scale": case.true_scale}

    def inputs(self, case: RetentionCase, *, seed: int, device: torch.device) -> Tensors:
        """See :func:`make_inputs`."""
        return make_inputs(case, torch.Generator(device=device).manual_seed(seed))

    def outputs(self, case: RetentionCase, device: torch.device) -> Tensors:
        """Poisoned."""
        p, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
        shape = (p.batch, p.heads_q, p.seqlen_q, p.dim_v)
        made = {"o": make_output(shape, case.output, dtype, device)}
        if case.final:
            made["final_state"] = make_output(_states(case), "dense", torch.float32, device)
        return made

    def references(self, case: RetentionCase, inputs: Views) -> Iterator[Reference]:
        """References of o and the final state."""
        state, scale = inputs.get("initial_state"), case.true_scale
        q, k, v = (inputs[name] for name in "qkv")
        reference_dtype, gamma = _reference_dtype(case), _gamma(inputs)
        refs = retention_chunkwise(
            q.to(reference_dtype),
            k.to(reference_dtype),
            v.to(reference_dtype),
            gamma,
            scale=scale,
            initial_state=state,
            chunk=CHUNK,
        )
        small = 2.0**-case.shrink
        state = None if state is None else state * small
        lows = retention_low(q, k, v * small, gamma, scale=scale, initial_state=state)
        for name, ref, low in zip(("o", "final_state"), refs, lows, strict=True):
            if name == "o" or case.final:
                yield name, ref, low.to(ref.dtype) / small


class RetentionBackwardCall:
    """Inputs, outputs and references of the backward pass.

    The outputs are dq, dk, dv and, where they are wanted, the gradients of the initial state and of log2 gamma.
    """

    def scalars(self, case: RetentionCase) -> Mapping[str, float]:
        """The scale."""
        return {"scale": case.true_scale}

    def inputs(self, case: RetentionCase, *, seed: int, device: torch.device) -> Tensors:
        """The inputs of the forward pass and the gradients of its outputs."""
        p = case.problem
        generator = torch.Generator(device=device).manual_seed(seed)
        made = make_inputs(case, generator)
        shape = (p.batch, p.heads_q, p.seqlen_q, p.dim_v)
        made["dout"] = make_input(shape, case.gradient, TORCH_DTYPES[p.dtype], generator)
        if case.final:
            made["dfinal_state"] = make_input(_states(case), "dense", torch.float32, generator)
        return made

    def outputs(self, case: RetentionCase, device: torch.device) -> Tensors:
        """Poisoned; the gradient of log2 gamma lies in the last two axes."""
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
        if case.initial:
            made["dinitial_state"] = make_output(_states(case), "dense", torch.float32, device)
        if case.dgamma:
            shape = (1, 1, p.batch, p.heads_q)
            made["dlog2_gamma"] = make_output(shape, "dense", torch.float32, device)
        return made

    def references(self, case: RetentionCase, inputs: Views) -> Iterator[Reference]:
        """References of all gradients; the low-precision result has a smaller v, which scales dq and dk but not dv."""
        refs = _gradients(case, inputs, _reference_dtype(case), 1.0, CHUNK)
        lows = _gradients(case, inputs, inputs["q"].dtype, 2.0**-case.shrink, 64)
        for name, ref in refs.items():
            low = lows[name].to(ref.dtype)
            if name == "dlog2_gamma":
                low = widened(ref, low, rounding_of_dgamma(case, inputs).to(ref.dtype))
            yield name, ref, low


def _gradients(
    case: RetentionCase, inputs: Views, dtype: torch.dtype, small: float, chunk: int
) -> dict[str, torch.Tensor]:
    """All gradients by the formula in a dtype, with v and the initial state ``small`` times what they are."""
    per_batch: list[dict[str, torch.Tensor]] = []
    gamma, state = _gamma(inputs), inputs.get("initial_state")
    states = torch.float64 if dtype == torch.float64 else torch.float32
    for index in range(
        case.problem.batch
    ):  # one at a time: the gradient of gamma is wanted for each

        def part(name: str, index: int = index) -> torch.Tensor:
            return inputs[name][index : index + 1]

        dfinal = part("dfinal_state").to(states) if case.final else None
        initial = None if state is None else (part("initial_state") * small).to(states)
        dq, dk, dv, dinitial, dgamma = retention_backward(
            part("dout").to(dtype),
            dfinal,
            part("q").to(dtype),
            part("k").to(dtype),
            part("v").to(dtype) * small,
            gamma,
            scale=case.true_scale,
            initial_state=initial,
            need_dgamma=True,
            chunk=chunk,
            dtype=dtype,
        )
        assert dgamma is not None
        gradients = {"dq": dq.to(states) / small, "dk": dk.to(states) / small, "dv": dv.to(states)}
        if case.initial:
            gradients["dinitial_state"] = dinitial
        if case.dgamma:
            of_log2 = (dgamma * gamma * math.log(2) / small).to(states)
            gradients["dlog2_gamma"] = of_log2[None, None, None]
        per_batch.append(gradients)
    return {
        name: torch.cat(
            [gradients[name] for gradients in per_batch], 2 if name == "dlog2_gamma" else 0
        )
        for name in per_batch[0]
    }


def widened(ref: torch.Tensor, low: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """The eager result moved away from the reference by a width; where it overflowed, the reference moved by it."""
    eager = torch.where(low.isfinite(), low, ref)
    return eager + torch.copysign(width, eager - ref)


def rounding_of_dgamma(case: RetentionCase, inputs: Views) -> torch.Tensor:
    """The error of the gradient of log2 gamma when each of its terms is rounded once to the input dtype.

    The gradient of a head is one number, a sum of n times the share of ``gamma^n`` in the loss, and an eager run may be
    exact by luck.

    Returns:
        ``[1, 1, batch, heads_q]``, fp32: the root of the sum of the squares.
    """
    p = case.problem
    group = p.heads_q // p.heads_kv
    q, do = inputs["q"].float(), inputs["dout"].float()
    k, v = (inputs[name].float().repeat_interleave(group, dim=1) for name in "kv")
    log2 = inputs["log2_gamma"].flatten().double()
    index = torch.arange(p.seqlen_q, dtype=torch.float64, device=q.device)
    total = torch.zeros(p.batch, p.heads_q, dtype=torch.float64, device=q.device)

    def weighted_powers(distance: torch.Tensor) -> torch.Tensor:
        """``n gamma^n`` of every head, 0 for n < 0."""
        n = distance.clamp(min=0.0)
        shape = (-1, *(1 for _ in distance.shape))
        return (n * (n * log2.view(shape)).exp2()).float()

    for start in range(0, p.seqlen_q, ROWS):
        rows = slice(start, min(start + ROWS, p.seqlen_q))
        seen = slice(rows.stop)
        scores = (q[:, :, rows] @ k[:, :, seen].mT) * (do[:, :, rows] @ v[:, :, seen].mT)
        terms = case.true_scale * scores * weighted_powers(index[rows, None] - index[seen])
        total += terms.square().sum((-2, -1), dtype=torch.float64)
    state, dstate = inputs.get("initial_state"), inputs.get("dfinal_state")
    scaled, leaving = (
        case.true_scale * weighted_powers(index + 1),
        weighted_powers(p.seqlen_q - 1 - index),
    )
    for tensor, powers, left, right in ((state, scaled, q, do), (dstate, leaving, k, v)):
        if tensor is not None:
            # A product is rounded on its own, but an element of a state once for all tokens that read it.
            rounded = powers[..., None] * left
            for terms in ((rounded @ tensor) * right, (rounded.mT @ right) * tensor):
                total += terms.square().sum((-2, -1), dtype=torch.float64)
    unit = torch.finfo(TORCH_DTYPES[p.dtype]).eps / 2
    return (unit * math.log(2) * total.sqrt()).float()[None, None]


def _gamma(inputs: Views) -> torch.Tensor:
    """The decays whose logarithms the kernels read, fp64 ``[heads_q]``."""
    return inputs["log2_gamma"].flatten().double().exp2()


def _reference_dtype(case: RetentionCase) -> torch.dtype:
    return torch.float64 if case.problem.seqlen_q >= LONG or any(case.bias) else torch.float32
