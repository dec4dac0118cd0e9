"""Memory of a process: named tables of what was worked out before, all listed in one place.

A module keeps its table as a global, so that a warm look-up is one dict access; the list here lets
:mod:`..serving.runtime` reset them together. What a pure function answers needs no table: ``functools.cache`` will do.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar

K = TypeVar("K")
V = TypeVar("V")
P = ParamSpec("P")
R = TypeVar("R")

TABLES: dict[str, Table] = {}  # type: ignore[type-arg]  # of any keys and values
"""Every table of this process by its name: words between dots, the general ones first."""

_ABSENT = object()


class Bounded(dict[K, V]):
    """A dict of limited size. Reads are a dict's own and take no lock; write through :meth:`remember`.

    Attributes:
        bound: entries kept at most, the oldest dropped first; None keeps all.
    """

    def __init__(self, bound: int | None) -> None:
        super().__init__()
        self.bound = bound
        self._lock = threading.Lock()

    def remember(self, key: K, value: V) -> None:
        """Store a value, within the bound."""
        with self._lock:
            if self.bound is not None and key not in self:
                while len(self) >= self.bound:
                    del self[next(iter(self))]
            self[key] = value


class Table(Bounded[K, V]):
    """Memory of a process, cleared when the runtime forgets.

    Attributes:
        name: the key in :data:`TABLES`.
        permanent: outlives a reset, because something outside Python still refers to the values: loaded libraries,
            tensors in recorded CUDA graphs, names in compiled graphs.
    """

    def __init__(self, name: str, *, bound: int | None = None, permanent: bool = False) -> None:
        """List an empty table.

        Args:
            name: not taken yet.
            bound: see :class:`Bounded`.
            permanent: see the class.

        Raises:
            ValueError: the name is taken.
        """
        super().__init__(bound)
        if name in TABLES:
            raise ValueError(f"there is a table {name} already")
        self.name = name
        self.permanent = permanent
        TABLES[name] = self


def remembered(
    name: str, *, bound: int | None = None, permanent: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that keeps a function's results in a :class:`Table`, by its positional arguments.

    An error is not kept: the next call tries again.

    Args:
        name: of the table.
        bound: see :class:`Bounded`.
        permanent: see :class:`Table`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        table: Table[Hashable, R] = Table(name, bound=bound, permanent=permanent)

        @functools.wraps(function)
        def look_up(*args: P.args, **kwargs: P.kwargs) -> R:
            key = (args, tuple(sorted(kwargs.items())))
            value = table.get(key, _ABSENT)
            if value is _ABSENT:
                value = function(*args, **kwargs)
                table.remember(key, value)
            return value  # type: ignore[return-value]  # absent no longer

        return look_up

    return decorate
