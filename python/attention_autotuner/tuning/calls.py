"""A call of a tunable function, made again and again: on private arguments, compared with the reference, timed.

:class:`Tasks` are the tasks of a worker (:mod:`.worker`), or run in the caller's process.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..core.memo import Table
from ..core.outcome import Crashed, LaunchFailed, Ok, Outcome, Wrong
from . import rounds
from .function_values import compare, copied, leaves, narrowed, snapshot, write
from .measure import timing_event, use_device, warm_up
from .rounds import FaultError, Samples
from .sampling import LEAST_US, MAX_LAUNCHES, SAMPLE_US, head_start, launches_per_sample
from .tasks import Tell

CPU = -1  # in place of the index of a CUDA device
CPU_SAMPLE_US = 2000.0
FLUSH_OVER_L2 = 2
Config = Mapping[str, Any]

# A tunable function with a key -> its configuration there, and how it came to it.
Pins = dict[Any, Any]

_PINNED: Table[str, Pins] = Table("functions.pinned", bound=1)


@contextmanager
def pinned(pins: Pins) -> Iterator[None]:
    """Keep tunable functions that are called inside from searching.

    Args:
        pins: what they use. Those that are called and not in it use what they have without a search, and are added.
    """
    before = _PINNED.get("now")
    _PINNED.remember("now", pins)
    try:
        yield
    finally:
        _PINNED.pop("now", None)
        if before is not None:
            _PINNED.remember("now", before)


def pins() -> Pins | None:
    """The pins in force, for all threads: backward passes run in threads of torch's own."""
    return _PINNED.get("now")


@dataclass(eq=False)
class Call:
    """A call, and what is to be done around it in a search.

    Attributes:
        function: takes the arguments, and a configuration by name.
        signature: of the function without the configuration.
        arguments: by name, as the signature binds them.
        reset: names of parameters whose tensors, arrays or modules a call writes: zeroed before every call. They are
            compared like results.
        restore: the same, but their values are put back.
        reference: takes the arguments alone: what it returns and writes is right, and configurations that differ are
            rejected. It may be more exact: floating-point results of wider dtypes than the first configuration's are
            rounded to those. None: the first configuration that runs is right.
        tolerance: of a difference, over the largest magnitude of a tensor. None: 2 units in the last place of
            floating-point dtypes of at most 16 bits at that magnitude, 128 of others; Python's floats count as float32.
        bench: takes a function that makes one call, after what ``reset`` and ``restore`` ask for, and answers
            microseconds. None: on a GPU its own time with an empty L2 cache, else wall time; without the resetting.
        saved: what the arguments of ``restore`` get back.
    """

    function: Callable[..., Any]
    signature: inspect.Signature
    arguments: dict[str, Any]
    reset: Sequence[str] = ()
    restore: Sequence[str] = ()
    reference: Callable[..., Any] | None = None
    tolerance: float | None = None
    bench: Callable[[Callable[[], Any]], float] | None = None
    saved: dict[str, Any] = field(default_factory=dict)

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the arguments that a call writes."""
        return (*self.reset, *self.restore)

    @property
    def device(self) -> int:
        """The CUDA device of the first tensor that is on one, or -1."""
        values = leaves(self.arguments)
        on_gpu = (x.get_device() for x in values if isinstance(x, torch.Tensor) and x.is_cuda)
        return next(on_gpu, CPU)

    def apply(self, function: Callable[..., Any], **config: Any) -> Any:
        """The result of any function of the arguments."""
        bound = inspect.BoundArguments(self.signature, OrderedDict(self.arguments))
        return function(*bound.args, **bound.kwargs, **config)

    def private(self) -> Call:
        """The same call on copies of its tensors, arrays and modules."""
        arguments = pytree.tree_map(copied, self.arguments)
        saved = {name: pytree.tree_map(copied, arguments[name]) for name in self.restore}
        return replace(self, arguments=arguments, saved=saved)

    def begin(self) -> None:
        """Put the arguments that are written into the state that a call finds them in."""
        for name in self.written:
            targets = leaves(self.arguments[name])
            sources = leaves(self.saved[name]) if name in self.saved else [None] * len(targets)
            for target, source in zip(targets, sources, strict=True):
                write(name, target, source)

    def run(self, config: Config) -> Any:
        """Call the function; tunable functions in it do not search."""
        with pinned(_PINNED.get("now", {})):
            return self.apply(self.function, **config)

    def results(self, config: Config | None) -> dict[str, Any]:
        """Copies of all that a call returns and writes: of the reference where there is no configuration.

        What it writes is there by its parameter's name, what it returns by ``return``, which no parameter can have.
        """
        torch.manual_seed(0)
        self.begin()
        if config is None and self.reference is not None:
            returned = self.apply(self.reference)
        else:
            returned = self.run(config or {})
        written = {name: self.arguments[name] for name in self.written}
        return {name: snapshot(value) for name, value in {"return": returned, **written}.items()}


def classify(error: BaseException) -> Outcome:
    """The outcome that an exception of a call stands for; one of Python alone has harmed nothing, unless it exits."""
    outcome = rounds.classify(error)
    exits = not isinstance(error, Exception)
    harmless = isinstance(outcome, Crashed) and not (exits or isinstance(error, RuntimeError))
    return LaunchFailed(reason=outcome.reason) if harmless else outcome


class Tasks:
    """The work on one call of one function; see :class:`.tasks.Tasks` for ``tell``."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._device = CPU
        self._loaded: tuple[Any, Call] | None = None
        self._expected: tuple[Config | None, dict[str, Any]] | None = None
        self._configs: dict[str, Config] = {}
        self._launches: dict[str, int] = {}
        self._us: dict[str, float] = {}
        self._head_start = head_start(0.0)
        self._flush: torch.Tensor | None = None

    def open(self, device: int, memory_bytes: int | None = None) -> None:
        """Begin on a CUDA device, or on the CPU."""
        self._device = device
        if device != CPU:
            use_device(device, memory_bytes)

    def check(self, call: Any, name: str, config: Config, against: Config | None) -> Outcome:
        """Compare what a configuration computes with the reference.

        Args:
            call: a :class:`Call`, or one as :func:`Tunable <.functions.Tunable>` writes it.
            name: of the configuration.
            config: the configuration.
            against: the configuration whose results are right where the call has no reference; None where there is
                none yet, and it has but to run.
        """
        self._tell(name, None)  # it may compile
        try:
            private = self._private(call)
            results = private.results(config)
            self._wait(name)
            if private.reference is None and against is None:
                return Ok()
            if against is None or self._expected is None or self._expected[0] != against:
                self._expected = (against, self._right(private, against, results))
                self._wait(name)
        except Exception as error:  # noqa: BLE001  # the function is the user's
            return self._failed(name, error)
        reason = compare(results, self._expected[1], private.tolerance)
        what = "the reference" if private.reference is not None else f"configuration {against}"
        return Wrong(reason=f"it differs from {what}: {reason}") if reason else Ok()

    def prepare(
        self,
        call: Any,
        seed: int,
        entries: Mapping[str, Config],
        agreed: Callable[[float], float] = float,
    ) -> dict[str, Outcome]:
        """Get configurations ready for rounds; answers name -> outcome of those that failed.

        Args:
            call: see :meth:`check`.
            seed: of whatever the function draws from torch's generators.
            entries: name -> configuration.
            agreed: the time of a launch that counts, given this process's own, microseconds.
        """
        private, self._expected = self._private(call), None
        self._configs = dict(entries)
        self._us, failures = {}, {}
        torch.manual_seed(seed)
        if self._device != CPU:
            l2_bytes = torch.cuda.get_device_properties(self._device).L2_cache_size
            self._flush = torch.empty(FLUSH_OVER_L2 * l2_bytes, dtype=torch.int8, device="cuda")
            warm_up()
        sample_us = CPU_SAMPLE_US if self._device == CPU else SAMPLE_US
        for name, config in entries.items():
            self._tell(name, None)
            self._launches[name] = 1
            try:
                private.begin()
                private.run(config)
                once = max(agreed(self._sample(private, name)), LEAST_US)
            except Exception as error:  # noqa: BLE001  # the function is the user's
                failures[name] = self._failed(name, error)
                continue
            self._us[name] = once
            self._launches[name] = launches_per_sample(once, sample_us)
        return failures

    def round(self, order: Sequence[str], alone: bool) -> Samples:
        """One sample of each, microseconds or an outcome; each is waited for by itself, ``alone`` or not."""
        if self._loaded is None:
            raise ValueError(f"no race was prepared, with alone={alone}")
        samples: dict[str, float | Outcome] = {}
        for name in order:
            self._tell(name, MAX_LAUNCHES * self._us[name] * 1e-6)
            try:
                samples[name] = self._sample(self._loaded[1], name)
            except Exception as error:  # noqa: BLE001  # the function is the user's
                samples[name] = self._failed(name, error)
        return samples

    def release(self) -> None:
        """Give the memory of the call back."""
        self._loaded = self._expected = self._flush = None
        if self._device != CPU:
            torch.cuda.empty_cache()

    def _private(self, call: Any) -> Call:
        if self._loaded is None or self._loaded[0] != call:
            self._loaded = (call, (call if isinstance(call, Call) else _read(call)).private())
        return self._loaded[1]

    def _right(self, call: Call, against: Config | None, results: dict[str, Any]) -> dict[str, Any]:
        """The results that are right, given those of the configuration under check."""
        if call.reference is None:
            return call.results(against)
        typical = results if against is None else call.results(against)
        expected: dict[str, Any] = narrowed(call.results(None), typical)
        return expected

    def _failed(self, name: str, error: Exception) -> Outcome:
        if isinstance(error, FaultError):
            raise error
        self._wait(name)
        return classify(error)

    def _wait(self, name: str) -> None:
        if self._device != CPU:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise FaultError(classify(error), name) from error

    def _sample(self, call: Call, name: str) -> float:
        """Microseconds of a launch: with the L2 flushed before each, and without what puts the arguments right."""
        config, launches = self._configs[name], self._launches[name]
        if call.bench is not None:

            def whole() -> Any:
                call.begin()
                return call.run(config)

            return float(call.bench(whole))
        if self._device == CPU:
            seconds = 0.0
            for _ in range(launches):
                call.begin()
                began = time.perf_counter()
                call.run(config)
                seconds += time.perf_counter() - began
            return seconds * 1e6 / launches
        assert self._flush is not None
        events = [(timing_event(), timing_event()) for _ in range(launches)]
        torch.cuda._sleep(self._head_start)  # type: ignore[no-untyped-call]  # torch's own
        began = time.monotonic()
        for start, end in events:
            self._flush.zero_()
            call.begin()
            start.record()
            call.run(config)
            end.record()
        self._head_start = head_start(time.monotonic() - began)
        self._wait(name)
        return sum(float(start.elapsed_time(end)) for start, end in events) * 1e3 / launches


def _read(crossed: Mapping[str, Any]) -> Call:
    """The call that :func:`Tunable <.functions.Tunable>` wrote, of the function as imported here."""
    sys.path[:] = crossed["path"]
    module = importlib.import_module(crossed["module"])
    tunable = operator.attrgetter(crossed["name"])(module)
    # The file is written by the caller, for us alone.
    arguments = torch.load(crossed["file"], weights_only=False)
    call: Call = tunable.call(arguments)
    return call
