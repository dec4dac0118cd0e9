"""The tasks of a worker over a stand-in for cupy, whose GPU is the host: numpy has the memory, launches end at once.

It is for a process of its own: the stand-in takes cupy's name there.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.fake_tasks import HostDevice, Prepared

HOST = HostDevice(0)
LIMIT = 1 << 26  # bytes, of the whole GPU


class Pointer:
    """cupy's MemoryPointer."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.ptr = array.ctypes.data

    def memset_async(self, value: int, size: int, stream: Any) -> None:
        self._array[:size] = value

    def copy_from_device_async(self, source: Pointer, size: int, stream: Any) -> None:
        self._array[:size] = source._array[:size]


class Array:
    """cupy's ndarray, flat and of bytes."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.data, self.nbytes = Pointer(array), array.nbytes

    def __getitem__(self, index: slice) -> Array:
        return Array(self._array[index])

    def set(self, data: Any, stream: Any) -> None:
        assert data.flags.c_contiguous
        assert data.shape == self._array.shape
        self._array[:] = data

    def get(self, stream: Any) -> Any:
        return self._array.copy()


class Stream:
    """cupy's Stream."""

    ptr = 0

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking  # or nothing could be captured on it

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Pool:
    """cupy's MemoryPool."""

    def __init__(self) -> None:
        self._limit = 0

    def set_limit(self, size: int) -> None:
        self._limit = size

    def get_limit(self) -> int:
        return self._limit

    def malloc(self, size: int) -> None:
        raise NotImplementedError("empty takes the host's memory")

    def free_bytes(self) -> int:
        return 0

    used_bytes = free_bytes

    def free_all_blocks(self) -> None:
        pass


class Module:
    """cupy's Module."""

    def load(self, code: bytes) -> None:
        assert b".entry spin(" in code

    def get_function(self, name: str) -> Any:
        assert name == "spin"

        def launch(grid: Any, block: Any, arguments: tuple[Any], *, stream: Stream) -> None:
            assert (grid, block, arguments[0].dtype) == ((1,), (1,), np.uint64)

        return launch


def install() -> None:
    """Give the stand-in cupy's name."""
    properties = {"name": b"host", "multiProcessorCount": 1, "l2CacheSize": 0}
    cuda: Any = ModuleType("cupy.cuda")
    vars(cuda).update(
        runtime=SimpleNamespace(
            getDeviceProperties=lambda index: properties, memGetInfo=lambda: (LIMIT, LIMIT)
        ),
        cublas=SimpleNamespace(),
        function=SimpleNamespace(Module=Module),
        Device=lambda index: SimpleNamespace(use=lambda: None),
        Stream=Stream,
        MemoryPool=Pool,
        Event=lambda: SimpleNamespace(ptr=0),
        set_allocator=lambda allocator: None,
    )
    cupy: Any = ModuleType("cupy")
    matrix = SimpleNamespace(dot=lambda other, out: None)
    vars(cupy).update(
        cuda=cuda,
        uint8=np.uint8,
        empty=lambda size, dtype: Array(HOST.empty(size)),
        asarray=lambda array: matrix,
        empty_like=lambda like: matrix,
    )
    sys.modules.update({"cupy": cupy, "cupy.cuda": cuda})


install()

from attention_autotuner.tuning import cupy_tasks, sampling  # noqa: E402  # over the stand-in

classify = cupy_tasks.classify
# There is no driver to record events: what a sample took is what the library says.
vars(cupy_tasks)["DRIVER_LIBRARY"] = None
vars(sampling)["_Prepared"] = Prepared


class Tasks(cupy_tasks.Tasks):
    """Tasks over the stand-in."""

    def facts(self) -> tuple[bool, int]:
        """Return whether torch was imported, and the memory that is free."""
        return "torch" in sys.modules, self._device.free_bytes()

    def spin(self) -> None:
        """Keep the device busy for a moment."""
        self._device.spin(1000)
