"""The ways to call retention's kernels: with and without states, and which gradients are wanted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from ...core.problem import Problem
from ..attention.inputs import moved_off
from ..shared import binding
from ..shared.binding import Binding, Normal, Reference
from ..shared.gammas import gammas_of, log2_gammas
from ..shared.tensors import Inputs, Shapes
from .packed import retention_packed, retention_packed_backward, rows_of
from .reference import retention_chunkwise, retention_low


def _state_shape(problem: Problem) -> tuple[int, ...]:
    return (problem.batch, problem.heads_q, problem.dim_qk, problem.dim_v)


def _ends(problem: Problem, *, ragged: bool) -> torch.Tensor:
    """Where packed sequences of typical lengths end, int32 ``[sequences + 1]``."""
    lengths = [rows for rows, _ in problem.lengths]
    if ragged:
        lengths = [min(x, i % 4 - 1) if i % 4 in (1, 2) else x for i, x in enumerate(lengths[::-1])]
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class _Way:
    """The options of both directions.

    Attributes:
        note: as :class:`.Binding` has it.
        initial: a state is given, and of a backward its gradient is wanted.
        final: the final state is wanted, in memory of its own; of a backward, it has a gradient.
        edge: which decays, see :func:`.log2_gammas`.
        ragged: of packed sequences, some have a length of 0 or 1, and rows lie behind the last.
    """

    note: str = ""
    initial: bool = False
    final: bool = False
    edge: int | None = None
    ragged: bool = False

    def start(self, problem: Problem, normal: Normal) -> dict[str, torch.Tensor]:
        """The decays, the initial state where one is given, and where packed sequences end."""
        made = {"log2_gamma": log2_gammas(problem.heads_q, normal.device, self.edge)}
        if problem.packed:
            made["cu_seqlens"] = _ends(problem, ragged=self.ragged).to(normal.device)
        if self.initial:
            made["initial_state"] = normal.floats(*_state_shape(problem))
        return made


@dataclass(frozen=True, kw_only=True)
class RetentionForward(_Way):
    """o and perhaps the final state from q, k, v, decays and perhaps an initial state."""

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """See :meth:`.Binding.inputs`."""
        normal = Normal(problem, seed, device)
        return Inputs(tensors=normal.qkv() | self.start(problem, normal))

    def output_shapes(self, problem: Problem) -> Shapes:
        """See :meth:`.Binding.output_shapes`."""
        final = {"final_state": (_state_shape(problem), torch.float32)} if self.final else {}
        return {**binding.output_shapes(problem), **final}

    def references(self, problem: Problem, inputs: Inputs) -> Iterator[Reference]:
        """See :meth:`.Binding.references`."""
        q, k, v, gamma = inputs.q, inputs.k, inputs.v, gammas_of(inputs.tensors["log2_gamma"])
        named = {name: inputs.tensors.get(name) for name in ("initial_state", "cu_seqlens")}
        (o_ref, final_ref), (o_low, final_low) = (
            retention_packed(reference, q, k, v, gamma, **named)
            for reference in (retention_chunkwise, retention_low)
        )
        yield "o", o_ref, o_low
        if self.final:
            yield "final_state", final_ref, final_low


@dataclass(frozen=True, kw_only=True)
class RetentionBackward(_Way):
    """dq, dk, dv and perhaps the gradients of the initial state and of log2 gamma.

    Attributes:
        dgamma: the gradient of log2 gamma is wanted.
    """

    dgamma: bool = False

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """See :meth:`.Binding.inputs`."""
        normal = Normal(problem, seed, device)
        tensors = normal.qkv() | {"dout": normal.dout()}
        tensors |= self.start(problem, normal)
        if self.final:
            tensors["dfinal_state"] = normal.floats(*_state_shape(problem))
        return Inputs(tensors=tensors)

    def output_shapes(self, problem: Problem) -> Shapes:
        """See :meth:`.Binding.output_shapes`."""
        shapes = binding.gradient_shapes(problem)
        if self.initial:
            shapes["dinitial_state"] = (_state_shape(problem), torch.float32)
        if self.dgamma:
            shapes["dlog2_gamma"] = ((problem.extents[0], problem.heads_q), torch.float32)
        return shapes

    def references(self, problem: Problem, inputs: Inputs) -> Iterator[Reference]:
        """See :meth:`.Binding.references`.

        The reference sums gamma's gradient over the batch, kernels do not: so all sequences are read as heads of one.
        Its terms can be far larger than their sum. A rounding of every token's share, each felt as far as the decay
        reaches, widens the distance of the formula from the reference, which is taken in fp64.
        """
        flat, ends = dict(inputs.tensors), inputs.tensors.get("cu_seqlens")
        gamma = gammas_of(inputs.tensors["log2_gamma"]).repeat(problem.extents[0])
        if ends is None:
            flat = {name: _as_heads(tensor) for name, tensor in flat.items()}
        read, dout = (flat["q"], flat["k"], flat["v"]), flat["dout"]
        state, dfinal = flat.get("initial_state"), flat.get("dfinal_state")
        dtype = torch.float64 if self.dgamma else torch.float32
        # In that dtype, or the reference would be rounded to theirs.
        q, k, v = (tensor.to(dtype) for tensor in read)
        named = {"initial_state": state, "cu_seqlens": ends}
        refs = retention_packed_backward(
            dout.to(dtype), dfinal, q, k, v, gamma, need_dgamma=self.dgamma, **named
        )
        lows = self._low(read, dout, gamma, state, dfinal, ends)
        shapes = self.output_shapes(problem)
        names = ("dq", "dk", "dv", "dinitial_state", "dlog2_gamma")
        for name, ref, low in zip(names, refs, lows, strict=True):
            if name not in shapes or ref is None or low is None:
                continue
            if name == "dlog2_gamma":
                ref, low = (of_gamma * gamma * math.log(2) for of_gamma in (ref, low))
                width = _rounded_shares(read[0], refs[0], gamma, _positions(read[0], ends))
                low = moved_off(ref, low, width)
            yield name, ref.reshape(shapes[name][0]), low.reshape(shapes[name][0])

    def _low(
        self,
        read: tuple[torch.Tensor, ...],
        dout: torch.Tensor,
        gamma: torch.Tensor,
        state: torch.Tensor | None,
        dfinal: torch.Tensor | None,
        ends: torch.Tensor | None,
    ) -> list[torch.Tensor | None]:
        """Gradients of the formula in the input dtype; None where there is nothing to differentiate by."""
        with torch.enable_grad():
            q, k, v, decays = (tensor.detach().requires_grad_() for tensor in (*read, gamma))
            start = None if state is None else state.detach().requires_grad_()
            named = {"initial_state": start, "cu_seqlens": ends}
            o, final = retention_packed(retention_low, q, k, v, decays, **named)
            wanted = [q, k, v, start, decays if self.dgamma else None]
            leaves = [leaf for leaf in wanted if leaf is not None]
            gradients = iter(binding.gradients_of_formula([(o, dout), (final, dfinal)], leaves))
        return [None if leaf is None else next(gradients) for leaf in wanted]


def _as_heads(tensor: torch.Tensor) -> torch.Tensor:
    """``[1, batch * heads, ...]`` of ``[batch, heads, ...]``; a query head's K/V head stays its own."""
    return tensor.reshape(1, -1, *tensor.shape[2:]) if tensor.dim() == 4 else tensor


def _positions(q: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """The positions of tokens in their sequences, from 1: fp64 ``[seqlen]``."""
    index = torch.arange(1, q.shape[2] + 1, dtype=torch.float64, device=q.device)
    for rows in [] if ends is None else rows_of(ends):
        index[rows] -= rows.start
    return index


def _rounded_shares(
    q: torch.Tensor, dq: torch.Tensor, gamma: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """The effect of rounding every token's share ``q . dq`` to q's dtype on the gradient of log2 gamma.

    ``index`` are the tokens' positions, from 1.
    """
    reach = index.minimum(1.0 / (1.0 - gamma[:, None]).clamp(min=2.0**-60))
    shares = (q.double() * dq.double()).sum(-1)[0] * reach
    unit = torch.finfo(q.dtype).eps / 2
    norm: torch.Tensor = torch.linalg.vector_norm(shares, dim=-1)
    return math.log(2) * unit * norm


_STATES = RetentionForward(
    initial=True, final=True, edge=1, note=", with states and gammas of all sizes"
)
_FINAL = RetentionForward(final=True, edge=3, note=", with the final state, gammas of all sizes")

FORWARD: tuple[RetentionForward, ...] = (RetentionForward(), _STATES, _FINAL)
DECODING: tuple[Binding, ...] = (
    RetentionForward(initial=True, final=True, note=", with states"),
    _STATES,
    _FINAL,
)
BACKWARD: tuple[RetentionBackward, ...] = (
    RetentionBackward(),
    RetentionBackward(
        initial=True, final=True, dgamma=True, edge=1, note=", to states and gammas of all sizes"
    ),
    RetentionBackward(
        final=True, dgamma=True, edge=3, note=", from the final state to gammas of all sizes"
    ),
)


def ways(problem: Problem) -> tuple[Binding, ...]:
    """The ways to call the kernels of a retention problem, the one that is timed first."""
    if problem.decodes:
        return DECODING
    usual: tuple[RetentionForward | RetentionBackward, ...]
    usual = FORWARD if problem.direction == "forward" else BACKWARD
    if not problem.packed:
        return usual
    note = ", with sequences of length 0 and 1"
    return (usual[0], *(replace(way, ragged=True, note=way.note + note) for way in usual[1:]))
