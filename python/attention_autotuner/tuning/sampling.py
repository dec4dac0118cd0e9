"""Samples of entries on a device: cold L2, graphs for short kernels (MEASURING rules 3 and 4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..core.outcome import Crashed, Outcome
from ..core.problem import Problem
from ..errors import AttentionAutotunerError
from ..operations.shared.launching import Inputs, Outputs
from .devices import Device
from .entries import Entry
from .rounds import FaultError, Samples, classify

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


class Sampler:
    """Entries on the inputs of one problem, and samples of them.

    Args:
        device: where the tensors are.
        inputs: sets that entries rotate through.
        outputs: of each set, shared by all entries.
    """

    def __init__(
        self, device: Device, inputs: Sequence[Inputs], outputs: Sequence[Outputs]
    ) -> None:
        self._device, self._inputs, self._outputs = device, inputs, outputs
        self._live: dict[str, _Prepared] = {}
        self._head_start = head_start(0.0)

    def prepare(self, entry: Entry) -> Outcome | None:
        """Prepare an entry and launch it for the first times; answers why it failed.

        Raises:
            FaultError: it took the context with it.
        """
        prepared = _attempt(_Prepared, self._device, entry, self._inputs, self._outputs)
        if not isinstance(prepared, Outcome):
            self._live[entry.name] = prepared
            return None
        if isinstance(prepared, Crashed):
            try:
                self._device.synchronize()
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
            self._device.spin(self._head_start)
            spinning = time.monotonic()
            failures = {name: _attempt(self._live[name].enqueue) for name in names}
            self._head_start = head_start(time.monotonic() - spinning)
            try:
                self._device.synchronize()
            except RuntimeError as error:
                at = None if alone is None else names[0]
                raise FaultError(classify(error), at) from error
            for name, failure in failures.items():
                read = self._live[name].read_us
                results[name] = _attempt(read) if failure is None else failure
        return results


def head_start(seconds: float) -> int:
    """Clock cycles that the GPU is kept busy for, where the host takes so long to launch a sample."""
    cycles = int(seconds * HEAD_START_CYCLES_A_SECOND)
    return min(max(HEAD_START_CYCLES, cycles), MAX_HEAD_START_CYCLES)


def launches_per_sample(once_us: float, sample_us: float = SAMPLE_US) -> int:
    """Launches that one sample is the mean of, given the time of one."""
    return max(1, min(MAX_LAUNCHES, round(sample_us / once_us)))


def input_sets(problem: Problem, device: Device) -> int:
    """So many input sets that a set has left the L2 when its turn comes again."""
    wanted = int(ROTATION_OVER_L2 * device.l2_bytes / problem.bytes_moved) + 2
    fits = int(MAX_MEMORY_SHARE * device.free_bytes() / problem.bytes_moved)
    return max(1, min(wanted, fits, MAX_INPUT_SETS))


def launches_per_replay(once_us: float, sets: int) -> int:
    """Launches that one graph holds: whole rotations of the input sets, within :data:`SAMPLE_US` where that holds one.

    A set that came once more than the others would end a replay, begin the next one, and be read from L2 there.
    """
    return sets * max(1, int(min(float(MAX_LAUNCHES), SAMPLE_US / once_us) / sets))


class _Prepared:
    """An entry with its events, its launches a sample, and its graph where it has one, which holds the events too.

    A sample is then of the kernels alone, however long the launch of a graph takes.
    """

    def __init__(
        self,
        device: Device,
        entry: Entry,
        inputs: Sequence[Inputs],
        outputs: Sequence[Outputs],
    ) -> None:
        entry.prepare(inputs, outputs)
        self._device = device
        self._entry = entry
        self._sets = len(inputs)
        self._next = 0
        self._start = device.event()
        self._end = device.event()
        self._replay: Callable[[], None] | None = None
        self._launches = 1
        for _ in range(3):  # module load, first launch and clock ramps stay outside
            self._launch()
        self._launches = 4
        self.enqueue()
        device.synchronize()
        once = max(self.read_us(), LEAST_US)
        if once < GRAPH_BELOW_US:
            self._launches, self._next = launches_per_replay(once, self._sets), 0
            self._replay = device.capture(self._sample)
        else:
            self._launches = launches_per_sample(once)

    def enqueue(self) -> None:
        """Put one sample on the stream."""
        (self._replay or self._sample)()

    def read_us(self) -> float:
        """Microseconds of one launch in the last sample; the stream must have been waited for."""
        return self._device.elapsed_us(self._start, self._end) / self._launches

    def _sample(self) -> None:
        self._start.record()
        for _ in range(self._launches):
            self._launch()
        self._end.record()

    def _launch(self) -> None:
        self._entry.run(self._next)
        self._next = (self._next + 1) % self._sets


def _attempt(action: Callable[..., T], *arguments: Any) -> T | Outcome:
    """The result of an action, or the reason why it failed."""
    try:
        return action(*arguments)
    except (AttentionAutotunerError, RuntimeError) as error:
        return classify(error)
