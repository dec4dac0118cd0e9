"""The tasks of a worker: they take what JSON holds, give that and outcomes, and say before each launch whose it is.

They run kernels and time them; what is right is for the caller to say, which has the reference (:mod:`.remote`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ..core.outcome import LaunchFailed, Outcome
from ..core.problem import Problem
from ..errors import ArtifactError
from ..operations.shared.launching import Outputs, bind
from ..serving.loader import LoadedKernel, load
from .devices import Device, Guarded, contiguous, copied, opened, read_inputs, workspace_on
from .entries import entry_of
from .rounds import Samples
from .rounds import classify as classify
from .sampling import Sampler, input_sets

Tell = Callable[[str | None, float | None], None]
SLOWEST_FLOPS = 1e13  # FLOP/s that any usable kernel reaches on a large problem; an H100 does 6e14
FIRST_LAUNCHES = 10  # of an entry that gets ready, with its first sample


class Tasks(ABC):
    """The work of one process on one GPU.

    Args:
        tell: told the name of the candidate that runs from now on, None where it may be any of several, and the seconds
            that its launches may need on a slow GPU, None while nothing is launched.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._kernel: LoadedKernel | None = None
        self._sampler: Sampler | None = None
        self._seconds = 0.0  # of a launch in the race

    @abstractmethod
    def device_on(self, index: int, memory_bytes: int | None) -> Device:
        """The CUDA device of an index, ready, with a bound of the memory that may be taken of it.

        Raises:
            RuntimeError: this process cannot use it.
        """

    def open(self, device: int, memory_bytes: int | None = None) -> None:
        """Begin on a CUDA device with so much of its memory."""
        self._device = self.device_on(device, memory_bytes)

    def load(self, library: Mapping[str, Any]) -> Outcome | dict[str, Any]:
        """Load the kernel that :meth:`launch` launches; answers what it and the GPU say of themselves."""
        self._tell(None, 0.0)  # what the library does when it is loaded may crash or hang as well
        try:
            kernel = load(Path(library["path"])).with_launch_knobs(library["launch_knobs"])
        except ArtifactError as error:
            return LaunchFailed(reason=str(error))
        self._tell(None, None)
        self._kernel = kernel
        device = self._device
        return {"info": asdict(kernel.info), "gpu_name": device.name, "num_sms": device.num_sms}

    def launch(
        self, problem: Mapping[str, Any], handed: Mapping[str, Any], repeats: int
    ) -> Outcome | list[str]:
        """Launch the loaded kernel several times on the same inputs, each time with outputs and workspace of its own.

        Args:
            problem: fields of the problem.
            handed: see :func:`.devices.read_inputs`; results go to the same file, as ``outputs`` says.
            repeats: how often.

        Returns:
            What was written beside: the outputs, the workspace. Or why it failed.
        """
        kernel, device = self._kernel, self._device
        if kernel is None:
            raise ValueError("no kernel was loaded")
        try:
            inputs = read_inputs(device, handed)
            runs = [Guarded(device, handed["outputs"]) for _ in range(repeats)]
            device.synchronize()
            self._tell(None, 0.0)  # the problems of checks are small
            kernel.prepare(device.index)
            for run in runs:
                bind(kernel, Problem(**problem), inputs, run.outputs)()
            device.synchronize()
            self._tell(None, None)
            data = opened(handed["path"])
            for name, place in handed["outputs"].items():
                for offset, run in zip(place["offsets"], runs, strict=True):
                    computed = run.read(name)
                    data[offset : offset + computed.size] = computed
            return sorted({name for run in runs for name in run.changed()})
        except (ArtifactError, MemoryError, RuntimeError) as error:
            return classify(error)

    def prepare(
        self,
        problem: Mapping[str, Any],
        handed: Mapping[str, Any],
        entries: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> dict[str, Outcome]:
        """Get the entries of a race ready.

        Args:
            problem: fields of the problem.
            handed: see :func:`.devices.read_inputs`; with ``outputs`` and, for steps, ``forward_outputs``.
            entries: name -> its library, or those of a step's forward and backward.

        Returns:
            Name -> outcome of the entries that failed.
        """
        self.release()
        asked, device = Problem(**problem), self._device
        self._seconds = asked.flops / SLOWEST_FLOPS
        inputs = [read_inputs(device, handed)]
        inputs += [copied(inputs[0]) for _ in range(1, input_sets(asked, device))]
        workspace, makers = workspace_on(device), self._makers(handed["outputs"])
        outputs = [
            Outputs(tensors={name: make() for name, make in makers.items()}, workspace=workspace)
            for _ in inputs
        ]
        self._sampler = Sampler(device, inputs, outputs)
        device.warm_up()
        failures = {}
        for name, libraries in entries.items():
            self._tell(name, FIRST_LAUNCHES * self._seconds)
            makers = self._makers(handed["forward_outputs"])
            failure = self._sampler.prepare(entry_of(name, libraries, asked, makers))
            if failure is not None:
                failures[name] = failure
        return failures

    def round(self, order: Sequence[str], alone: bool) -> Samples:
        """One sample of each entry, microseconds or an outcome; ``alone`` as :meth:`.Sampler.round` has it."""
        if self._sampler is None:
            raise ValueError("no race was prepared")
        self._tell(None, len(order) * self._seconds)
        return self._sampler.round(
            order, (lambda name: self._tell(name, self._seconds)) if alone else None
        )

    def release(self) -> None:
        """Give the memory of the last race back."""
        if self._sampler is not None:
            self._sampler = None
            self._device.release()

    def _makers(self, outputs: Mapping[str, Mapping[str, Any]]) -> dict[str, Callable[[], Any]]:
        """Functions that make the memory of outputs, by their names."""

        def make(shape: Sequence[int], itemsize: int) -> Any:
            memory = self._device.empty(prod(shape) * itemsize)
            return contiguous(self._device, memory, tuple(shape), itemsize, 0)

        return {
            name: partial(make, place["shape"], place["itemsize"])
            for name, place in outputs.items()
        }
