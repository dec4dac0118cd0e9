"""Whether a built kernel is right: against fp32, twice the same, every element written, nothing beside the outputs.

The reference works block by block, and what it is asked is bounded too: batch, heads and, where one head alone would be
too much, sequence lengths are reduced first (:func:`reduced`; remainders modulo the tile survive).
Beside the problem itself two shapes of odd length run, causal and not, with enough heads for persistent kernels to
loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..abi import ABI_VERSION, AttentionForwardParams
from ..abi import Tensor as AbiTensor
from ..codegen.outcome import (
    Crashed,
    LaunchFailed,
    Leaked,
    Nondeterministic,
    Ok,
    Outcome,
    OutOfMemory,
    Wrong,
)
from ..codegen.problem import Problem
from ..errors import ArtifactError, AttentionAutotunerError, DeviceMemoryError
from ..loader import LoadedKernel
from ..reference import attention, attention_low, check

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MAX_SCORES = 1 << 28  # elements of all score matrices of one check; bounds the reference's time
TILE = 256  # seqlens are reduced by multiples of this, which every block_m and block_n up to it divides or nearly so
GUARD = 4096  # elements before and after each output
GUARD_BITS = {2: 0x5A5A, 4: 0x5A5A5A5A}
INTEGERS = {2: torch.int16, 4: torch.int32}
ODD_TILES_PER_SM = 6


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """q ``[batch, heads_q, seqlen_q, dim_qk]``, k ``[batch, heads_kv, seqlen_k, dim_qk]``, v with ``dim_v``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """o ``[batch, heads_q, seqlen_q, dim_v]`` and lse ``[batch, heads_q, seqlen_q]`` inside their guarded storages."""

    o: torch.Tensor
    lse: torch.Tensor
    storages: tuple[torch.Tensor, torch.Tensor]


def make_inputs(problem: Problem, *, seed: int, device: torch.device | None = None) -> Inputs:
    """Normal inputs, off 16-byte alignment when the problem says so.

    Args:
        problem: gives shapes and dtype.
        seed: of the numbers; the same seed gives the same ones on the same kind of device.
        device: the current CUDA device by default.
    """
    device = _current_device() if device is None else device
    generator = torch.Generator(device=device).manual_seed(seed)

    def tensor(heads: int, rows: int, columns: int) -> torch.Tensor:
        shape = (problem.batch, heads, rows, columns)
        offset = 0 if problem.alignment_bytes == 16 else 1  # elements
        flat = torch.randn(
            problem.batch * heads * rows * columns + offset,
            dtype=TORCH_DTYPES[problem.dtype],
            device=device,
            generator=generator,
        )
        return flat[offset:].view(shape)

    return Inputs(
        q=tensor(problem.heads_q, problem.seqlen_q, problem.dim_qk),
        k=tensor(problem.heads_kv, problem.seqlen_k, problem.dim_qk),
        v=tensor(problem.heads_kv, problem.seqlen_k, problem.dim_v),
    )


def make_outputs(problem: Problem, inputs: Inputs) -> Outputs:
    """Outputs full of NaN between guards of a known pattern."""
    shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    o, o_storage = _guarded((*shape, problem.dim_v), inputs.q.dtype, inputs.q.device)
    lse, lse_storage = _guarded(shape, torch.float32, inputs.q.device)
    return Outputs(o=o, lse=lse, storages=(o_storage, lse_storage))


def bind(
    kernel: LoadedKernel, problem: Problem, inputs: Inputs, outputs: Outputs
) -> Callable[[], None]:
    """A function that launches the kernel on torch's current stream with these tensors, scale 1/sqrt(dim_qk)."""
    params = AttentionForwardParams(
        struct_size=ctypes.sizeof(AttentionForwardParams),
        abi_version=ABI_VERSION,
        q=_abi_tensor(inputs.q),
        k=_abi_tensor(inputs.k),
        v=_abi_tensor(inputs.v),
        o=_abi_tensor(outputs.o),
        lse=outputs.lse.data_ptr(),
        batch=problem.batch,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        dim_qk=problem.dim_qk,
        dim_v=problem.dim_v,
        causal=int(problem.causal),
        causal_offset=problem.causal_offset,
        softmax_scale=problem.dim_qk**-0.5,
    )
    held = (inputs, outputs)  # the params hold bare pointers
    device = inputs.q.device

    def launch() -> None:
        on_gpu = held[0].q.is_cuda
        stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
        kernel.launch(params, 0, stream, device.index or 0)

    return launch


def classify(error: Exception) -> Outcome:
    """The outcome that an exception of a load, a launch or a wait stands for."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (torch.cuda.OutOfMemoryError, DeviceMemoryError)):
        return OutOfMemory(reason=text)
    if isinstance(error, AttentionAutotunerError):
        return LaunchFailed(reason=text)
    return Crashed(reason=text)


def reduced(problem: Problem) -> Problem:
    """The same problem small enough to check: fewer batches and heads first, then shorter sequences."""
    group = problem.heads_q // problem.heads_kv

    def cut(batch: int, heads_kv: int, group: int, seqlen: int) -> Problem:
        def shorten(length: int) -> int:
            return length if length < seqlen + TILE else seqlen + length % TILE

        return replace(
            problem,
            batch=batch,
            heads_kv=heads_kv,
            heads_q=heads_kv * group,
            seqlen_q=shorten(problem.seqlen_q),
            seqlen_k=shorten(problem.seqlen_k),
        )

    whole = max(problem.seqlen_q, problem.seqlen_k)
    steps = [
        (min(problem.batch, 2), min(problem.heads_kv, 2), min(group, 4), whole),
        (1, min(problem.heads_kv, 2), min(group, 2), whole),
        (1, 1, 1, whole),
    ]
    steps += [(1, 1, 1, seqlen) for seqlen in (16384, 8192, 4096) if seqlen < whole]
    for step in steps:
        small = cut(*step)
        if small.heads_q * small.batch * small.seqlen_q * small.seqlen_k <= MAX_SCORES:
            return small
    return cut(1, 1, 1, 4096)


def variants(problem: Problem, *, block_m: int, block_n: int, num_sms: int) -> list[Problem]:
    """What is run to verify a kernel for a problem: its reduced self, and odd lengths with and without the mask."""
    seqlen_q, seqlen_k = 2 * block_m + 37, 3 * block_n + 13
    heads = 16
    odd = replace(
        problem,
        batch=max(1, ODD_TILES_PER_SM * num_sms // (3 * heads)),
        heads_q=heads,
        heads_kv=heads // 2,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
    )
    return [reduced(problem), replace(odd, causal=False), replace(odd, causal=True)]


def verify(
    problem: Problem,
    loaded: LoadedKernel,
    *,
    seeds: Sequence[int] = (0, 1),
    device: torch.device | None = None,
) -> Outcome:
    """Check a kernel for a problem.

    Args:
        problem: what it will serve; reduced where it is too large to check whole.
        loaded: the kernel; prepared here.
        seeds: of the inputs.
        device: the current CUDA device by default.

    Returns:
        Ok, or Wrong, Nondeterministic, Leaked, LaunchFailed, OutOfMemory or Crashed with its reason.
    """
    device = _current_device() if device is None else device
    num_sms = 1
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    shapes = variants(
        problem, block_m=loaded.info.block_m, block_n=loaded.info.block_n, num_sms=num_sms
    )
    try:
        loaded.prepare(device.index or 0)
        outcomes = (_check(shape, loaded, seed, device) for shape in shapes for seed in seeds)
        return next((outcome for outcome in outcomes if not outcome.ok), Ok())
    except (ArtifactError, RuntimeError) as error:
        return classify(error)


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _check(problem: Problem, loaded: LoadedKernel, seed: int, device: torch.device) -> Outcome:
    inputs = make_inputs(problem, seed=seed, device=device)
    first, second = make_outputs(problem, inputs), make_outputs(problem, inputs)
    bind(loaded, problem, inputs, first)()
    bind(loaded, problem, inputs, second)()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    where = f"{problem.describe()}, seed {seed}"
    for outputs in (first, second):
        if not all(_guards_intact(storage) for storage in outputs.storages):
            return Leaked(reason=f"bytes beside the outputs changed for {where}")
    if not (_same_bits(first.o, second.o) and _same_bits(first.lse, second.lse)):
        return Nondeterministic(reason=f"two runs on the same input differ for {where}")
    reason = next(_disagreements(problem, inputs, first), None)
    return Ok() if reason is None else Wrong(reason=f"{reason} for {where}")


def _disagreements(problem: Problem, inputs: Inputs, outputs: Outputs) -> Iterator[str]:
    """Why the outputs do not follow the rule, if so."""
    mask: dict[str, Any] = {
        "causal": problem.causal,
        "causal_alignment": problem.causal_alignment,
    }
    o_ref, lse_ref = attention(inputs.q, inputs.k, inputs.v, **mask)
    o_low, lse_low = attention_low(inputs.q, inputs.k, inputs.v, **mask)
    for name, out, ref, low in (
        ("o", outputs.o, o_ref, o_low),
        ("lse", outputs.lse, lse_ref, lse_low),
    ):
        comparison = check(out, ref, low)
        if not comparison.ok:
            yield f"{name}: {comparison.reason}"


def _guarded(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor full of NaN, and its storage with guards around it."""
    count = 1
    for extent in shape:
        count *= extent
    storage = torch.empty(count + 2 * GUARD, dtype=dtype, device=device)
    storage.view(INTEGERS[storage.element_size()]).fill_(GUARD_BITS[storage.element_size()])
    inner = storage[GUARD : GUARD + count].view(shape)
    inner.fill_(float("nan"))
    return inner, storage


def _guards_intact(storage: torch.Tensor) -> bool:
    bits = storage.view(INTEGERS[storage.element_size()])
    expected = GUARD_BITS[storage.element_size()]
    edges = torch.cat((bits[:GUARD], bits[-GUARD:]))
    return bool((edges == expected).all())


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = INTEGERS[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))


def _abi_tensor(tensor: torch.Tensor) -> AbiTensor:
    batch, head, row, _ = tensor.stride()
    return AbiTensor(data=tensor.data_ptr(), stride_batch=batch, stride_head=head, stride_row=row)
