"""The properties of the GPU in this machine, read from the CUDA driver alone.

The driver is there wherever a kernel can run, so probing needs neither torch nor cupy, and creates no CUDA context.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol
from uuid import UUID

from ..core.memo import remembered
from ..errors import ArchSpecError, UnsupportedArchitectureError

DRIVER_LIBRARY = "libcuda.so.1"


def _attribute(number: int, *, least: int = 1) -> Any:
    """A field that the driver answers as a ``CUdevice_attribute``, part of its stable ABI (cuda.h, CUDA 13.0).

    Args:
        number: of the attribute.
        least: value; 0 where a driver may not tell, or a GPU not take.
    """
    return field(metadata={"attribute": number, "least": least})


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """One device's own limits.

    Attributes:
        name: as the driver gives it, e.g. ``NVIDIA GeForce RTX 3090``.
        compute_capability: (major, minor).
        num_sms: streaming multiprocessors that this process can use.
        smem_per_sm_bytes: shared memory of one SM.
        smem_per_block_bytes: the most one CTA may ask for.
        smem_reserved_per_block_bytes: what the system keeps per resident CTA.
        registers_per_sm: 32-bit registers of one SM.
        max_threads_per_sm: resident threads.
        max_blocks_per_sm: resident CTAs.
        l2_bytes: L2 cache.
        sm_clock_khz: peak SM clock; 0 where the driver does not say.
        memory_clock_khz: peak memory clock; 0 where the driver does not say.
        memory_bus_bits: width of the memory bus; 0 where the driver does not say.
    """

    name: str
    compute_capability: tuple[int, int]
    num_sms: int = _attribute(16)
    smem_per_sm_bytes: int = _attribute(81)
    smem_per_block_bytes: int = _attribute(97)
    smem_reserved_per_block_bytes: int = _attribute(111, least=0)
    registers_per_sm: int = _attribute(82)
    max_threads_per_sm: int = _attribute(39)
    max_blocks_per_sm: int = _attribute(106)
    l2_bytes: int = _attribute(38)
    sm_clock_khz: int = _attribute(13, least=0)
    memory_clock_khz: int = _attribute(36, least=0)
    memory_bus_bits: int = _attribute(37, least=0)

    @property
    def hbm_bytes_per_second(self) -> float:
        """Peak bandwidth of device memory, two transfers a reported clock; 0 where the driver does not say."""
        return 2.0 * self.memory_clock_khz * 1e3 * self.memory_bus_bits / 8


ATTRIBUTES: dict[str, int] = {
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    **{
        item.name: item.metadata["attribute"]
        for item in fields(DeviceProperties)
        if "attribute" in item.metadata
    },
}


def two_integers(name: str, value: Any) -> tuple[int, int]:
    """Two integers out of a parsed file.

    Raises:
        ArchSpecError: they are not; the message begins with the name.
    """
    if not isinstance(value, (list, tuple)) or [type(number) for number in value] != [int, int]:
        raise ArchSpecError(f"{name} must be two integers, got {value!r}")
    return value[0], value[1]


def properties_from_json(data: Mapping[str, Any]) -> DeviceProperties:
    """Properties out of a parsed file, for a GPU that is elsewhere.

    Args:
        data: every field of :class:`DeviceProperties` by name; others are left to the caller.

    Raises:
        ArchSpecError: a field is missing, of the wrong kind or too small; the message names it.
    """
    values: dict[str, Any] = {}
    for item in fields(DeviceProperties):
        if item.name not in data:
            raise ArchSpecError(f"{item.name} is missing")
        value = data[item.name]
        if item.name == "name":
            if not isinstance(value, str) or not value:
                raise ArchSpecError(f"name must be a text, got {value!r}")
        elif item.name == "compute_capability":
            value = two_integers(item.name, value)
        else:
            least = item.metadata["least"]
            if type(value) is not int or value < least:
                raise ArchSpecError(
                    f"{item.name} must be an integer of at least {least}, got {value!r}"
                )
        values[item.name] = value
    return DeviceProperties(**values)


class Driver(Protocol):
    """The four questions that probing asks."""

    def version(self) -> int:
        """The newest CUDA version the driver supports, as 1000 * major + 10 * minor."""

    def count(self) -> int:
        """Number of visible devices."""

    def name(self, device: int) -> str:
        """A device's name."""

    def attribute(self, device: int, attribute: int) -> int:
        """One ``CUdevice_attribute`` of a device."""


class CudaDriver:
    """The CUDA driver library, through ctypes.

    Raises:
        UnsupportedArchitectureError: there is no driver, or it does not start.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(DRIVER_LIBRARY)
        except OSError as error:
            raise UnsupportedArchitectureError(
                f"this machine has no CUDA driver: {DRIVER_LIBRARY} cannot be loaded; "
                "name the architecture instead, e.g. device_type='A100'"
            ) from error
        self._call("cuInit", 0)

    def _call(self, function: str, *arguments: Any, said: str = "") -> None:
        """Call the driver; where ``said`` is given, an error names the function so."""
        status = getattr(self._library, function)(*arguments)
        if status == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        detail = text.value.decode() if text.value else "unknown error"
        raise UnsupportedArchitectureError(
            f"the CUDA driver found no usable GPU: {said or function} returned {status} ({detail}); "
            "name the architecture instead, e.g. device_type='A100'"
        )

    def version(self) -> int:
        """The newest CUDA version the driver supports, as 1000 * major + 10 * minor."""
        return self._integer("cuDriverGetVersion")

    def count(self) -> int:
        """Number of visible devices."""
        return self._integer("cuDeviceGetCount")

    def name(self, device: int) -> str:
        """A device's name."""
        buffer = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", buffer, len(buffer), self._handle(device))
        return buffer.value.decode()

    def attribute(self, device: int, attribute: int) -> int:
        """One ``CUdevice_attribute`` of a device."""
        said = f"cuDeviceGetAttribute({attribute})"
        return self._integer("cuDeviceGetAttribute", attribute, self._handle(device), said=said)

    def uuid(self, device: int) -> UUID:
        """A device's identity, whatever its index is in this process."""
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid", raw, self._handle(device))
        return UUID(bytes=bytes(raw))

    def _handle(self, device: int) -> int:
        return self._integer("cuDeviceGet", device)

    def _integer(self, function: str, *arguments: Any, said: str = "") -> int:
        """The integer that a function of the driver gives through its first argument."""
        value = ctypes.c_int()
        self._call(function, ctypes.byref(value), *arguments, said=said)
        return value.value


@remembered("driver", permanent=True)
def cuda_driver() -> CudaDriver:
    """The process's driver, started on first use.

    Raises:
        UnsupportedArchitectureError: there is no driver, or it finds no GPU.
    """
    return CudaDriver()


def imported(name: str) -> Any:
    """A module that this program has imported; None before, and while another thread imports it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def current_device() -> int:
    """The device that torch or cupy works on, whichever this program uses; 0 before either has chosen."""
    torch = imported("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    cupy = imported("cupy")
    if cupy is not None and cupy.cuda.is_available():
        return int(cupy.cuda.runtime.getDevice())
    return 0


def probe(device: int | None = None, *, driver: Driver | None = None) -> DeviceProperties:
    """Read a device's limits.

    Args:
        device: index among the visible devices; None is the one that torch or cupy works on, else the first.
        driver: whom to ask; None is this machine's driver.

    Raises:
        UnsupportedArchitectureError: there is no driver, no GPU, or no device of that index.
    """
    index = current_device() if device is None else device
    return _properties_here(index) if driver is None else _properties(driver, index)


@remembered("devices")
def _properties_here(index: int) -> DeviceProperties:
    # A driver takes up to 3 ms for the clock's rate alone, and a first call asks for all properties several times.
    return _properties(cuda_driver(), index)


def _properties(driver: Driver, index: int) -> DeviceProperties:
    count = driver.count()
    if not 0 <= index < count:
        raise UnsupportedArchitectureError(
            f"device {index} does not exist; {count} visible (CUDA_VISIBLE_DEVICES may hide others)"
        )
    values = {name: driver.attribute(index, number) for name, number in ATTRIBUTES.items()}
    major = values.pop("compute_capability_major")
    minor = values.pop("compute_capability_minor")
    return DeviceProperties(name=driver.name(index), compute_capability=(major, minor), **values)
