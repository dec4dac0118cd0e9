"""A GPU as checks and races use it, so that a worker needs no torch: memory as bytes, events, graphs, a stream.

A :class:`Device` is cupy's in a worker (:mod:`.cupy_tasks`) and torch's in the caller's process (:mod:`.measure`).
Tensors cross between processes as bytes in an anonymous file (:class:`Shared`): the caller, which has the reference,
writes inputs and reads outputs; what a kernel does to the worker's memory cannot reach its own.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..operations.shared.launching import (
    GUARD,
    GUARD_BYTE,
    NAN_BYTE,
    WORKSPACE_ALIGNMENT,
    GrowingWorkspace,
    Inputs,
    Outputs,
)

Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 256  # bytes, of tensors in a file and in a device's memory
WARM_UP_SECONDS = 0.4
WARM_UP_SIZE = 4096  # rows and columns of the GEMM that brings the clocks to their sustained level

Place = Mapping[str, Any]
"""A tensor in a file, as JSON has it: ``offset``, ``num_bytes``, ``lead`` (its address modulo the alignment),
``shape``, ``strides`` (elements), ``itemsize``. An output has ``offsets``, one for each launch, and no strides."""


class Event(Protocol):
    """A point on the stream; one that is recorded under capture is recorded again at every replay."""

    def record(self) -> None:
        """Put it on the stream."""


class Device(Protocol):
    """A GPU, and the stream that all its work is put on. Buffers are flat arrays of bytes that slices are taken of.

    Attributes:
        index: CUDA device index.
        name: of the GPU.
        num_sms: its multiprocessors.
        l2_bytes: its L2 cache.
    """

    index: int
    name: str
    num_sms: int
    l2_bytes: int

    @property
    def stream(self) -> int:
        """The raw ``cudaStream_t`` that launches go to."""

    def empty(self, num_bytes: int) -> Any:
        """A new buffer, of any content."""

    def address(self, buffer: Any) -> int:
        """Where a buffer begins."""

    def fill(self, buffer: Any, byte: int) -> None:
        """Set every byte of a buffer."""

    def put(self, buffer: Any, data: Bytes) -> None:
        """Copy from the host."""

    def get(self, buffer: Any) -> Bytes:
        """Copy to the host."""

    def copy(self, buffer: Any) -> Any:
        """A new buffer of the same content."""

    def free_bytes(self) -> int:
        """Memory that may still be taken."""

    def release(self) -> None:
        """Give memory that nothing uses any more back to the GPU."""

    def synchronize(self) -> None:
        """Wait for the stream; a RuntimeError says that something on it failed."""

    def spin(self, cycles: int) -> None:
        """Keep the stream busy for so many clock cycles."""

    def event(self) -> Event:
        """A new event that takes times."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two events that were waited for."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A function that puts on the stream, as a graph, what ``work`` puts there; ``work`` itself is not run."""

    def warm_up(self) -> None:
        """Multiply matrices until the clocks are at their sustained level."""


@dataclass(frozen=True, kw_only=True)
class Array:
    """A tensor in a device's memory, as far as a launch asks.

    Attributes:
        device: whose.
        memory: the buffer that it lies in.
        lead: bytes before its first element.
        shape, strides: in elements.
        itemsize: bytes of an element.
    """

    device: Device
    memory: Any
    lead: int = 0
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.device.address(self.memory) + self.lead

    def stride(self) -> tuple[int, ...]:
        """Elements from one index to the next, of each axis."""
        return self.strides


def contiguous(
    device: Device, memory: Any, shape: tuple[int, ...], itemsize: int, lead: int
) -> Any:
    """An array without holes; typed as what stands for a tensor of torch."""
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Array(
        device=device, memory=memory, lead=lead, shape=shape, strides=strides, itemsize=itemsize
    )


class Shared:
    """An anonymous file of bytes, for this process and those it names the path to; gone when they are.

    Args:
        num_bytes: its size.

    Attributes:
        path: of the file, for other processes of this user while this one holds it.
        data: its content.
    """

    def __init__(self, num_bytes: int) -> None:
        descriptor = os.memfd_create("attention_autotuner")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, max(1, num_bytes))
        self.data: Bytes = np.frombuffer(mmap.mmap(descriptor, max(1, num_bytes)), np.uint8)
        self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def opened(path: str) -> Bytes:
    """The content of a file of another process, to read and to write."""
    return np.memmap(path, dtype=np.uint8, mode="r+")


def read_inputs(device: Device, handed: Mapping[str, Any]) -> Inputs:
    """The inputs that a file holds, in a device's memory.

    Args:
        device: where.
        handed: ``path``, ``inputs`` (name -> :data:`Place`) and ``scalars``.
    """
    data, tensors = opened(handed["path"]), {}
    for name, place in handed["inputs"].items():
        lead, size = place["lead"], place["num_bytes"]
        memory = device.empty(lead + size)
        device.put(memory[lead:], data[place["offset"] : place["offset"] + size])
        shape, strides = (tuple(place[key]) for key in ("shape", "strides"))
        tensors[name] = Array(
            device=device,
            memory=memory,
            lead=lead,
            shape=shape,
            strides=strides,
            itemsize=place["itemsize"],
        )
    return Inputs(tensors=tensors, scalars=handed["scalars"])  # type: ignore[arg-type]  # as torch's


def copied(inputs: Inputs) -> Inputs:
    """The same inputs elsewhere in the device's memory."""
    arrays: Mapping[str, Any] = inputs.tensors
    tensors: dict[str, Any] = {
        name: replace(array, memory=array.device.copy(array.memory))
        for name, array in arrays.items()
    }
    return Inputs(tensors=tensors, scalars=inputs.scalars)


def workspace_on(device: Device) -> GrowingWorkspace:
    """The workspace that kernels of a race share."""

    def allocate(num_bytes: int) -> tuple[Any, int]:
        memory = device.empty(num_bytes)
        return memory, device.address(memory)

    return GrowingWorkspace(allocate)


class Guarded:
    """Memory of one launch between guards, full of NaN: its outputs by name, and the workspace that it takes.

    Args:
        device: where.
        outputs: name -> :data:`Place`.
    """

    def __init__(self, device: Device, outputs: Mapping[str, Place]) -> None:
        self._device = device
        self._workspaces: list[tuple[Any, int, int]] = []
        self._storages: dict[str, tuple[Any, int, int]] = {}
        tensors = {}
        for name, place in outputs.items():
            shape, itemsize = tuple(place["shape"]), place["itemsize"]
            storage = self._guarded(prod(shape) * itemsize, GUARD * itemsize, 0)
            self._storages[name] = storage
            tensors[name] = contiguous(device, storage[0], shape, itemsize, storage[1])
        self.outputs = Outputs(tensors=tensors, workspace=self)

    def take(self, num_bytes: int) -> int:
        """See :meth:`.launching.Workspace.take`."""
        storage = self._guarded(num_bytes, GUARD, WORKSPACE_ALIGNMENT)
        self._workspaces.append(storage)
        return self._device.address(storage[0]) + storage[1]

    def buffers(self) -> list[Any]:
        """All memory that a launch may write, guards included."""
        return [memory for memory, *_ in (*self._storages.values(), *self._workspaces)]

    def changed(self) -> list[str]:
        """The areas that were written beside: the outputs, the workspace."""
        areas = {"the outputs": self._storages.values(), "the workspace": self._workspaces}
        return [name for name, area in areas.items() if not all(map(self._intact, area))]

    def read(self, name: str) -> Bytes:
        """The bytes of an output."""
        memory, start, stop = self._storages[name]
        return self._device.get(memory[start:stop])

    def _guarded(self, num_bytes: int, guard: int, alignment: int) -> tuple[Any, int, int]:
        memory = self._device.empty(num_bytes + 2 * guard + alignment)
        start = guard + (-self._device.address(memory) % alignment if alignment else 0)
        self._device.fill(memory, GUARD_BYTE)
        self._device.fill(memory[start : start + num_bytes], NAN_BYTE)
        return memory, start, start + num_bytes

    def _intact(self, storage: tuple[Any, int, int]) -> bool:
        memory, start, stop = storage
        guards = (self._device.get(memory[:start]), self._device.get(memory[stop:]))
        return all(bool((guard == GUARD_BYTE).all()) for guard in guards)
