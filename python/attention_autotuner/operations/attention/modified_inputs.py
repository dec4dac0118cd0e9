"""The ways to call attention's kernels that are compiled with score modifications."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar

import torch

from ...core import spans
from ...core.modifications import DOCUMENT_IDS, PREFIX_LENS, VALUED
from ...core.problem import Problem
from ..shared import binding
from ..shared.binding import Binding, Normal, Reference
from ..shared.tensors import Inputs, Shapes
from .inputs import (
    AttentionBackward,
    AttentionForward,
    most_scores,
    moved_off,
    rounding_of_lse,
    shift_of_delta,
)
from .modified import CU_SEQLENS, Modifiers, attention_modified, attention_modified_backward

SOFTCAP = 1.5  # normal scores are around 1
SINKS_SPREAD = 3.0
BIAS_DISTANCE = 37  # beyond which small problems have pairs, too
SUMMED = 0b11  # axes along which an added mask is broadcast: batch and heads
TANH_ERROR = 2.0**-11  # of the result, of the instruction that some kernels take


def modifiers_of(problem: Problem, inputs: Inputs) -> Modifiers:
    """The values that a launch with these inputs takes."""
    names = (*VALUED, *CU_SEQLENS)
    tensors: Any = {name: inputs.tensors[name] for name in names if name in inputs.tensors}
    softcap = inputs.scalars.get("softcap", 0.0)
    summed, shape = inputs.scalars.get("attn_mask_summed"), None
    if summed is not None:
        sizes = enumerate(tensors["attn_mask"].shape)
        shape = tuple(1 if int(summed) >> axis & 1 else size for axis, size in sizes)
    return Modifiers(
        window_size=problem.window_size, softcap=softcap, mask_gradient=shape, **tensors
    )


def with_values(
    problem: Problem, inputs: Inputs, seed: int, *, ragged: bool, mask_gradient: bool = False
) -> Inputs:
    """Inputs with values of the problem's modifications, such that each one matters.

    Args:
        problem: what is computed.
        inputs: tensors.
        seed: of the values.
        ragged: packed sequences, documents and prefixes have some lengths of 0 and 1, not typical ones.
        mask_gradient: that of a mask is wanted, which is added.
    """
    normal = Normal(problem, seed + 1, inputs.q.device)
    heads, tensors, scalars = problem.heads_q, dict(inputs.tensors), dict(inputs.scalars)
    if "softcap" in problem.modifications:
        scalars["softcap"] = SOFTCAP
    if "alibi_slopes" in problem.modifications:
        per_batch = seed % 2
        slopes = torch.linspace(0.5, 1.0 / 64, heads, device=inputs.q.device)
        tensors["alibi_slopes"] = slopes.repeat(problem.batch, 1) if per_batch else slopes
        if per_batch:
            tensors["alibi_slopes"] *= normal.floats(problem.batch, 1).abs()
    if "bias_table" in problem.modifications:
        tensors["bias_table"] = normal.floats(heads, 2 * BIAS_DISTANCE + 1)
    if "attn_mask" in problem.modifications:
        # Boolean and broadcast over heads, or added, an entry alone for all.
        shape = (problem.batch, 1, problem.seqlen_q, problem.seqlen_k)
        mask = normal.floats(*shape)
        added = mask_gradient or seed % 2 == 1
        mask = mask[:1].to(inputs.q.dtype) if added else mask > -0.5
        if mask_gradient:
            scalars["attn_mask_summed"] = SUMMED
        tensors["attn_mask"] = mask.expand(problem.batch, heads, -1, -1)
    if "sinks" in problem.modifications:
        tensors["sinks"] = SINKS_SPREAD * normal.floats(heads)
    if DOCUMENT_IDS in problem.modifications:
        tensors[DOCUMENT_IDS] = _document_ids(problem, seed, ragged=ragged).to(inputs.q.device)
    if PREFIX_LENS in problem.modifications:
        # In turn: ordinary, of odd length, none, all keys, one, and beyond both ends.
        lens = [spans.prefix_of(problem)] * problem.batch
        if ragged:
            most = problem.seqlen_k
            various = (most // 3 | 1, 0, most, 1, most + 7, -3)
            lens = [various[(b + seed) % len(various)] for b in range(problem.batch)]
        tensors[PREFIX_LENS] = torch.tensor(lens, dtype=torch.int32, device=inputs.q.device)
    if problem.packed:
        for name, x, lengths in zip(
            CU_SEQLENS, (inputs.q, inputs.k), _lengths(problem, ragged=ragged), strict=True
        ):
            ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            assert ends[-1] <= x.shape[2]
            tensors[name] = ends.to(x.device)
    made = Inputs(tensors=tensors, scalars=scalars)
    return replace(made, scalars={**scalars, **modifiers_of(problem, made).scalars})


def _document_ids(problem: Problem, seed: int, *, ragged: bool) -> torch.Tensor:
    """Ids of documents: of typical lengths, or negative ones too, of lengths from 1 on, and of one document alone."""
    batch, rows = problem.batch, problem.seqlen_q
    if not ragged:
        starts = torch.zeros(rows, dtype=torch.int32)
        starts[spans.document_ends(problem)[1:-1]] = 1
        return starts.cumsum(0, dtype=torch.int32).repeat(batch, 1)
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 3, (batch, rows), generator=generator)
    often = torch.tensor([0.02, 0.2, 0.0])[(torch.arange(batch) + seed) % 3]
    steps = steps * (torch.rand(batch, rows, generator=generator) < often[:, None])
    return (steps.cumsum(1) - 3).int()


def _lengths(problem: Problem, *, ragged: bool) -> tuple[list[int], list[int]]:
    """Lengths of queries and keys: typical ones, or in another order, some 0 and 1, with rows behind."""
    of_q, of_k = map(list, zip(*problem.lengths, strict=True))
    if ragged:
        of_q = [0 if i % 4 == 1 else x for i, x in enumerate(reversed(of_q))]
        of_k = [min(x, i % 3) if i % 3 < 2 else x for i, x in enumerate(of_k)]
    return of_q, of_k


def _options(problem: Problem, inputs: Inputs) -> dict[str, Any]:
    bounds = {name: inputs.tensors.get(name) for name in ("seqlens_k", "starts_k")}
    mask = {"causal": problem.causal, "causal_alignment": problem.causal_alignment}
    return {"modifiers": modifiers_of(problem, inputs), **mask, **bounds}


class ModifiedForward(AttentionForward):
    """o and lse from q, k, v and the values of modifications."""

    ragged: ClassVar[bool] = False

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """See :meth:`.Binding.inputs`."""
        normal = super().inputs(problem, seed=seed, device=device)
        return with_values(problem, normal, seed, ragged=self.ragged)

    def references(self, problem: Problem, inputs: Inputs) -> Iterator[Reference]:
        """See :meth:`.Binding.references`, and :meth:`.AttentionForward.references` for LSE."""
        read, options = (inputs.q, inputs.k, inputs.v), _options(problem, inputs)
        o_ref, lse_ref = attention_modified(*read, **options)
        o_low, lse_low = attention_modified(*read, **options, dtype=inputs.q.dtype)
        yield "o", o_ref, o_low
        width = rounding_of_lse(inputs.q, inputs.k, lse_ref)
        if "softcap" in problem.modifications:
            most = most_scores(inputs.q, inputs.k).clamp(max=inputs.scalars["softcap"])
            width = width + TANH_ERROR * most
        yield "lse", lse_ref, moved_off(lse_ref, lse_low, width)


class ModifiedBackward(AttentionBackward):
    """dq, dk and dv from q, k, v, o, lse, dout and the values of modifications; beside dlse a mask's gradient, too."""

    ragged: ClassVar[bool] = False

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        """See :meth:`.AttentionBackward.inputs`."""
        normal = super().inputs(problem, seed=seed, device=device)
        wanted = self._gives_mask_gradient(problem)
        made = with_values(problem, normal, seed, ragged=self.ragged, mask_gradient=wanted)
        o, lse = attention_modified(made.q, made.k, made.v, **_options(problem, made))
        results = {"o": o.to(made.q.dtype), "lse": lse}
        return Inputs(tensors={**made.tensors, **results}, scalars=made.scalars)

    def output_shapes(self, problem: Problem) -> Shapes:
        """See :meth:`.Binding.output_shapes`."""
        shapes = binding.gradient_shapes(problem)
        if "sinks" in problem.modifications:
            shapes["dsinks"] = ((problem.heads_q,), torch.float32)
        if "bias_table" in problem.modifications:
            shapes["dbias_table"] = ((problem.heads_q, 2 * BIAS_DISTANCE + 1), torch.float32)
        if self._gives_mask_gradient(problem):
            shape = (1, 1, problem.seqlen_q, problem.seqlen_k)
            shapes["dattn_mask"] = (shape, shapes["dq"][1])
        return shapes

    def _gives_mask_gradient(self, problem: Problem) -> bool:
        return self._lse_gradient and "attn_mask" in problem.modifications

    def references(self, problem: Problem, inputs: Inputs) -> Iterator[Reference]:
        """See :meth:`.AttentionBackward.references`."""
        options, read = _options(problem, inputs), (inputs.q, inputs.k, inputs.v)
        dout, dlse = inputs.tensors["dout"], inputs.tensors.get("dlse")
        in_fp32 = [tensor.float() for tensor in read]
        refs = attention_modified_backward(dout, dlse, *in_fp32, **options)
        shift = shift_of_delta(inputs, attention_modified(*in_fp32, **options)[0])
        shift = shift if dlse is None else dlse + shift
        shifted = attention_modified_backward(dout, shift, *in_fp32, **options)
        lows = attention_modified_backward(dout, dlse, *read, **options, dtype=inputs.q.dtype)
        names = tuple(self.output_shapes(problem))
        for name, ref, near, low in zip(names, refs, shifted, lows, strict=True):
            yield name, ref, moved_off(ref, low.float(), (near - ref).abs())


class RaggedForward(ModifiedForward):
    """The same of packed sequences, documents or prefixes, some of length 0 and 1."""

    ragged = True

    def __init__(self, *, bounded: bool = False) -> None:
        super().__init__(bounded=bounded)
        self.note += ", with sequences of length 0 and 1"


class RaggedBackward(ModifiedBackward):
    """The same of packed sequences, documents or prefixes, some of length 0 and 1."""

    ragged = True

    def __init__(self) -> None:
        super().__init__(lse_gradient=True)
        self.note += " and sequences of length 0 and 1"


def ways(problem: Problem) -> tuple[Binding, ...]:
    """The ways to call the kernels of a problem with modifications, the one that is timed first."""
    if problem.direction == "backward":
        uneven = problem.packed or problem.spanned
        other = RaggedBackward() if uneven else ModifiedBackward(lse_gradient=True)
        return (ModifiedBackward(), other)
    if problem.packed or problem.spanned:
        return (ModifiedForward(), RaggedForward(bounded=problem.key_bounds))
    bounded = (ModifiedForward(bounded=True),) if problem.key_bounds else ()
    return (ModifiedForward(), *bounded)
