"""A few kernels of every kind on tiny shapes, without torch: what a sanitizer can watch in reasonable time.

    python tests/gpu/sanitize.py --store DIR --build       # needs the compiler, not the GPU
    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py --store DIR
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py --store DIR

Every tensor is an allocation of its own, so that an access outside it is seen. Ends with status 1 when a result is
wrong or a kernel cannot be launched.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from attention_autotuner import abi, loader
from attention_autotuner.arch import resolve
from attention_autotuner.arch.probe import DRIVER_LIBRARY
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.candidate import Candidate
from attention_autotuner.codegen.knobs import ForwardKnobs
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.errors import ArtifactError

Floats = npt.NDArray[np.float32]
MANIFEST = "sanitize.json"
TOLERANCE = {
    "fp16": 4e-3,
    "bf16": 3e-2,
}  # of values near 1; a sanitizer run looks for worse than rounding
LSE_TOLERANCE = 1e-3


def _candidate(dims: tuple[int, int], tile: tuple[int, int], warps: int, **knobs: Any) -> Candidate:
    dtype, copy_bytes = knobs.pop("dtype", "fp16"), knobs.pop("copy_bytes", 16)
    config: dict[str, Any] = {"num_stages": 1, "k_slice": dims[0]} | knobs
    return Candidate(
        family="sm80",
        dtype=dtype,
        class_qk=dims[0],
        class_v=dims[1],
        copy_bytes=copy_bytes,
        knobs=ForwardKnobs(block_m=tile[0], block_n=tile[1], warps_m=warps, **config),
    )


# Each main loop, each way to hold Q and P, slices, both copy widths, both schedules.
KINDS: dict[str, Candidate] = {
    "one-stage": _candidate((64, 64), (64, 32), 4),
    "two-stages-32-rows": _candidate((64, 64), (128, 64), 4, num_stages=2),
    "three-stages-bf16": _candidate((128, 128), (64, 32), 4, num_stages=3, dtype="bf16"),
    "q-in-registers": _candidate((64, 64), (64, 32), 4, num_stages=2, q_in_registers=True),
    "qk-ahead": _candidate((64, 64), (64, 32), 4, num_stages=2, qk_ahead=True),
    "k-slices": _candidate((128, 128), (64, 32), 4, num_stages=2, k_slice=32),
    "k-slices-three-stages": _candidate((128, 64), (64, 32), 4, num_stages=3, k_slice=64),
    "two-warps-along-keys": _candidate((192, 192), (64, 64), 2, warps_n=2),
    "two-warps-along-keys-k-slices": _candidate(
        (256, 256), (64, 64), 2, num_stages=2, warps_n=2, k_slice=64
    ),
    "value-slices": _candidate((64, 256), (64, 32), 4, num_stages=2, v_slices=2),
    "persistent": _candidate(
        (32, 32), (64, 32), 4, num_stages=2, persistent=True, cta_order="heads_first"
    ),
    "persistent-q-in-registers": _candidate(
        (64, 64), (64, 32), 4, q_in_registers=True, persistent=True, cta_order="heads_first"
    ),
    "unaligned": _candidate((64, 64), (64, 32), 4, num_stages=2, copy_bytes=2),
    "unaligned-bf16-one-stage": _candidate((48, 80), (64, 32), 4, copy_bytes=2, dtype="bf16"),
}
# (batch, heads_q, heads_kv, seqlen_q, seqlen_k, causal, scale); causal is bottom-right.
SHAPES = (
    (1, 2, 1, 1, 1, False, 0.5),
    (1, 2, 1, 77, 91, True, 0.125),
    (1, 1, 1, 91, 40, True, -0.2),
    (2, 2, 2, 70, 33, False, 0.0),
)
# More tiles than any GPU of today holds CTAs of these kernels, so that persistent ones loop.
MANY = (128, 12, 12, 65, 33, True, 0.125)


class Memory(Protocol):
    """Where tensors live."""

    def upload(self, data: npt.NDArray[Any]) -> int:
        """A fresh allocation of exactly this content; its address."""

    def download(self, address: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The content of an allocation, once the device is done."""

    def free(self) -> None:
        """Give every allocation back."""


class DeviceMemory:
    """The first GPU's memory, through the CUDA driver.

    Raises:
        ArtifactError: there is no driver, or a call of it fails.
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
        found = np.empty_like(like)
        target = found.ctypes.data_as(ctypes.c_void_p)
        self._call(
            "cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(like.nbytes)
        )
        return found

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
    """One launch: sizes as in the ABI, true dims one chunk below the class where it has room."""

    one: Candidate
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    causal: bool
    scale: float

    @property
    def dim_qk(self) -> int:
        """True head dim of q and k."""
        return self.one.class_qk - 8

    @property
    def dim_v(self) -> int:
        """True head dim of v and o."""
        return self.one.class_v - 8

    @property
    def pad(self) -> int:
        """Elements between two rows of an input."""
        return 0 if self.one.copy_bytes == 16 else 1


def calls_of(one: Candidate) -> list[Call]:
    """What a kernel is run on."""
    return [
        Call(
            one=one,
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            causal=causal,
            scale=scale,
        )
        for batch, heads_q, heads_kv, seqlen_q, seqlen_k, causal, scale in (
            *SHAPES,
            *([MANY] if one.forward.persistent else []),
        )
    ]


def reference(q: Floats, k: Floats, v: Floats, call: Call) -> tuple[Floats, Floats]:
    """O and LSE in fp32, as the formula says."""
    group = call.heads_q // call.heads_kv
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    s = call.scale * np.einsum("bhid,bhjd->bhij", q, k)
    if call.causal:
        rows, keys = np.arange(call.seqlen_q)[:, None], np.arange(call.seqlen_k)
        s = np.where(keys <= rows + call.seqlen_k - call.seqlen_q, s, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=-1e30)
    weights = np.exp(s - top)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]
    o = np.einsum("bhij,bhjd->bhid", weights / np.maximum(total, 1e-30), v)
    return o.astype(np.float32), lse.astype(np.float32)


def encode(values: Floats, dtype: str) -> npt.NDArray[np.uint16]:
    """The bits of fp16 or bf16 numbers, rounded to nearest."""
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode(bits: npt.NDArray[np.uint16], dtype: str) -> Floats:
    """The numbers again."""
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def run(kernel: loader.LoadedKernel, call: Call, memory: Memory, seed: int = 0) -> list[str]:
    """Launch once; what is wrong with the result."""
    source, dtype = np.random.default_rng(seed), call.one.dtype
    shapes = {
        "q": (call.batch, call.heads_q, call.seqlen_q, call.dim_qk),
        "k": (call.batch, call.heads_kv, call.seqlen_k, call.dim_qk),
        "v": (call.batch, call.heads_kv, call.seqlen_k, call.dim_v),
    }
    tensors: dict[str, abi.Tensor] = {}
    values: dict[str, Floats] = {}
    for name, shape in shapes.items():
        rows = source.standard_normal((*shape[:3], shape[3] + call.pad), dtype=np.float32)
        bits = encode(rows, dtype)
        # The last row ends with the allocation, so that its end is a tensor's end.
        flat = bits.ravel()[: bits.size - call.pad]
        tensors[name] = _tensor(memory.upload(flat), bits.shape)
        values[name] = decode(bits, dtype)[..., : shape[3]]
    o = np.full((*shapes["q"][:3], call.dim_v), 0x7FFF, np.uint16)  # NaN in both dtypes
    lse = np.full(o.shape[:3], np.nan, np.float32)
    o_address, lse_address = memory.upload(o), memory.upload(lse)
    params = abi.AttentionForwardParams(
        struct_size=ctypes.sizeof(abi.AttentionForwardParams),
        abi_version=abi.ABI_VERSION,
        **tensors,
        o=_tensor(o_address, o.shape),
        lse=lse_address,
        batch=call.batch,
        heads_q=call.heads_q,
        heads_kv=call.heads_kv,
        seqlen_q=call.seqlen_q,
        seqlen_k=call.seqlen_k,
        dim_qk=call.dim_qk,
        dim_v=call.dim_v,
        causal=int(call.causal),
        causal_offset=call.seqlen_k - call.seqlen_q,
        softmax_scale=call.scale,
    )
    kernel.launch(params, 0, 0, 0)
    found_o = decode(memory.download(o_address, o), dtype)
    found_lse = memory.download(lse_address, lse)
    memory.free()
    expected_o, expected_lse = reference(values["q"], values["k"], values["v"], call)
    wrong = []
    if not np.allclose(found_o, expected_o, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]):
        wrong.append(f"o is off by up to {np.abs(found_o - expected_o).max():.3g}")
    if not np.allclose(found_lse, expected_lse, rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE):
        wrong.append("lse is off")
    return wrong


def _tensor(address: int, shape: Sequence[int]) -> abi.Tensor:
    _, heads, rows, row = shape
    return abi.Tensor(
        data=address, stride_batch=heads * rows * row, stride_head=rows * row, stride_row=row
    )


def build_all(folder: Path, arch: str) -> int:
    """Build every kind and say where each lies; 1 when one does not build."""
    kernels = [render(one) for one in KINDS.values()]
    results = build(
        kernels, BuildTarget(arch=arch), toolchain=find_toolchain(), store=Store(folder)
    )
    paths: dict[str, str] = {}
    for kind, result in zip(KINDS, results, strict=True):
        if isinstance(result, Artifact):
            paths[kind] = str(result.path)
        else:
            print(f"{kind}: {result}", file=sys.stderr)
    (folder / MANIFEST).write_text(json.dumps(paths, indent=1), encoding="utf-8")
    return 0 if len(paths) == len(KINDS) else 1


def run_all(paths: dict[str, str], memory: Memory) -> int:
    """Run kinds on every shape; 1 when something is wrong."""
    wrong = []
    for kind, path in paths.items():
        kernel = loader.load(path)
        kernel.prepare(0)
        for call in calls_of(KINDS[kind]):
            shape = (call.batch, call.heads_q, call.seqlen_q, call.seqlen_k, call.causal)
            wrong += [f"{kind}, {shape}: {each}" for each in run(kernel, call, memory)]
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{len(paths)} kernels, {len(wrong)} complaints")
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Build or run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="folder of the built kernels")
    parser.add_argument("--build", action="store_true", help="build them and stop")
    parser.add_argument("--arch", help="to build for, e.g. 90; by default what the present GPU has")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), help="run these kinds alone")
    options = parser.parse_args(arguments)
    if options.build:
        return build_all(options.store, options.arch or resolve(None).build_arch)
    manifest = options.store / MANIFEST
    if not manifest.is_file():
        parser.error(f"{manifest} is missing: run with --build first")
    paths = json.loads(manifest.read_text(encoding="utf-8"))
    kinds = options.only or list(KINDS)
    missing = [kind for kind in kinds if kind not in paths]
    if missing:
        parser.error(f"{', '.join(missing)} did not build")
    return run_all({kind: paths[kind] for kind in kinds}, DeviceMemory())


if __name__ == "__main__":
    sys.exit(main())
