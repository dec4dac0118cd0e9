"""The tasks of a worker over kernels that run on the host: torch's CUDA is replaced where tasks and races touch it.

What a launch takes is what the library says (``-DTIME_US``), so that races end as they must on any machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from attention_autotuner.operations import bindings
from attention_autotuner.operations.shared.tensors import Inputs, Outputs
from attention_autotuner.tuning import measure, tasks, verify
from attention_autotuner.tuning.entries import Entry, KernelEntry

classify = verify.classify
LAUNCHES = 4  # before the rounds


class Prepared:
    """Replaces what times an entry by events."""

    def __init__(self, entry: Entry, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
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

    def open(self, device: int, memory_bytes: int | None = None) -> str | None:
        host: Any = lambda *arguments, **options: torch.device("cpu")  # noqa: E731  # of any signature
        nothing: Any = lambda *arguments: None  # noqa: E731
        for module in (bindings, measure, verify):
            vars(module)["current_device"] = host
        vars(measure)["_Prepared"] = Prepared
        vars(tasks)["warm_up"] = nothing
        torch.set_num_threads(1)  # the tensors are small, and tests share the cores
        properties = SimpleNamespace(L2_cache_size=0)
        vars(torch.cuda).update(
            _sleep=nothing,
            synchronize=nothing,
            set_device=nothing,
            empty_cache=nothing,
            current_device=lambda: 0,
            mem_get_info=lambda: (1 << 30, 1 << 30),
            get_per_process_memory_fraction=lambda: 1.0,
            get_device_properties=lambda device: properties,
        )
        super().open(device, memory_bytes)
        return f"cuda:{device}"
