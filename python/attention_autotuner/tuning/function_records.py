"""The kept configuration of a tuned function: a file for each function, source, kind of arguments and machine."""

from __future__ import annotations

import functools
import inspect
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import settings as settings_module
from ..codegen.files import write_json
from ..core.identity import digest16, slug
from ..core.trust import read_json
from .calls import CPU, Config
from .environment import collect
from .function_search import FunctionResult
from .function_values import order_of
from .locking import locked
from .racing import FIGURES
from .result import finite

SCHEMA = 1


def identity(value: Any) -> Any:
    """The part of an argument that a key has.

    Numbers that are no floats, NumPy's among them, strings and None count by value; tensors and arrays by shape, dtype,
    order of strides and kind of device; anything else by its type, but for what lists, tuples and mappings hold.
    """
    if isinstance(value, (np.integer, np.bool_)):
        return value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, torch.Tensor):
        order = order_of(value.stride()) if value.layout == torch.strided else str(value.layout)
        return [list(value.shape), str(value.dtype), order, value.device.type]
    if isinstance(value, np.ndarray):
        return [list(value.shape), _dtype_name(value.dtype), order_of(value.strides), "cpu"]
    if isinstance(value, Mapping):
        return {str(name): identity(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [identity(item) for item in value]
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """A name as torch says it where torch has the dtype, so that arrays and tensors are alike."""
    has = dtype.isnative and isinstance(getattr(torch, dtype.name, None), torch.dtype)
    return f"torch.{dtype.name}" if has else f"numpy.{dtype}"


class FunctionRecord:
    """The record of a function for a key.

    Args:
        function: as written, without its configurations.
        name: its full name.
        key: as JSON has it.
        configs: those that it may use, the default first.
        device: CUDA device index, or ``CPU``.
        ranks: how many tune together.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        key: Any,
        configs: Sequence[Config],
        device: int,
        ranks: int,
    ) -> None:
        self.key, self.configs, self.device, self.ranks = key, list(configs), device, ranks
        self._identity = {
            "function": name,
            "source": _source_digest(function),
            "key": key,
            "configs": self.configs,
            "machine": _machine(device),
            "ranks": ranks,
        }
        folder = settings_module.current().cache_dir / "functions" / slug(name)
        self._path = folder / f"{digest16(self._identity)}.json"

    def read(self) -> Config | None:
        """The recorded pick; None where there is none, or the file is damaged."""
        try:
            pick = read_json(self._path)["pick"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return pick if pick in self.configs else None

    def write(self, result: FunctionResult) -> None:
        """Record a result.

        Raises:
            StoreError: the folder cannot be made, locked or written.
        """
        entries = [
            {"config": result.configs[timing.name], "outcome": timing.outcome.to_json()}
            | {name: finite(getattr(timing, name)) for name in FIGURES}
            for timing in result.timings
        ]
        environment = collect(max(self.device, 0), state=self.device != CPU).to_json()
        measured = {"pick": result.pick, "entries": entries, "environment": environment}
        with locked(self._path):
            write_json(self._path, {"schema": SCHEMA, **self._identity, **measured})


@functools.cache
def _machine(device: int) -> list[Any]:
    if device == CPU:
        return [platform.node(), platform.machine()]
    environment = collect(device, state=False)
    return [environment.gpu_name, environment.num_sms]


@functools.cache
def _source_digest(function: Callable[..., Any]) -> str:
    """Digest of the module of a function, which most often has its kernels, too; in a main program of it alone."""
    module: Any = sys.modules.get(function.__module__)
    try:
        return digest16(
            inspect.getsource(function if function.__module__ == "__main__" else module)
        )
    except (OSError, TypeError):  # typed in, or generated
        return digest16(function.__code__.co_code)
