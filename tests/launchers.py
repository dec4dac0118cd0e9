"""Loaded kernels as the verifier launches them, without a worker: in this process, in torch's memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning import tasks
from attention_autotuner.tuning import verify as verifying
from attention_autotuner.tuning.devices import Device
from attention_autotuner.tuning.measure import TorchDevice
from attention_autotuner.tuning.remote import RemoteKernel


class _Tasks(tasks.Tasks):
    """The tasks of a worker that has a kernel loaded already."""

    def __init__(self, kernel: Any, device: torch.device) -> None:
        super().__init__(lambda name, seconds: None)
        self._kernel = kernel
        self._device = self.device = TorchDevice(device)

    def device_on(self, index: int, memory_bytes: int | None) -> Device:
        return self.device

    def call(self, task: str, **arguments: Any) -> Any:
        return getattr(self, task)(**arguments)


def launcher(kernel: Any, device: torch.device) -> RemoteKernel:
    """A kernel, or what behaves as one, that is launched on a device, which may be the CPU."""
    made = _Tasks(kernel, device)
    described = {
        "info": asdict(kernel.info),
        "gpu_name": made.device.name,
        "num_sms": made.device.num_sms,
    }
    return RemoteKernel(made.call, described, device)


def verify(problem: Problem, kernel: Any, *, device: torch.device, **options: Any) -> Outcome:
    """The outcome of the verifier, whose options these are."""
    return verifying.verify(problem, launcher(kernel, device), device=device, **options)
