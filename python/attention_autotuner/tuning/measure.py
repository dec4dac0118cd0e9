"""Timing on the GPU: entries interleaved in random order, cold L2, paired rounds (MEASURING rules 2 to 5).

An *entry* is anything with a name that can be prepared for a list of inputs and then run on one of them: a kernel of
ours (:class:`KernelEntry`, which holds only a path and a name, so that a worker process could be sent it), a forward
and a backward kernel as one step (:class:`StepEntry`), or a peer. :class:`InProcessMeasurer` measures in the caller's
process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ..core.outcome import Outcome
from ..core.problem import Problem
from ..errors import AttentionAutotunerError
from ..operations.bindings import make_inputs, make_outputs, ways_of
from ..operations.params import field_names
from ..operations.shared.tensors import Inputs, Outputs, SharedWorkspace, bind, current_device
from ..serving import loader
from .racing import SETTLED_ROUNDS, Race, Timing
from .verify import classify

WARM_UP_SECONDS = 0.4
WARM_UP_SIZE = 4096  # rows and columns of the GEMM that brings the clocks to their sustained level
GRAPH_BELOW_US = 50.0  # a launch from Python costs up to half of this, so shorter kernels are replayed from a graph
SAMPLE_US = 400.0  # one sample is the mean of as many launches as fill this
MAX_LAUNCHES = 64  # of one sample
MAX_INPUT_SETS = 32
ROTATION_OVER_L2 = 3.0  # bytes of all sets over the L2's
MAX_MEMORY_SHARE = 0.5  # of the free device memory
MIN_ROUNDS = 4
MAX_ROUNDS = 200
HEAD_START_CYCLES = 400_000  # about 200 us: the host prepares a round's launches meanwhile
HEAD_START_CYCLES_A_SECOND = 3_000_000_000  # more than any clock, to cover what the host takes
MAX_HEAD_START_CYCLES = 60_000_000

T = TypeVar("T")


class Entry(Protocol):
    """Something to time."""

    @property
    def name(self) -> str:
        """Unique in a measurement."""

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Load what is needed; called once, outside any timing.

        Args:
            inputs: the sets that :meth:`run` will be asked for.
            outputs: memory for each set's results and for workspaces, shared by all entries; a peer that allocates its
                own leaves it.
        """

    def run(self, index: int) -> None:
        """Enqueue the work on the current stream for input set ``index``, without synchronising."""


@dataclass
class KernelEntry:
    """A built kernel of ours; what is timed is the whole launch, with all that it enqueues.

    Attributes:
        name: the candidate's name.
        path: the library, or the folder that holds it.
        problem: what it computes.
        launch_knobs: that it is launched with.
    """

    name: str
    path: Path
    problem: Problem
    launch_knobs: Mapping[str, int] = field(default_factory=dict)
    _launches: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Load the library and bind one launch per input set."""
        kernel = loader.load(self.path).with_launch_knobs(self.launch_knobs)
        kernel.prepare(torch.cuda.current_device())
        self._launches = [
            bind(kernel, self.problem, read_set, memory)
            for read_set, memory in zip(inputs, outputs, strict=True)
        ]

    def run(self, index: int) -> None:
        """Launch on the current stream."""
        self._launches[index]()


class StepEntry:
    """A forward and a backward kernel of ours, one after the other on the same tensors, as in training.

    Args:
        name: how it is reported.
        forward, backward: the libraries, or the folders that hold them.
        problem: the backward problem; measured on its inputs.
        launch_knobs: of both.
    """

    def __init__(
        self,
        *,
        name: str,
        forward: Path,
        backward: Path,
        problem: Problem,
        launch_knobs: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {}),
    ) -> None:
        self.name = name
        self._forward = KernelEntry(
            name=name,
            path=forward,
            problem=replace(problem, direction="forward", deterministic=False),
            launch_knobs=launch_knobs[0],
        )
        self._backward = KernelEntry(
            name=name, path=backward, problem=problem, launch_knobs=launch_knobs[1]
        )

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Load both; the forward writes what the backward reads of it, or else memory of its own."""
        forward = self._forward.problem
        shapes = ways_of(forward)[0].output_shapes(forward)
        names = set(field_names(forward))
        read, written = [], []
        for read_set, memory in zip(inputs, outputs, strict=True):
            tensors = {n: t for n, t in read_set.tensors.items() if n in names and n not in shapes}
            scalars = {n: value for n, value in read_set.scalars.items() if n in names}
            read.append(Inputs(tensors=tensors, scalars=scalars))
            made = {
                name: torch.empty(shape, dtype=dtype, device=read_set.q.device)
                if name not in read_set.tensors
                else read_set.tensors[name]
                for name, (shape, dtype) in shapes.items()
            }
            written.append(Outputs(tensors=made, workspace=memory.workspace))
        self._forward.prepare(read, written)
        self._backward.prepare(inputs, outputs)

    def run(self, index: int) -> None:
        """Launch both on the current stream."""
        self._forward.run(index)
        self._backward.run(index)


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
        on_round: Callable[[int, list[str]], None] | None = None,
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
        inputs = self._inputs(problem)
        workspace = SharedWorkspace(current_device())
        outputs = [make_outputs(problem, workspace, current_device()) for _ in inputs]
        live: dict[str, _Prepared] = {}
        self.interrupted = False
        try:
            warm_up()
            for entry in entries:
                prepared = _attempt(_Prepared, entry, inputs, outputs)
                if isinstance(prepared, Outcome):
                    race.fail(entry.name, prepared)
                else:
                    live[entry.name] = prepared
            self._run(race, live, budget_seconds)
        except KeyboardInterrupt:
            self.interrupted = True
        return race.results()

    def _run(self, race: Race, live: dict[str, _Prepared], budget_seconds: float) -> None:
        deadline = time.monotonic() + budget_seconds
        head_start = HEAD_START_CYCLES
        while race.running and race.rounds < max(MAX_ROUNDS, self._rounds):
            times: dict[str, float] = {}
            began = time.monotonic()
            # Or samples would hold the time that the host takes to launch: what it took the last time is granted.
            torch.cuda._sleep(head_start)  # type: ignore[no-untyped-call]  # torch's own
            spinning = time.monotonic()
            for name in race.order():
                failure = _attempt(live[name].enqueue)
                if isinstance(failure, Outcome):
                    race.fail(name, failure)
            host_cycles = int((time.monotonic() - spinning) * HEAD_START_CYCLES_A_SECOND)
            head_start = min(max(HEAD_START_CYCLES, host_cycles), MAX_HEAD_START_CYCLES)
            # One wait a round: the GPU stays busy from one entry to the next.
            try:
                torch.cuda.synchronize()
                took = time.monotonic() - began
                times = {name: live[name].read_us() for name in race.running}
            except RuntimeError as error:
                for name in race.running:
                    race.fail(name, classify(error))
                return
            race.add(times)
            if self._on_round is not None:
                self._on_round(race.rounds, race.running)
            over = time.monotonic() > deadline and race.balanced
            if race.rounds >= MIN_ROUNDS and (over or race.settled(min_rounds=self._rounds)):
                return
            if self._rest > 0.0:
                time.sleep(self._rest * took)

    def _inputs(self, problem: Problem) -> list[Inputs]:
        """Enough input sets that a set has left the L2 when its turn comes again."""
        first = make_inputs(problem, seed=self._seed)
        if not self._cold:
            return [first]
        free, _ = torch.cuda.mem_get_info()
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        wanted = int(ROTATION_OVER_L2 * l2_bytes / problem.bytes_moved) + 2
        fits = int(MAX_MEMORY_SHARE * free / problem.bytes_moved)
        sets = max(1, min(wanted, fits, MAX_INPUT_SETS))
        return [first, *(make_inputs(problem, seed=self._seed + i) for i in range(1, sets))]


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
        self._start = _timing_event()
        self._end = _timing_event()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._launches = 1
        for _ in range(3):  # module load, first launch and clock ramps stay outside
            self._launch()
        self._launches = 4
        self.enqueue()
        torch.cuda.synchronize()
        once = self.read_us()
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


def use_device(index: int) -> None:
    """Make a GPU the current one; for the worker, which torch stays out of until it has its request."""
    torch.cuda.set_device(index)


def _timing_event() -> torch.cuda.Event:
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
