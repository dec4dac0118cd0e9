"""Launches without torch, each tensor in its own allocation, and their references in NumPy.

For runs under a sanitizer: nothing else uses the device, and an access outside a tensor is outside an allocation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from attention_autotuner.arch.probe import DRIVER_LIBRARY
from attention_autotuner.core import abi
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import ArtifactError
from attention_autotuner.operations.params import params_of
from attention_autotuner.serving import loader

Floats = npt.NDArray[np.float32]
Values = Mapping[str, Floats]
# Of the largest value: loose, because a sanitizer run looks for worse errors than rounding.
TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}
LSE_TOLERANCE = 1e-3
NAN = 0x7FFF  # in both dtypes


class Memory(Protocol):
    """Memory that tensors are allocated in."""

    def upload(self, data: npt.NDArray[Any]) -> int:
        """Allocate exactly this content, aligned to 256 bytes; returns the address."""

    def download(self, address: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The content of an allocation, once the device is done."""

    def free(self) -> None:
        """Free every allocation."""


class DeviceMemory:
    """The first GPU's memory, through the CUDA driver.

    Raises:
        ArtifactError: there is no driver, or one of its calls fails.
    """

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL(DRIVER_LIBRARY)
        except OSError as error:
            raise ArtifactError(f"this machine has no CUDA driver: {error}") from error
        self._held: list[ctypes.c_uint64] = []
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def upload(self, data: npt.NDArray[Any]) -> int:
        """See :meth:`Memory.upload`."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(data.nbytes))
        self._held.append(address)
        source = data.ctypes.data_as(ctypes.c_void_p)
        self._call("cuMemcpyHtoD_v2", address, source, ctypes.c_size_t(data.nbytes))
        return int(address.value)

    def download(self, address: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See :meth:`Memory.download`."""
        self._call("cuCtxSynchronize")
        content = np.empty_like(like)
        target = content.ctypes.data_as(ctypes.c_void_p)
        self._call(
            "cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(like.nbytes)
        )
        return content

    def free(self) -> None:
        """See :meth:`Memory.free`."""
        while self._held:
            self._call("cuMemFree_v2", self._held.pop())

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            raise ArtifactError(f"{name} of the CUDA driver returned {status}")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One launch.

    Attributes:
        problem: sizes, dtype and mask; tensors are unaligned where its alignment says so.
        scale: the softmax scale.
    """

    problem: Problem
    scale: float

    @property
    def pad(self) -> int:
        """Elements between two rows of an input."""
        return 0 if self.problem.alignment_bytes == 16 else 1

    @property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Shapes of the tensors with rows of head dims, by name."""
        p = self.problem
        q, k = (p.batch, p.heads_q, p.seqlen_q), (p.batch, p.heads_kv, p.seqlen_k)
        rows = {"q": (*q, p.dim_qk), "k": (*k, p.dim_qk), "v": (*k, p.dim_v), "o": (*q, p.dim_v)}
        gradients = {"dq": rows["q"], "dk": rows["k"], "dv": rows["v"], "dout": rows["o"]}
        return rows | gradients


def probabilities(values: Values, call: Call) -> tuple[Floats, Floats]:
    """P and LSE of every query head, in fp32."""
    p = call.problem
    s = call.scale * np.einsum("bhid,bhjd->bhij", values["q"], grouped(values["k"], call))
    if p.causal:
        rows, keys = np.arange(p.seqlen_q)[:, None], np.arange(p.seqlen_k)
        s = np.where(keys <= rows + p.causal_offset, s, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=-1e30)
    exponentials = np.exp(s - top)
    total = exponentials.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]
    return (exponentials / np.maximum(total, 1e-30)).astype(np.float32), lse.astype(np.float32)


def grouped(x: Floats, call: Call) -> Floats:
    """A tensor of key heads, repeated for every query head."""
    return x.repeat(call.problem.heads_q // call.problem.heads_kv, axis=1)


def forward_reference(values: Values, call: Call) -> dict[str, Floats]:
    """O and LSE in fp32."""
    p, lse = probabilities(values, call)
    return {"o": np.einsum("bhij,bhjd->bhid", p, grouped(values["v"], call)), "lse": lse}


def backward_reference(values: Values, call: Call) -> dict[str, Floats]:
    """The gradients in fp32, by the formula."""
    p, _ = probabilities(values, call)
    dout, o = values["dout"], values["o"]
    dp = np.einsum("bhid,bhjd->bhij", dout, grouped(values["v"], call))
    delta = (dout * o).sum(axis=-1) - values["dlse"]
    ds = p * (dp - delta[..., None])

    def summed(x: Floats) -> Floats:
        heads = call.problem.heads_kv
        grouped_sum: Floats = x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(axis=2)
        return grouped_sum

    return {
        "dq": call.scale * np.einsum("bhij,bhjd->bhid", ds, grouped(values["k"], call)),
        "dk": call.scale * summed(np.einsum("bhij,bhid->bhjd", ds, values["q"])),
        "dv": summed(np.einsum("bhij,bhid->bhjd", p, dout)),
    }


def encode(values: Floats, dtype: str) -> npt.NDArray[np.uint16]:
    """The bits of fp16 or bf16 numbers, rounded to nearest."""
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode(bits: npt.NDArray[np.uint16], dtype: str) -> Floats:
    """The fp32 numbers of fp16 or bf16 bits."""
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Launch:
    """The tensors of one launch.

    Args:
        call: the launch.
        memory: the memory of the tensors.
        seed: seed of the inputs.
    """

    def __init__(self, call: Call, memory: Memory, seed: int) -> None:
        self.call = call
        self._memory = memory
        self._source = np.random.default_rng(seed)
        self._outputs: dict[str, tuple[int, npt.NDArray[Any]]] = {}
        self.params: Any = params_of(call.problem, call.scale)
        self.values: dict[str, Floats] = {}
        self._fill()

    def _fill(self) -> None:
        """Make the inputs and allocate the outputs."""
        call = self.call
        for name in ("q", "k", "v"):
            self._draw(name)
        if call.problem.direction == "forward":
            self._poison("o")
            self._poison_floats("lse", call.shapes["o"][:3])
            return
        self._draw("dout")
        forward = forward_reference(self.values, call)
        self._place("o", forward["o"])
        self.values["dlse"] = self._source.standard_normal(forward["lse"].shape, dtype=np.float32)
        self.params.lse = self._memory.upload(forward["lse"])
        self.params.dlse = self._memory.upload(self.values["dlse"])
        for name in ("dq", "dk", "dv"):
            self._poison(name)

    def run(self, kernel: loader.LoadedKernel) -> dict[str, Floats]:
        """The outputs of one launch with a workspace full of NaN."""
        size, workspace = kernel.workspace_bytes(self.params), 0
        if size:
            workspace = self._memory.upload(np.full(size, 0xFF, np.uint8))
        kernel.launch(self.params, workspace, 0, 0)
        outputs = {}
        for name, (address, like) in self._outputs.items():
            bits = self._memory.download(address, like)
            is_fp32 = bits.dtype == np.float32
            outputs[name] = bits if is_fp32 else decode(bits, self.call.problem.dtype)
        return outputs

    def _draw(self, name: str) -> None:
        """Make an input of normal numbers."""
        *rows, columns = self.call.shapes[name]
        pad = self.call.pad
        drawn = self._source.standard_normal((*rows, columns + pad), dtype=np.float32)
        self._place(name, drawn, columns)

    def _place(self, name: str, values: Floats, columns: int | None = None) -> None:
        """Upload an input; columns from ``columns`` on are padding."""
        dtype = self.call.problem.dtype
        bits = encode(values, dtype)
        pad = 0 if columns is None else bits.shape[-1] - columns
        # The last row ends without padding, so that the allocation ends with the tensor.
        self._set(name, self._memory.upload(bits.ravel()[: bits.size - pad]), bits.shape)
        self.values[name] = decode(bits, dtype)[..., :columns]

    def _poison(self, name: str) -> None:
        like = np.full(self.call.shapes[name], NAN, np.uint16)
        address = self._memory.upload(like)
        self._outputs[name] = address, like
        self._set(name, address, like.shape)

    def _poison_floats(self, name: str, shape: tuple[int, ...]) -> None:
        """Allocate a contiguous fp32 output full of NaN."""
        like = np.full(shape, np.nan, np.float32)
        address = self._memory.upload(like)
        setattr(self.params, name, address)
        self._outputs[name] = address, like

    def _set(self, name: str, address: int, shape: tuple[int, ...]) -> None:
        _, heads, rows, row = shape
        packed = abi.Tensor(
            data=address, stride_batch=heads * rows * row, stride_head=rows * row, stride_row=row
        )
        setattr(self.params, name, packed)


def run(kernel: loader.LoadedKernel, call: Call, memory: Memory, seed: int = 0) -> list[str]:
    """The errors of one launch."""
    forward = call.problem.direction == "forward"
    reference = forward_reference if forward else backward_reference
    return errors_of(kernel, Launch(call, memory, seed), memory, reference)


def errors_of(
    kernel: loader.LoadedKernel,
    launch: Launch,
    memory: Memory,
    reference: Callable[[Values, Any], dict[str, Floats]],
) -> list[str]:
    """The errors of one launch whose inputs are in memory."""
    outputs = launch.run(kernel)
    memory.free()
    expected = reference(launch.values, launch.call)
    return list(_differences(outputs, expected, TOLERANCE[launch.call.problem.dtype]))


def _differences(outputs: Values, expected: Values, tolerance: float) -> Iterator[str]:
    for name, values in expected.items():
        if name == "lse":
            if not np.allclose(outputs[name], values, rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE):
                yield "lse is off"
            continue
        allowed = tolerance * max(1.0, float(np.abs(values).max()))
        if not np.allclose(outputs[name], values, rtol=tolerance, atol=allowed):
            yield f"{name} is off by up to {np.abs(outputs[name] - values).max():.3g}"
