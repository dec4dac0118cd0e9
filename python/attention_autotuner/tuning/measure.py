"""Timing on the GPU: entries interleaved in random order, cold L2, paired rounds (MEASURING rules 2 to 5).

:class:`Sampler` takes samples of entries on the current device. :class:`InProcessMeasurer` races them in the caller's
process; a search has a worker take the samples (:mod:`.isolated`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch

from ..core.outcome import Crashed, Outcome
from ..core.problem import Problem
from ..errors import AttentionAutotunerError
from ..operations.bindings import make_inputs, make_outputs
from ..operations.shared.tensors import Inputs, Outputs, SharedWorkspace, current_device
from .entries import Entry
from .racing import SETTLED_ROUNDS, Race, Timing
from .rounds import FaultError, OnRound, Samples, run_rounds
from .verify import classify

WARM_UP_SECONDS = 0.4
WARM_UP_SIZE = 4096  # rows and columns of the GEMM that brings the clocks to their sustained level
GRAPH_BELOW_US = 50.0  # a launch from Python costs up to half of this, so shorter kernels are replayed from a graph
SAMPLE_US = 400.0  # one sample is the mean of as many launches as fill this
LEAST_US = 0.1  # that a launch is taken for, whatever its events say
MAX_LAUNCHES = 64  # of one sample
MAX_INPUT_SETS = 32
ROTATION_OVER_L2 = 3.0  # bytes of all sets over the L2's
MAX_MEMORY_SHARE = 0.5  # of the free device memory
HEAD_START_CYCLES = 400_000  # about 200 us: the host prepares a round's launches meanwhile
HEAD_START_CYCLES_A_SECOND = 3_000_000_000  # more than any clock, to cover what the host takes
MAX_HEAD_START_CYCLES = 60_000_000

T = TypeVar("T")


class InProcessMeasurer:
    """Measures on the current CUDA device in this process.

    A kernel that kills the CUDA context takes the process's other CUDA work with it: entries not yet timed then carry
    :class:`~..core.outcome.Crashed`.

    Args:
        seed: of the inputs and of the order.
        cold: rotate input sets so that none is found in L2; False gives the warm figure, on one set.
        rounds: at least so many before a race may end because it is settled; more than :data:`MAX_ROUNDS` raise that.
        rest: between rounds the GPU is left idle for so many times as long as a round took. A kernel that draws more
            power than the GPU may is then timed at the clocks of one that does not, whatever the host does meanwhile.
        on_round: called after each round with (rounds, names still in the race).

    Attributes:
        interrupted: the last measurement was cut short by Ctrl-C; its results are the best so far.
        race: the last race, for ratios between any two of its entries; None before the first.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        cold: bool = True,
        rounds: int = SETTLED_ROUNDS,
        rest: float = 0.0,
        on_round: OnRound | None = None,
    ) -> None:
        self._seed = seed
        self._cold = cold
        self._rounds = rounds
        self._rest = rest
        self._on_round = on_round
        self.interrupted = False
        self.race: Race | None = None

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
        race = self.race = Race([entry.name for entry in entries], keep=keep, seed=self._seed)
        sampler = Sampler(problem, seed=self._seed, cold=self._cold)
        self.interrupted = False
        try:
            warm_up()
            for entry in entries:
                failure = sampler.prepare(entry)
                if failure is not None:
                    race.fail(entry.name, failure)
            run_rounds(
                race,
                sampler.round,
                time.monotonic() + budget_seconds,
                rounds=self._rounds,
                rest=self._rest,
                on_round=self._on_round,
            )
        except KeyboardInterrupt:
            self.interrupted = True
        except FaultError as fault:  # of the whole process: no other entry can be timed in it
            for name in race.running:
                race.fail(name, fault.outcome)
        return race.results()


class Sampler:
    """Entries on the inputs of one problem, on the current CUDA device, and samples of them.

    Args:
        problem: makes the inputs.
        seed: of the inputs.
        cold: rotate through enough inputs that none is in the L2 cache.
    """

    def __init__(self, problem: Problem, *, seed: int = 0, cold: bool = True) -> None:
        self._inputs = _input_sets(problem, seed, cold)
        workspace = SharedWorkspace(current_device())
        self._outputs = [make_outputs(problem, workspace, current_device()) for _ in self._inputs]
        self._live: dict[str, _Prepared] = {}
        self._head_start = HEAD_START_CYCLES

    def prepare(self, entry: Entry) -> Outcome | None:
        """Prepare an entry and launch it for the first times; answers why it failed.

        Raises:
            FaultError: it took the context with it.
        """
        prepared = _attempt(_Prepared, entry, self._inputs, self._outputs)
        if not isinstance(prepared, Outcome):
            self._live[entry.name] = prepared
            return None
        if isinstance(prepared, Crashed):
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise FaultError(prepared, entry.name) from error
        return prepared

    def round(self, order: Sequence[str], alone: Callable[[str], None] | None = None) -> Samples:
        """Take one sample of each entry.

        Args:
            order: names of entries.
            alone: wait for each entry before the next, and call this with each name before it is run, so that a fault
                is known to be its. Otherwise there is one wait: the GPU stays busy from one entry to the next.

        Raises:
            FaultError: the context is lost.
        """
        results: dict[str, float | Outcome] = {}
        for names in [order] if alone is None else [[name] for name in order]:
            if alone is not None:
                alone(names[0])
            # Or samples would hold the time that the host takes to launch: what it took the last time is granted.
            torch.cuda._sleep(self._head_start)  # type: ignore[no-untyped-call]  # torch's own
            spinning = time.monotonic()
            failures = {name: _attempt(self._live[name].enqueue) for name in names}
            host_cycles = int((time.monotonic() - spinning) * HEAD_START_CYCLES_A_SECOND)
            self._head_start = min(max(HEAD_START_CYCLES, host_cycles), MAX_HEAD_START_CYCLES)
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                at = None if alone is None else names[0]
                raise FaultError(classify(error), at) from error
            for name, failure in failures.items():
                read = self._live[name].read_us
                results[name] = _attempt(read) if failure is None else failure
        return results


def _input_sets(problem: Problem, seed: int, cold: bool) -> list[Inputs]:
    """Enough input sets that a set has left the L2 when its turn comes again."""
    first = make_inputs(problem, seed=seed)
    if not cold:
        return [first]
    free, total = torch.cuda.mem_get_info()
    free = min(free, int(torch.cuda.get_per_process_memory_fraction() * total))
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    wanted = int(ROTATION_OVER_L2 * l2_bytes / problem.bytes_moved) + 2
    fits = int(MAX_MEMORY_SHARE * free / problem.bytes_moved)
    sets = max(1, min(wanted, fits, MAX_INPUT_SETS))
    return [first, *(make_inputs(problem, seed=seed + i) for i in range(1, sets))]


def launches_per_replay(once_us: float, sets: int) -> int:
    """Launches that one graph holds: whole rotations of the input sets, within :data:`SAMPLE_US` where that holds one.

    A set that came once more than the others would end a replay, begin the next one, and be read from L2 there.
    """
    return sets * max(1, int(min(float(MAX_LAUNCHES), SAMPLE_US / once_us) / sets))


class _Prepared:
    """An entry with its events, its launches a sample, and its graph where it has one, which holds the events too.

    A sample is then of the kernels alone, however long the launch of a graph takes.
    """

    def __init__(self, entry: Entry, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        entry.prepare(inputs, outputs)
        self._entry = entry
        self._sets = len(inputs)
        self._next = 0
        self._start = timing_event()
        self._end = timing_event()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._launches = 1
        for _ in range(3):  # module load, first launch and clock ramps stay outside
            self._launch()
        self._launches = 4
        self.enqueue()
        torch.cuda.synchronize()
        once = max(self.read_us(), LEAST_US)
        if once < GRAPH_BELOW_US:
            self._launches, self._next = launches_per_replay(once, self._sets), 0
            self._capture()
        else:
            self._launches = max(1, min(MAX_LAUNCHES, round(SAMPLE_US / once)))

    def enqueue(self) -> None:
        """Put one sample on the stream."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._sample()

    def read_us(self) -> float:
        """Microseconds of one launch in the last sample; the stream must have been waited for."""
        return float(self._start.elapsed_time(self._end)) * 1e3 / self._launches

    def _sample(self) -> None:
        self._start.record()
        for _ in range(self._launches):
            self._launch()
        self._end.record()

    def _launch(self) -> None:
        self._entry.run(self._next)
        self._next = (self._next + 1) % self._sets

    def _capture(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._sample()


def use_device(index: int, memory_bytes: int | None = None) -> str | None:
    """Make a GPU the current one and CUDA ready on it; answers the CUDA that torch was built with.

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
    return torch.version.cuda


def timing_event() -> torch.cuda.Event:
    """An event that a graph records again at every replay, if it is recorded under capture."""
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]


def _attempt(action: Callable[..., T], *arguments: Any) -> T | Outcome:
    """The result of an action, or the reason why it failed."""
    try:
        return action(*arguments)
    except (AttentionAutotunerError, RuntimeError) as error:
        return classify(error)


def warm_up(seconds: float = WARM_UP_SECONDS) -> None:
    """Multiply matrices until the clocks are at their sustained level."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (WARM_UP_SIZE, WARM_UP_SIZE)
    a = torch.randn(shape, dtype=torch.float16, device="cuda", generator=generator)
    b = torch.empty_like(a)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(a, a, out=b)
        torch.cuda.synchronize()


def free_memory() -> None:
    """Give memory that nothing uses any more back to the device."""
    torch.cuda.empty_cache()
