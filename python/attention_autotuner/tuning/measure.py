"""Timing in this process, with torch: interleaved in random order, cold L2, paired rounds (MEASURING rules 2 to 5).

:class:`InProcessMeasurer` races entries in the caller's process; a search has a worker take the samples
(:mod:`.isolated`), which does the same without torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..core.problem import Problem
from ..operations.bindings import make_inputs, output_makers
from ..operations.shared.tensors import Inputs, Outputs, current_device
from . import tasks
from .devices import WARM_UP_SECONDS, WARM_UP_SIZE, Bytes, Device, workspace_on
from .entries import Entry
from .racing import SETTLED_ROUNDS, Race, Timing
from .rounds import FaultError, OnRound, run_rounds
from .rounds import classify as classify
from .sampling import Sampler, input_sets


class MakeInputs(Protocol):
    """Makes the inputs of a problem on the current CUDA device."""

    def __call__(self, problem: Problem, /, *, seed: int) -> Inputs:
        """The inputs of a seed."""


@dataclass(kw_only=True, eq=False)
class InProcessMeasurer:
    """Measures on the current CUDA device in this process.

    A kernel that kills the CUDA context takes the process's other CUDA work with it: entries not yet timed then carry
    :class:`~..core.outcome.Crashed`.

    Attributes:
        seed: of the inputs and of the order.
        cold: rotate input sets so that none is found in L2; False gives the warm figure, on one set.
        rounds: at least so many before a race may end because it is settled; more than ``MAX_ROUNDS`` raise that.
        rest: between rounds the GPU is left idle for so many times as long as a round took. A kernel that draws more
            power than the GPU may is then timed at the clocks of one that does not, whatever the host does meanwhile.
        on_round: called after each round with (rounds, names still in the race).
        inputs: makes the inputs of a problem from a seed.
        interrupted: the last measurement was cut short by Ctrl-C; its results are the best so far.
        race: the last race, for ratios between any two of its entries; None before the first.
    """

    seed: int = 0
    cold: bool = True
    rounds: int = SETTLED_ROUNDS
    rest: float = 0.0
    on_round: OnRound | None = None
    inputs: MakeInputs = make_inputs
    interrupted: bool = field(default=False, init=False)
    race: Race | None = field(default=None, init=False)

    def measure(
        self,
        problem: Problem,
        entries: Sequence[Entry],
        *,
        budget_seconds: float,
        keep: Collection[str] = (),
    ) -> list[Timing]:
        """Race the entries.

        Args:
            problem: makes the inputs.
            entries: in tie-breaking order, the default first.
            budget_seconds: wall time of the rounds; at least a few rounds are run whatever it is.
            keep: names that are timed in every round.

        Returns:
            One timing per entry, fastest first; entries that failed carry their outcome and come last.
        """
        device = TorchDevice(current_device())
        race = self.race = Race([entry.name for entry in entries], keep=keep, seed=self.seed)
        sampler = Sampler(device, *self._tensors(problem, device))
        self.interrupted = False
        try:
            device.warm_up()
            for entry in entries:
                failure = sampler.prepare(entry)
                if failure is not None:
                    race.fail(entry.name, failure)
            run_rounds(
                race,
                sampler.round,
                time.monotonic() + budget_seconds,
                rounds=self.rounds,
                rest=self.rest,
                on_round=self.on_round,
            )
        except KeyboardInterrupt:
            self.interrupted = True
        except FaultError as fault:  # of the whole process: no other entry can be timed in it
            for name in race.running:
                race.fail(name, fault.outcome)
        return race.results()

    def _tensors(self, problem: Problem, device: TorchDevice) -> tuple[list[Inputs], list[Outputs]]:
        workspace, makers = workspace_on(device), output_makers(problem, device.torch)
        first = self.inputs(problem, seed=self.seed)
        sets = input_sets(problem, device) if self.cold else 1
        inputs = [first, *(self.inputs(problem, seed=self.seed + i) for i in range(1, sets))]
        outputs = [
            Outputs(tensors={name: make() for name, make in makers.items()}, workspace=workspace)
            for _ in inputs
        ]
        return inputs, outputs


class TorchDevice:
    """A GPU, or the host for kernels that run there, driven through torch; work goes to its current stream.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch, self.index = device, device.index or 0
        self.name, self.num_sms, self.l2_bytes = device.type, 1, 0
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.name, self.num_sms = properties.name, properties.multi_processor_count
            self.l2_bytes = properties.L2_cache_size

    @property
    def stream(self) -> int:
        """See :class:`.devices.Device`, as with all methods."""
        if self.torch.type == "cpu":
            return 0
        return int(torch.cuda.current_stream(self.torch).cuda_stream)

    def empty(self, num_bytes: int) -> torch.Tensor:  # noqa: D102
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch)

    def address(self, buffer: torch.Tensor) -> int:  # noqa: D102
        return buffer.data_ptr()

    def fill(self, buffer: torch.Tensor, byte: int) -> None:  # noqa: D102
        buffer.fill_(byte)

    def put(self, buffer: torch.Tensor, data: Bytes) -> None:  # noqa: D102
        buffer.copy_(torch.from_numpy(data))

    def get(self, buffer: torch.Tensor) -> Bytes:  # noqa: D102
        return buffer.cpu().numpy()

    def copy(self, buffer: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return buffer.clone()

    def free_bytes(self) -> int:  # noqa: D102
        free, total = torch.cuda.mem_get_info(self.torch)
        return min(free, int(torch.cuda.get_per_process_memory_fraction(self.torch) * total))

    def release(self) -> None:  # noqa: D102
        torch.cuda.empty_cache()

    def synchronize(self) -> None:  # noqa: D102
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)

    def spin(self, cycles: int) -> None:  # noqa: D102
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch's own

    def event(self) -> torch.cuda.Event:  # noqa: D102
        return timing_event()

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:  # noqa: D102
        return float(start.elapsed_time(end)) * 1e3

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:  # noqa: D102
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def warm_up(self) -> None:  # noqa: D102
        warm_up()


class Tasks(tasks.Tasks):
    """Tasks in a process that has torch: those of a search with ``in_process=True``."""

    def device_on(self, index: int, memory_bytes: int | None) -> Device:
        """See :meth:`.tasks.Tasks.device_on`."""
        use_device(index, memory_bytes)
        return TorchDevice(torch.device("cuda", index))


def use_device(index: int, memory_bytes: int | None = None) -> None:
    """Make a GPU the current one and CUDA ready on it.

    Args:
        index: CUDA device index.
        memory_bytes: that tensors and workspaces of this process may take; None for all that is free.

    Raises:
        RuntimeError: this process cannot use the GPU.
    """
    torch.cuda.set_device(index)
    torch.cuda.synchronize()
    if memory_bytes is not None:
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total))


def timing_event() -> torch.cuda.Event:
    """An event that a graph records again at every replay, if it is recorded under capture."""
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]


def warm_up() -> None:
    """Multiply matrices until the clocks are at their sustained level."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (WARM_UP_SIZE, WARM_UP_SIZE)
    a = torch.randn(shape, dtype=torch.float16, device="cuda", generator=generator)
    b = torch.empty_like(a)
    end = time.monotonic() + WARM_UP_SECONDS
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(a, a, out=b)
        torch.cuda.synchronize()
