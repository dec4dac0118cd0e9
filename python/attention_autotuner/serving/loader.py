"""From a kernel library on disk to functions that can be called: ctypes over the C ABI, and no more.

A :class:`LoadedKernel` lives as long as the process, because CUDA keeps referring to the module's code. Loading runs no
GPU code and needs no driver; :meth:`LoadedKernel.prepare` does.
"""

from __future__ import annotations

import copy
import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import abi
from ..core.memo import Table
from ..core.trust import check
from ..errors import ArtifactError, DeviceMemoryError

if TYPE_CHECKING:  # a search's worker loads kernels and builds none
    from ..codegen.artifact import Artifact

LIBRARY_NAME = "kernel.so"


@dataclass(frozen=True, kw_only=True)
class KernelDescription:
    """The description that an artifact gives of itself.

    Attributes:
        name: the candidate's name.
        padded_dim_qk, padded_dim_v: head dims it was compiled for, elements.
        block_m, block_n: tile, rows of queries and of keys.
        num_threads: threads of one CTA.
        static_smem_bytes, dynamic_smem_bytes: shared memory of one CTA.
        copy_bytes: width of its global reads.
    """

    name: str
    padded_dim_qk: int
    padded_dim_v: int
    block_m: int
    block_n: int
    num_threads: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    copy_bytes: int


class LoadedKernel:
    """A kernel library with its ABI checked.

    Attributes:
        path: the library's file.
        info: what it says of itself.
        launch_function: the raw C entry ``(params, workspace, stream, device) -> status``, for callers that count
            microseconds; pass integers or ready-made ctypes objects, and hand a non-zero status to
            :meth:`raise_for_status`.
        launch_knobs: by name; written into the params of every launch.
    """

    def __init__(self, path: Path, *, generation: int = 0) -> None:
        """Open a library; use :func:`load`, which opens each only once.

        Args:
            path: absolute path of the library.
            generation: how many other files were loaded from this path before.

        Raises:
            UntrustedError: somebody untrusted owns the file or its folder, or may change them.
        """
        check(path.parent, path)
        self.path = path
        # The dynamic linker takes a name it has seen for the file it has seen: a replaced file needs another spelling.
        spelling = os.path.join(path.parent, *["."] * generation, path.name)  # noqa: PTH118  # Path drops the dots
        try:
            self._library = ctypes.CDLL(spelling, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        except OSError as error:
            raise ArtifactError(f"cannot load the kernel library {path}: {error}") from error
        version = self._bind("abi_version")()
        if version // 1000 != abi.ABI_MAJOR:
            raise ArtifactError(
                f"{path} was built for ABI {version}, this package speaks {abi.ABI_VERSION}: "
                "rebuild it (attention-autotuner cache gc removes what is out of date)"
            )
        self._status_string = self._bind("status_string")
        self._workspace_bytes = self._bind("workspace_bytes")
        self._prepare = self._bind("prepare")
        self.launch_function: Callable[
            [int | ctypes.c_void_p, int | None, int | None, int | ctypes.c_int32], int
        ] = self._bind("launch")
        self.info = self._read_info()
        self.launch_knobs: Mapping[str, int] = {}
        self._prepared: set[int] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"LoadedKernel({self.info.name}, {self.path})"

    def prepare(self, device: int) -> None:
        """Load the module on a device and set its attributes; does nothing the second time.

        Args:
            device: CUDA device index; must be the calling thread's current device, not capturing a graph.

        Raises:
            ArtifactError: the device cannot run it, or the driver refused it.
        """
        with self._lock:
            if device not in self._prepared:
                self.raise_for_status(self._prepare(device), f"prepare it on cuda:{device}")
                self._prepared.add(device)

    def with_launch_knobs(self, knobs: Mapping[str, int]) -> LoadedKernel:
        """The kernel as a candidate with such launch knobs launches it; the library is shared."""
        if knobs == self.launch_knobs:
            return self
        kernel = copy.copy(self)
        kernel.launch_knobs = dict(knobs)
        return kernel

    def set_launch_knobs(self, params: ctypes.Structure) -> None:
        """Write the launch knobs into params, each into the field of its name; for callers of ``launch_function``."""
        for name, value in self.launch_knobs.items():
            setattr(params, name, value)

    def workspace_bytes(self, params: ctypes.Structure) -> int:
        """Bytes of device memory that :meth:`launch` needs for these params; sets the launch knobs in them."""
        self.set_launch_knobs(params)
        return int(self._workspace_bytes(ctypes.addressof(params)))

    def launch(self, params: ctypes.Structure, workspace: int, stream: int, device: int) -> None:
        """Enqueue the kernel; never synchronises.

        Args:
            params: a struct of :mod:`.abi`, not needed any more when this returns; the launch knobs are set in it.
            workspace: address of :meth:`workspace_bytes` bytes on the device, or 0.
            stream: raw ``cudaStream_t`` of the device, 0 for its default stream.
            device: CUDA device index, current in this thread and prepared.

        Raises:
            DeviceMemoryError: the driver ran out of memory.
            ArtifactError: the params do not fit the kernel, or the launch failed.
        """
        self.set_launch_knobs(params)
        status = self.launch_function(ctypes.addressof(params), workspace, stream, device)
        self.raise_for_status(status, "launch it")

    def raise_for_status(self, status: int, action: str) -> None:
        """Turn a status of the C entries into an error; 0 passes.

        Args:
            status: what an entry returned.
            action: what was tried, for the message.
        """
        if status == abi.STATUS_OK:
            return
        text = self._status_string(status)
        reason = text.decode(errors="replace") if text else "no reason given"
        message = f"cannot {action}: {reason} (status {status}, kernel {self.info.name})"
        if status == abi.STATUS_CUDA_ERROR + abi.CUDA_ERROR_MEMORY_ALLOCATION:
            raise DeviceMemoryError(message)
        raise ArtifactError(message)

    def _bind(self, name: str) -> Any:
        symbol = abi.SYMBOL_PREFIX + name
        try:
            function = getattr(self._library, symbol)
        except AttributeError as error:
            raise ArtifactError(f"{self.path} is no kernel library: it lacks {symbol}") from error
        function.restype, function.argtypes = abi.PROTOTYPES[name]
        return function

    def _read_info(self) -> KernelDescription:
        raw = abi.KernelInfo(struct_size=ctypes.sizeof(abi.KernelInfo))
        status = self._bind("get_kernel_info")(ctypes.byref(raw))
        if status != abi.STATUS_OK:
            raise ArtifactError(f"{self.path} does not describe itself: status {status}")
        values = {field.name: getattr(raw, field.name) for field in fields(KernelDescription)}
        values["name"] = (raw.name or b"").decode(errors="replace")
        return KernelDescription(**values)


# Of a path and a digest. CUDA refers to the code of loaded modules, and a path says how often it was loaded.
LOADED: Table[tuple[str, str], LoadedKernel] = Table("kernels.loaded", permanent=True)
_lock = threading.Lock()


def load(artifact: Artifact | str | os.PathLike[str]) -> LoadedKernel:
    """Load a kernel library, once per file and content.

    Args:
        artifact: a built artifact, or the path of a library or of the folder that holds ``kernel.so``.

    Raises:
        ArtifactError: there is no such file, it cannot be loaded, lacks an entry, or speaks another ABI.
        UntrustedError: somebody untrusted owns it or its folder, or may change them.
    """
    key = _identify(artifact)
    with _lock:
        kernel = LOADED.get(key)
        if kernel is None:
            generation = sum(path == key[0] for path, _ in LOADED)
            kernel = LoadedKernel(Path(key[0]), generation=generation)
            LOADED.remember(key, kernel)
    return kernel


def _identify(artifact: Artifact | str | os.PathLike[str]) -> tuple[str, str]:
    """The library's absolute path, and a digest that changes when the file is replaced."""
    known = None if isinstance(artifact, (str, os.PathLike)) else artifact
    path = Path(artifact if known is None else known.path).absolute()  # type: ignore[arg-type]
    if path.is_dir():
        path /= LIBRARY_NAME
    if known is not None:
        return str(path), known.digest
    try:
        status = path.stat()
    except OSError as error:
        raise ArtifactError(f"cannot load the kernel library {path}: {error}") from error
    return str(path), f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
