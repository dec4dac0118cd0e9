"""The tasks of a worker on a GPU that cupy drives: a process without torch.

Of cupy only what compiles nothing at run time is used: memory, streams, events, graphs, modules, and cuBLAS to warm up.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import cupy
import numpy as np
from cupy.cuda import cublas as cublas  # or a machine without it would not be known before a race
from cupy.cuda import runtime

from ..arch.probe import DRIVER_LIBRARY
from . import tasks
from .devices import WARM_UP_SECONDS, WARM_UP_SIZE, Bytes, Device
from .rounds import classify as classify

EVENT_RECORD_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL of cuda.h
# One thread that reads the clock until so many cycles have passed.
SPIN = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 cycles) {
  .reg .u64 %cycles, %begin, %now;
  .reg .pred %early;
  ld.param.u64 %cycles, [cycles];
  mov.u64 %begin, %clock64;
again:
  mov.u64 %now, %clock64;
  sub.u64 %now, %now, %begin;
  setp.lt.u64 %early, %now, %cycles;
  @%early bra again;
  ret;
}
"""


class CupyEvent:
    """See :class:`.devices.Event`; cupy has no flags for a record.

    Args:
        stream: that it is recorded on.
        driver: the CUDA driver library.
    """

    def __init__(self, stream: Any, driver: ctypes.CDLL) -> None:
        self.event = cupy.cuda.Event()
        self._stream = stream
        self._record = driver.cuEventRecordWithFlags

    def record(self) -> None:
        """See :meth:`.devices.Event.record`."""
        event, stream = (ctypes.c_void_p(handle) for handle in (self.event.ptr, self._stream.ptr))
        # In a graph, for the times of its replays; elsewhere the driver refuses the flag.
        status = self._record(event, stream, EVENT_RECORD_EXTERNAL * self._stream.is_capturing())
        if status:
            raise RuntimeError(f"cuEventRecordWithFlags returned {status}")


class CupyDevice:
    """A GPU driven through cupy, on a stream of its own.

    Args:
        index: CUDA device index.
        memory_bytes: that may be taken of its memory; None for all that is free.

    Raises:
        RuntimeError: this process cannot use the GPU.
    """

    def __init__(self, index: int, memory_bytes: int | None = None) -> None:
        self.index = index
        cupy.cuda.Device(index).use()
        properties = runtime.getDeviceProperties(index)
        self.name: str = properties["name"].decode()
        self.num_sms: int = properties["multiProcessorCount"]
        self.l2_bytes: int = properties["l2CacheSize"]
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._stream.use()
        self._pool = cupy.cuda.MemoryPool()
        if memory_bytes is not None:
            self._pool.set_limit(size=memory_bytes)
        cupy.cuda.set_allocator(self._pool.malloc)
        self._driver = ctypes.CDLL(DRIVER_LIBRARY)
        module = cupy.cuda.function.Module()
        module.load(SPIN)
        self._spin = module.get_function("spin")
        self.synchronize()

    @property
    def stream(self) -> int:
        """See :class:`.devices.Device`, as with all methods."""
        return int(self._stream.ptr)

    def empty(self, num_bytes: int) -> Any:  # noqa: D102
        return cupy.empty(num_bytes, dtype=cupy.uint8)

    def address(self, buffer: Any) -> int:  # noqa: D102
        return int(buffer.data.ptr)

    def fill(self, buffer: Any, byte: int) -> None:  # noqa: D102
        if buffer.nbytes:
            buffer.data.memset_async(byte, buffer.nbytes, self._stream)

    def put(self, buffer: Any, data: Bytes) -> None:  # noqa: D102
        buffer.set(np.ascontiguousarray(data), stream=self._stream)
        self.synchronize()  # the data may go

    def get(self, buffer: Any) -> Bytes:  # noqa: D102
        data: Bytes = buffer.get(stream=self._stream)
        self.synchronize()
        return data

    def copy(self, buffer: Any) -> Any:  # noqa: D102
        made = self.empty(buffer.nbytes)
        if buffer.nbytes:
            made.data.copy_from_device_async(buffer.data, buffer.nbytes, self._stream)
        return made

    def free_bytes(self) -> int:  # noqa: D102
        free = runtime.memGetInfo()[0] + self._pool.free_bytes()
        limit = self._pool.get_limit()  # 0: none
        return int(min(free, limit - self._pool.used_bytes()) if limit else free)

    def release(self) -> None:  # noqa: D102
        self._pool.free_all_blocks()

    def synchronize(self) -> None:  # noqa: D102
        self._stream.synchronize()

    def spin(self, cycles: int) -> None:  # noqa: D102
        self._spin((1,), (1,), (np.uint64(cycles),), stream=self._stream)

    def event(self) -> CupyEvent:  # noqa: D102
        return CupyEvent(self._stream, self._driver)

    def elapsed_us(self, start: CupyEvent, end: CupyEvent) -> float:  # noqa: D102
        return float(cupy.cuda.get_elapsed_time(start.event, end.event)) * 1e3

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:  # noqa: D102
        self._stream.begin_capture()
        try:
            work()
        finally:
            graph = self._stream.end_capture()
        return partial(graph.launch, stream=self._stream)

    def warm_up(self) -> None:  # noqa: D102
        numbers = np.random.default_rng(0).standard_normal(2**20, dtype=np.float32)
        a = cupy.asarray(np.resize(numbers.astype(np.float16), (WARM_UP_SIZE, WARM_UP_SIZE)))
        b = cupy.empty_like(a)
        end = time.monotonic() + WARM_UP_SECONDS
        while time.monotonic() < end:
            for _ in range(20):
                a.dot(a, out=b)
            self.synchronize()


class Tasks(tasks.Tasks):
    """Tasks in a process of its own, without torch."""

    def device_on(self, index: int, memory_bytes: int | None) -> Device:
        """See :meth:`.tasks.Tasks.device_on`."""
        return CupyDevice(index, memory_bytes)
