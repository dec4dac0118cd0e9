"""Tuning of any Python function: the fastest of its configurations, found by the first call for a kind of arguments."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import operator
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from .. import settings as settings_module
from ..core.identity import digest16
from ..core.memo import Table
from ..errors import NotWarmError, UnsupportedArgumentError
from . import calls
from .calls import CPU, Call, Config, pinned
from .function_options import TunableMethod, check_function, check_options, plain_configs
from .function_records import FunctionRecord, identity
from .function_search import FunctionResult, FunctionSearch, named, print_ranking
from .function_values import crossing
from .isolated import InProcess
from .printing import LinePrinter
from .progress import Progress
from .ranks import Ranks
from .worker import Worker

LOGGER = logging.getLogger(__name__)
MANY_KEYS = 32  # of one function in one process: most likely not meant
OWN = {"config", "autotune", "verbose"}  # arguments of every tunable function
R = TypeVar("R")

_WORKERS: Table[int, Worker] = Table("functions.workers")
_lock = threading.RLock()  # one search at a time: it pins functions for all threads


def autotune(
    configs: Sequence[Config] | Mapping[str, Sequence[Any]], **options: Any
) -> Callable[[Callable[..., R]], Tunable[R]]:
    """Decorate a function that takes some of its arguments from the fastest of several configurations.

    The first call for a kind of arguments searches, on copies of them; the pick is recorded in the cache folder. Where
    the setting ``MODE`` is ``off`` or ``EFFORT`` is ``none``, no call searches.

    Args:
        configs: configurations, each a mapping from names of the function's parameters to numbers, strings, booleans or
            None; or the values of each, of which all combinations are tried. The first is the default.
        options: those of :class:`~attention_autotuner.tuning.functions.Tunable`.

    Raises:
        UnsupportedArgumentError: the configurations do not fit the function, or each other; there is no such option, or
            its value is not allowed; or the function has no name.
    """
    return lambda function: Tunable(function, configs, **options)


@dataclass(kw_only=True)
class _Pin:
    """The configuration that a function uses for a key while others are tuned, and what is known of it."""

    config: Config
    record: FunctionRecord


class Tunable(Generic[R]):
    """A function with configurations. Calls take its arguments and a few more.

    Args:
        function: takes a configuration's values as keyword arguments.
        configs: see :func:`attention_autotuner.autotune`.
        key: what a configuration is chosen for: names of parameters, or a function of the arguments; all arguments by
            default. Of floats and objects the type counts, of tensors and arrays shape, dtype, order of strides and
            kind of device.
        prune: called with a configuration and the arguments; False leaves it out.
        collective: calls communicate, so that all ranks of ``group`` make them at the same time.
        budget_seconds: wall time of a search; None takes the setting.
        of_call: ``reset``, ``restore``, ``reference``, ``tolerance`` and ``bench`` of
            :class:`~attention_autotuner.tuning.calls.Call`.
    """

    def __init__(
        self,
        function: Callable[..., R],
        configs: Sequence[Config] | Mapping[str, Sequence[Any]],
        *,
        key: Sequence[str] | Callable[..., Any] | None = None,
        prune: Callable[..., bool] | None = None,
        collective: bool = False,
        budget_seconds: float | None = None,
        **of_call: Any,
    ) -> None:
        check_function(function)
        self.__qualname__: str
        self.name = f"{function.__module__}.{function.__qualname__}"
        functools.update_wrapper(self, function)
        self.function, self.configs = function, plain_configs(self.name, configs)
        self._key_of, self._prune = key, prune
        self._collective, self._budget_seconds = collective, budget_seconds
        parameters = inspect.signature(function).parameters
        names = set(itertools.chain.from_iterable(self.configs))
        rest = [p for p in parameters.values() if p.name not in names]
        options: dict[str, Any] = {"key": key, "prune": prune, "collective": collective}
        options["budget_seconds"] = budget_seconds
        check_options("autotune", self.name, options, of_call, parameters, [p.name for p in rest])
        self._call = Call(function, inspect.Signature(rest), {}, **of_call)
        free = any(p.kind is p.VAR_KEYWORD for p in rest)
        for wrong, why in (
            (not names, "there is none"),
            (any(set(config) != names for config in self.configs), "all need the same names"),
            (len(named(self.configs)) < len(self.configs), "one is there twice"),
            (not (free or names <= set(parameters)), f"it takes {', '.join(parameters)}"),
            (OWN & set(parameters), f"{sorted(OWN)} are arguments of every tunable function"),
        ):
            if wrong:
                listed = f"configurations {self.configs}"
                raise UnsupportedArgumentError(f"{listed} of {self.name}: {why}")
        # By key and ranks: what prune left and the pick of it, from the most to the fewest.
        self._known: dict[tuple[str, int], list[tuple[list[Config], Config]]] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else TunableMethod(self, instance)

    def __reduce__(self) -> str:
        return self.__qualname__  # as functions are pickled and copied

    def __call__(
        self,
        *args: Any,
        config: Config | None = None,
        autotune: bool = True,
        verbose: bool = False,
        group: Any = None,
        **kwargs: Any,
    ) -> R:
        """Call the function.

        Args:
            *args: the function's positional arguments.
            config: the configuration to use; nothing is searched or looked up then.
            autotune: search if need be; else what is recorded serves, or the default.
            verbose: print progress and ranking of a search on stderr.
            group: a ``torch.distributed`` process group whose ranks all make this call and search together; a function
                with a parameter of this name gets it, too.
            **kwargs: the function's arguments by name.

        Raises:
            UnsupportedArgumentError: ``config`` is no mapping, or has other names; or ``prune`` leaves nothing.
            NoCandidateError: no configuration runs and is right; the message tabulates why.
            NotWarmError: a CUDA graph is being captured, and nothing is known yet.
            DistributedError: another rank of the group failed, is gone, or does something else.
            StoreError, ArtifactError: the cache cannot be written; the process that makes the calls does not start.
        """
        call = self._bound(args, kwargs, group)
        if config is None:
            config = self._choose(call, autotune, verbose, group)
        elif not isinstance(config, Mapping) or set(config) != set(self.configs[0]):  # type: ignore[redundant-expr]
            raise UnsupportedArgumentError(
                f"config={config!r} of {self.name}: it needs {', '.join(self.configs[0])}"
            )
        result: R = call.apply(self.function, **config)
        return result

    def tune(
        self, *args: Any, verbose: bool = False, group: Any = None, **kwargs: Any
    ) -> FunctionResult:
        """Search for the configuration of a call without making it, or find the one that is recorded.

        Arguments and errors are those of a call.
        """
        return self._tuned(self._bound(args, kwargs, group), verbose, group)

    def call(self, arguments: dict[str, Any]) -> Call:
        """A call with arguments by name, and what is to be done around it in a search."""
        return replace(self._call, arguments=arguments)

    def _bound(self, args: Any, kwargs: dict[str, Any], group: Any) -> Call:
        if "group" in self._call.signature.parameters:
            kwargs["group"] = group
        bound = self._call.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.call(dict(bound.arguments))

    def _key(self, call: Call) -> Any:
        if callable(self._key_of):
            return identity(call.apply(self._key_of))
        names = call.arguments if self._key_of is None else self._key_of
        return identity({name: call.arguments[name] for name in names})

    def _is_legal(self, call: Call, config: Config) -> bool:
        return self._prune is None or bool(call.apply(functools.partial(self._prune, config)))

    def _record(self, call: Call, key: Any, group: Any) -> FunctionRecord:
        legal = [config for config in self.configs if self._is_legal(call, config)]
        if not legal:
            raise UnsupportedArgumentError(
                f"prune leaves no configuration of {self.name} for {key}"
            )
        return FunctionRecord(self.function, self.name, key, legal, call.device, _size(group))

    def _choose(self, call: Call, autotune: bool, verbose: bool, group: Any) -> Config:
        key, pins = self._key(call), calls.pins()
        digest = digest16(key)
        picks = self._known.get((digest, _size(group)), ())
        known = next((pick for _, pick in picks if self._is_legal(call, pick)), None)
        pin: _Pin | None = None if pins is None else pins.get((self, digest))
        if pins is None:
            settings = settings_module.current()
            searches = settings.mode not in ("off", "frozen") and settings.effort != "none"
            if known is None and autotune and searches:
                result = self._tuned(call, verbose, group)
                if result.interrupted:
                    raise KeyboardInterrupt  # of the caller's program, whatever is searched
                return result.pick
            if known is not None:
                return known
        elif pin is not None and self._is_legal(call, pin.config):
            return pin.config
        record = self._record(call, key, group)
        known = known or record.read() or record.configs[0]
        if pins is not None and pin is None:
            pins[self, digest] = _Pin(config=known, record=record)
        return known

    def _keep(self, record: FunctionRecord, result: FunctionResult) -> None:
        if result.status == "measured" and not result.interrupted:
            record.write(result)
        where = digest16(record.key), record.ranks
        others = [held for held in self._known.get(where, ()) if held[0] != record.configs]
        held = [(record.configs, result.pick), *others]
        self._known[where] = sorted(held, key=lambda left: -len(left[0]))
        if len(self._known) == MANY_KEYS:
            LOGGER.warning("%s was tuned for %d keys: is `key` too fine?", self.name, MANY_KEYS)

    def _tuned(self, call: Call, verbose: bool, group: Any) -> FunctionResult:
        key = self._key(call)
        record = self._record(call, key, group)
        if call.device != CPU and torch.cuda.is_current_stream_capturing():
            raise NotWarmError(f"{self.name} is not tuned for {key}, and a graph is being captured")
        with _lock, ExitStack() as stack:
            ranks = None if group is None else stack.enter_context(Ranks(group))
            pick = None if settings_module.current().always_tune else record.read()
            if ranks is not None:
                ranks.agree("functions and arguments", [self.name, key, record.configs])
                picks = ranks.exchange("record", pick)
                pick = pick if picks == [pick] * len(picks) else None
            configs = named(record.configs)
            if pick is not None:
                result = FunctionResult(
                    self.name, key, "recorded", pick, record.configs[0], configs, ()
                )
            else:
                runner, asked = stack.enter_context(self._runner(call))
                progress = _progress(verbose, self._budget_seconds, ranks)
                result = FunctionSearch(
                    runner, asked, configs, progress, ranks, collective=self._collective
                ).run(self.name, key)
            self._keep(record, result)
        if verbose and (ranks is None or ranks.rank == 0):
            print_ranking(result)
        return result

    @contextmanager
    def _runner(self, call: Call) -> Iterator[tuple[Worker | InProcess, Any]]:
        """The maker of the calls, and the call as it takes it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "arguments.pt")
            why, in_process = "", self._collective or settings_module.current().in_process
            if not in_process and (why := self._cross(call, path)):
                LOGGER.warning(
                    "%s is tuned in this process, which a configuration that faults ends: %s",
                    self.name,
                    why,
                )
            if in_process or why:
                with _own_draws(call.device):
                    yield InProcess(call.device, tasks=calls.__name__), call
                return
            if call.device not in _WORKERS:
                _WORKERS.remember(call.device, Worker(call.device, tasks=calls.__name__))
            _WORKERS[call.device].memory_bytes = settings_module.current().memory_bytes
            where = {"module": self.__module__, "name": self.__qualname__}
            try:
                yield _WORKERS[call.device], where | {"path": sys.path, "file": str(path)}
            finally:
                _WORKERS[call.device].stop()  # its memory is the function's; the server stays

    def _cross(self, call: Call, path: Path) -> str:
        """Write the arguments for another process; answers why there can be none, or nothing."""
        if self.__module__ == "__main__":
            return "it is defined in the main program, which cannot be imported"
        try:
            if operator.attrgetter(self.__qualname__)(sys.modules[self.__module__]) is not self:
                return f"{self.name} is something else"
            torch.save(crossing(call.arguments), path)
        except Exception as error:  # noqa: BLE001  # whatever pickling the arguments raises
            return f"{type(error).__name__}: {error}"
        return ""


def tune_together(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget_seconds: float | None = None,
    verbose: bool = False,
    group: Any = None,
    **of_call: Any,
) -> list[FunctionResult]:
    """Tune the tunable functions that another function calls by the time of the whole, one after the other.

    Each is raced with the others at their best so far, on copies of the arguments, in this process. The picks are
    recorded as if each function had been tuned by itself.

    Args:
        function: calls tunable functions, and may have side effects on its arguments.
        args: its positional arguments.
        kwargs: its arguments by name.
        budget_seconds: wall time for each of them; None takes the setting.
        verbose: print progress and rankings on stderr.
        group: process group whose ranks all make this call, and all calls of the function at the same time.
        of_call: ``reset``, ``restore``, ``reference``, ``tolerance`` and ``bench`` of
            :class:`~attention_autotuner.tuning.calls.Call`, of the arguments of ``function``.

    Returns:
        A result for each function and key, in the order of their first calls.

    Raises:
        UnsupportedArgumentError: it calls no tunable function, or an option is not allowed.
        NoCandidateError, DistributedError, StoreError: as a call of a tunable function.
    """
    if not callable(function):
        raise UnsupportedArgumentError(f"tune_together takes a function, got {function!r}")
    signature = inspect.signature(function)
    takes = list(signature.parameters)
    options = {"budget_seconds": budget_seconds}
    check_options("tune_together", repr(function), options, of_call, takes, takes)
    bound = signature.bind(*args, **(kwargs or {}))
    bound.apply_defaults()
    call = Call(function, bound.signature, dict(bound.arguments), **of_call)
    pins: dict[tuple[Tunable[Any], str], _Pin] = {}
    results = []
    with _lock, _own_draws(call.device), ExitStack() as stack:
        ranks = None if group is None else stack.enter_context(Ranks(group))
        with pinned(pins):
            call.private().results({})
        if not pins:
            raise UnsupportedArgumentError(f"{function!r} calls no tunable function")
        for unit, pin in list(pins.items()):

            def invoke(*args: Any, unit: Any = unit, chosen: Config, **kwargs: Any) -> Any:
                with pinned({**pins, unit: replace(pins[unit], config=chosen)}):
                    return function(*args, **kwargs)

            configs = named([pin.config, *(c for c in pin.record.configs if c != pin.config)])
            result = FunctionSearch(
                InProcess(call.device, tasks=calls.__name__),
                replace(call, function=invoke),
                {name: {"chosen": config} for name, config in configs.items()},
                _progress(verbose, budget_seconds, ranks),
                ranks,
                collective=True,
            ).run(unit[0].name, pin.record.key)
            result = replace(
                result,
                configs=configs,
                pick=result.pick["chosen"],
                default=result.default["chosen"],
            )
            pin.config = result.pick
            unit[0]._keep(pin.record, result)
            results.append(result)
            if verbose and (ranks is None or ranks.rank == 0):
                print_ranking(result)
    return results


def _progress(verbose: bool, budget_seconds: float | None, ranks: Ranks | None) -> Progress:
    settings = settings_module.current()
    listener = LinePrinter().listen if verbose or settings.print_tuning else None
    prefix = "" if ranks is None else ranks.prefix
    return Progress(listener, budget_seconds or settings.budget_seconds, prefix=prefix)


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())


def _own_draws(device: int) -> AbstractContextManager[None]:
    """Leave torch's random numbers as they are found."""
    return torch.random.fork_rng([] if device == CPU else [device])
