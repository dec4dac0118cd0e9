"""Checks of a tunable function's options, and the view of it that a method is."""

from __future__ import annotations

import itertools
import json
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..core.identity import encode
from ..errors import UnsupportedArgumentError
from .calls import Call

if TYPE_CHECKING:
    from .function_search import FunctionResult
    from .functions import Tunable

OF_CALL = tuple(item.name for item in fields(Call))[3:-1]
R = TypeVar("R")


def check_function(function: object) -> None:
    """Check that a function can be known again in another process.

    Raises:
        UnsupportedArgumentError: it is not callable, or has no name, as objects that are called and partial functions.
    """
    names = (getattr(function, name, None) for name in ("__module__", "__qualname__"))
    if not callable(function) or not all(isinstance(name, str) for name in names):
        raise UnsupportedArgumentError(
            f"autotune takes functions that have a module and a name, got {function!r}: "
            "write a function that calls it"
        )


def plain_configs(function: str, configs: Any) -> list[dict[str, Any]]:
    """Configurations as a list, with NumPy's scalars as values of Python.

    Args:
        function: its name, for messages.
        configs: mappings from names to values, or one from each name to several values.

    Raises:
        UnsupportedArgumentError: they are something else, or a value is neither a number, a string, a boolean nor None.
    """
    if isinstance(configs, Mapping):
        for name, values in configs.items():
            if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
                raise UnsupportedArgumentError(
                    f"{name!r} in the configurations of {function} must be a list of values, got {values!r}"
                )
        combinations = itertools.product(*configs.values())
        configs = [dict(zip(configs, combination, strict=True)) for combination in combinations]
    listed = list(configs) if isinstance(configs, Iterable) else [configs]
    for config in listed:
        if not isinstance(config, Mapping):
            raise UnsupportedArgumentError(
                f"configurations of {function} must be mappings from names of parameters to values, got {config!r}"
            )
    return [
        {name: _plain(function, name, value) for name, value in config.items()} for config in listed
    ]


def _plain(function: str, name: str, value: Any) -> Any:
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not value.shape:
        value = value.item()
    try:
        encode(value)
        json.dumps(value)
    except TypeError:
        raise UnsupportedArgumentError(
            f"{name!r} in the configurations of {function} must be numbers, strings, booleans or None, got {value!r}"
        ) from None
    return value


def check_options(
    tuner: str,
    function: str,
    tuner_options: Mapping[str, Any],
    of_call: Mapping[str, Any],
    parameters: Collection[str],
    arguments: Collection[str],
) -> None:
    """Check options of autotune and tune_together.

    Args:
        tuner: which of both, for messages.
        function: name of the function.
        tuner_options: options of the tuner, by name.
        of_call: options of a call, by name.
        parameters: names of the function's parameters.
        arguments: those of them that no configuration gives.

    Raises:
        UnsupportedArgumentError: there is no such option, or its value is not allowed.
    """
    known = (*tuner_options, *OF_CALL)
    for name, value in {**tuner_options, **of_call}.items():
        takes = ", ".join(arguments if name == "key" else parameters)
        is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        are_arguments = is_list and all(item in arguments for item in value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits: Any
        hint = ""
        if name not in known:
            raise UnsupportedArgumentError(
                f"{tuner} has no option {name!r}, got {name}={value!r}; its options: {', '.join(known)}"
            )
        if name in ("reset", "restore"):
            allowed, fits = "a list of its arguments", are_arguments
            hint = f": it takes {takes}"
        elif name == "key":
            allowed = f"a list of some of {takes}"
            fits = value is None or callable(value) or are_arguments
        elif name == "tolerance":
            allowed = "a number of at least 0, or None"
            fits = value is None or (is_number and 0 <= value < inf)
        elif name == "budget_seconds":
            allowed = "a positive number of seconds, or None"
            fits = value is None or (is_number and 0 < value < inf)
        elif name in ("prune", "reference", "bench"):
            allowed, fits = "a function, or None", value is None or callable(value)
        else:
            allowed, fits = "True or False", isinstance(value, bool)
        if not fits:
            raise UnsupportedArgumentError(
                f"{name} of {function} must be {allowed}, got {value!r}{hint}"
            )


class TunableMethod(Generic[R]):
    """A tunable function bound to an object, as a method is: calls and :meth:`tune` pass the object first.

    Everything else is that of the function.
    """

    def __init__(self, tunable: Tunable[R], instance: Any) -> None:
        self.__func__, self.__self__ = tunable, instance
        self.__doc__, self.__module__ = tunable.__doc__, tunable.__module__

    @property
    def __wrapped__(self) -> Callable[..., R]:
        """The method without its configurations' choice, whose signature this one has."""
        return types.MethodType(self.__func__.function, self.__self__)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Call the method."""
        return self.__func__(self.__self__, *args, **kwargs)

    def tune(self, *args: Any, **kwargs: Any) -> FunctionResult:
        """As :meth:`.functions.Tunable.tune`."""
        return self.__func__.tune(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("__func__", "__self__"):
            raise AttributeError(name)  # while it is copied
        return getattr(self.__func__, name)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, TunableMethod) and other.__func__ is self.__func__
        return same and other.__self__ is self.__self__  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__func__.function.__name__)
