"""The tasks of a worker over kernels that run on the host, in a process without torch, as one on a GPU is.

What a launch takes is what the library says (``-DTIME_US``), so that races end as they must on any machine.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np

from attention_autotuner.core.outcome import Outcome
from attention_autotuner.operations.shared.launching import Inputs, Outputs
from attention_autotuner.tuning import rounds, sampling, tasks
from attention_autotuner.tuning.devices import ALIGNMENT, Bytes, Device
from attention_autotuner.tuning.entries import Entry, KernelEntry

classify = rounds.classify
LAUNCHES = 4  # before the rounds


class HostDevice:
    """The host in place of a GPU: memory is numpy's, and a launch is over when it returns."""

    name, num_sms, l2_bytes, stream = "host", 1, 0, 0

    def __init__(self, index: int) -> None:
        self.index = index

    def empty(self, num_bytes: int) -> Bytes:
        whole = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -self.address(whole) % ALIGNMENT
        return whole[start : start + num_bytes]

    def address(self, buffer: Bytes) -> int:
        return int(buffer.ctypes.data)

    def fill(self, buffer: Bytes, byte: int) -> None:
        buffer.fill(byte)

    def put(self, buffer: Bytes, data: Bytes) -> None:
        buffer[:] = data

    def get(self, buffer: Bytes) -> Bytes:
        return buffer.copy()

    def copy(self, buffer: Bytes) -> Bytes:
        made = self.empty(buffer.size)
        made[:] = buffer
        return made

    def free_bytes(self) -> int:
        return 1 << 30

    def release(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def spin(self, cycles: int) -> None:
        pass

    def event(self) -> Any:
        raise NotImplementedError("Prepared takes the times")

    def elapsed_us(self, start: Any, end: Any) -> float:
        raise NotImplementedError("Prepared takes the times")

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def warm_up(self) -> None:
        pass


class Prepared:
    """Replaces what times an entry by events."""

    def __init__(
        self, device: Device, entry: Entry, inputs: Sequence[Inputs], outputs: Sequence[Outputs]
    ) -> None:
        entry.prepare(inputs, outputs)
        self._entry = entry
        assert isinstance(entry, KernelEntry)
        self._time = ctypes.CDLL(str(entry.path)).fake_time_us
        self._time.restype = ctypes.c_double
        for _ in range(LAUNCHES):
            self.enqueue()

    def enqueue(self) -> None:
        self._entry.run(0)

    def read_us(self) -> float:
        return float(self._time())


class Tasks(tasks.Tasks):
    """Tasks whose device is the host."""

    def device_on(self, index: int, memory_bytes: int | None) -> Device:
        return HostDevice(index)

    def prepare(self, *arguments: Any, **named: Any) -> dict[str, Outcome]:
        with mock.patch.object(sampling, "_Prepared", Prepared):
            return super().prepare(*arguments, **named)

    def imported(self) -> list[str]:
        """The packages that this process has imported."""
        return sorted({name.split(".")[0] for name in sys.modules})
