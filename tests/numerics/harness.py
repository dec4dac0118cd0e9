"""Runs one case on one kernel and judges everything that the kernel may get wrong.

Inputs lie in storages full of NaN, so that a value read from beside them shows in the result. Outputs lie in storages
of a known pattern and hold NaN before the run, so that an element that is not written shows, and a write beside them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from attention_autotuner import abi
from attention_autotuner.loader import LoadedKernel
from attention_autotuner.reference import attention, attention_low, check

from .cases import Case, Layout

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
INTEGERS = {2: torch.int16, 4: torch.int32}
PATTERN = {2: 0x5A5A, 4: 0x5A5A5A5A}
GUARD = 4096  # elements before and after, a multiple of 16 bytes
SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor and the storage around it."""

    view: torch.Tensor
    storage: torch.Tensor

    @property
    def bits(self) -> torch.Tensor:
        """The whole storage as integers."""
        return self.storage.view(INTEGERS[self.storage.element_size()])


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """q ``[batch, heads_q, seqlen_q, dim_qk]``, k ``[batch, heads_kv, seqlen_k, dim_qk]``, v with ``dim_v``."""

    q: Held
    k: Held
    v: Held


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """o ``[batch, heads_q, seqlen_q, dim_v]`` and, where it is wanted, lse ``[batch, heads_q, seqlen_q]``."""

    o: Held
    lse: Held | None

    def held(self) -> Iterator[tuple[str, Held]]:
        """What there is, by name."""
        yield "o", self.o
        if self.lse is not None:
            yield "lse", self.lse


def strides_of(shape: Sequence[int], layout: Layout) -> tuple[int, int, int, int]:
    """Strides of a ``[batch, heads, rows, columns]`` tensor before any of its dims is broadcast."""
    _, heads, rows, columns = shape
    if layout == "transposed":  # [batch, rows, heads, columns] in memory
        return rows * heads * columns, columns, heads * columns, 1
    row = columns + {"padded": 8, "unaligned": 1}.get(layout, 0)
    return heads * rows * row, rows * row, row, 1


def make_input(
    shape: Sequence[int], layout: Layout, dtype: torch.dtype, generator: torch.Generator
) -> Held:
    """A normal tensor laid out as told."""
    whole = list(shape)
    if layout == "batch_broadcast":
        whole[0] = 1
    if layout == "heads_broadcast":
        whole[1] = 1
    strides = list(strides_of(whole, layout))
    offset = GUARD + (1 if layout == "unaligned" else 0)
    extent = whole[0] * strides[0] if layout != "transposed" else torch.Size(whole).numel()
    storage = torch.full(
        (offset + extent + GUARD,), float("nan"), dtype=dtype, device=generator.device
    )
    values = torch.randn(whole, dtype=dtype, device=generator.device, generator=generator)
    storage.as_strided(whole, strides, offset).copy_(values)
    for axis, (have, want) in enumerate(zip(whole, shape, strict=True)):
        if have != want:
            strides[axis] = 0
    return Held(view=storage.as_strided(list(shape), strides, offset), storage=storage)


def make_inputs(case: Case, *, seed: int, device: torch.device) -> Inputs:
    """The tensors of a case; q is broadcast over the other axis than k and v, so that outputs stay varied."""
    p, dtype = case.problem, DTYPES[case.problem.dtype]
    generator = torch.Generator(device=device).manual_seed(seed)
    flipped: dict[Layout, Layout] = {
        "batch_broadcast": "heads_broadcast",
        "heads_broadcast": "batch_broadcast",
    }
    layout_q = flipped.get(case.inputs, case.inputs)
    shape_k = (p.batch, p.heads_kv, p.seqlen_k, p.dim_qk)
    shape_v = (p.batch, p.heads_kv, p.seqlen_k, p.dim_v)
    return Inputs(
        q=make_input((p.batch, p.heads_q, p.seqlen_q, p.dim_qk), layout_q, dtype, generator),
        k=make_input(shape_k, case.inputs, dtype, generator),
        v=make_input(shape_v, case.inputs, dtype, generator),
    )


def make_output(
    shape: Sequence[int], layout: Layout, dtype: torch.dtype, place: torch.device
) -> Held:
    """A tensor full of NaN inside a storage of a known pattern."""
    strides = strides_of(shape, layout)
    extent = shape[0] * strides[0]
    storage = torch.empty(2 * GUARD + extent, dtype=dtype, device=place)
    storage.view(INTEGERS[dtype.itemsize]).fill_(PATTERN[dtype.itemsize])
    view = storage.as_strided(list(shape), strides, GUARD)
    view.fill_(float("nan"))
    return Held(view=view, storage=storage)


def make_outputs(case: Case, device: torch.device) -> Outputs:
    """The outputs of a case, poisoned."""
    p = case.problem
    rows = (p.batch, p.heads_q, p.seqlen_q)
    lse = make_output((*rows, 1), "dense", torch.float32, device) if case.lse else None
    o = make_output((*rows, p.dim_v), case.output, DTYPES[p.dtype], device)
    return Outputs(o=o, lse=lse)


def launch(
    kernel: LoadedKernel,
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Enqueue a kernel on torch's current stream.

    Args:
        kernel: prepared.
        case: gives sizes, mask and scale.
        q, k, v, o: ``[batch, heads, seqlen, dim]``, any strides with unit last.
        lse: dense ``[batch, heads_q, seqlen_q]`` in fp32, or None.
    """
    p = case.problem
    params = abi.AttentionForwardParams(
        struct_size=ctypes.sizeof(abi.AttentionForwardParams),
        abi_version=abi.ABI_VERSION,
        q=_tensor(q),
        k=_tensor(k),
        v=_tensor(v),
        o=_tensor(o),
        lse=None if lse is None else lse.data_ptr(),
        batch=p.batch,
        heads_q=p.heads_q,
        heads_kv=p.heads_kv,
        seqlen_q=p.seqlen_q,
        seqlen_k=p.seqlen_k,
        dim_qk=p.dim_qk,
        dim_v=p.dim_v,
        causal=int(p.causal),
        causal_offset=p.causal_offset,
        softmax_scale=p.dim_qk**-0.5 if case.scale is None else case.scale,
    )
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    kernel.launch(params, 0, stream, q.device.index or 0)


def judge(kernel: LoadedKernel, case: Case, *, seed: int, device: torch.device) -> list[str]:
    """What is wrong with a kernel on a case; nothing when all is right.

    Args:
        kernel: prepared on the device.
        case: what to run.
        seed: of the inputs.
        device: where; the CPU for kernels that run on the host.
    """
    inputs = make_inputs(case, seed=seed, device=device)
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    before = {name: held.bits.clone() for name, held in given.items()}
    runs = [make_outputs(case, device) for _ in range(2)]
    tensors = (inputs.q.view, inputs.k.view, inputs.v.view)
    for run in runs:
        lse = None if run.lse is None else run.lse.view[..., 0]
        launch(kernel, case, *tensors, run.o.view, lse)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wrong = [
        f"{name} was changed"
        for name, held in given.items()
        if not torch.equal(held.bits, before[name])
    ]
    for number, run in enumerate(runs):
        wrong += [
            f"run {number} wrote beside {name}" for name, held in run.held() if not _intact(held)
        ]
    for (name, one), (_, other) in zip(runs[0].held(), runs[1].held(), strict=True):
        if not torch.equal(one.bits, other.bits):
            wrong.append(f"two runs differ in {name}")
    return [*wrong, *_disagreements(case, tensors, runs[0])]


def _disagreements(
    case: Case, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], run: Outputs
) -> Iterator[str]:
    p = case.problem
    o_ref, lse_ref = attention(
        *tensors,
        softmax_scale=case.scale,
        causal=p.causal,
        causal_alignment=p.causal_alignment,
    )
    o_low, lse_low = attention_low(
        *tensors,
        softmax_scale=case.scale,
        causal=p.causal,
        causal_alignment=p.causal_alignment,
    )
    o = check(run.o.view, o_ref, o_low)
    if not o.ok:
        yield f"o: {o.reason}"
    if run.lse is not None:
        lse = check(run.lse.view[..., 0], lse_ref, lse_low)
        if not lse.ok:
            yield f"lse: {lse.reason}"


def _intact(held: Held) -> bool:
    """Whether everything around the view still has the pattern."""
    copy, pattern = held.bits.clone(), PATTERN[held.storage.element_size()]
    view = held.view
    copy.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(pattern)
    return bool((copy == pattern).all())


def _tensor(x: torch.Tensor) -> abi.Tensor:
    batch, head, row, _ = x.stride()
    return abi.Tensor(data=x.data_ptr(), stride_batch=batch, stride_head=head, stride_row=row)
