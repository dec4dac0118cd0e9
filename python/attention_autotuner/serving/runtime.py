"""The one owner of what a process remembers between calls: launch plans, decisions, loaded kernels, probed devices.

Tables are declared beside their users with :class:`~..core.memo.Table`, which keeps each look-up a single dict access
and each layer free of imports from above; they are reset here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from ..core import memo
from ..core.memo import Table


class Runtime:
    """Every cache and memo of serving calls in this process.

    Args:
        tables: name -> table; those of modules that are imported later appear as they are.
    """

    def __init__(self, tables: Mapping[str, Table[Any, Any]]) -> None:
        self._tables = tables

    @property
    def tables(self) -> Mapping[str, Table[Any, Any]]:
        """Every table by its name, e.g. ``plans.attention.forward``, as it is now."""
        return MappingProxyType(dict(self._tables))

    def __getitem__(self, name: str) -> Table[Any, Any]:
        """A table by its name."""
        return self._tables[name]

    def select(self, *prefixes: str) -> list[Table[Any, Any]]:
        """The tables whose name is, or lies below, one of some names; all without any.

        Raises:
            KeyError: a name fits no table.
        """
        tables = list(self._tables.values())
        if not prefixes:
            return tables
        for prefix in prefixes:
            if not any(_lies_below(table.name, prefix) for table in tables):
                raise KeyError(f"no table is called {prefix}; known: {', '.join(self._tables)}")
        return [
            table for table in tables if any(_lies_below(table.name, prefix) for prefix in prefixes)
        ]

    def forget(self, *prefixes: str) -> None:
        """Empty tables, so that the next call works everything out again; permanent ones stay.

        Args:
            prefixes: which, see :meth:`select`.

        Raises:
            KeyError: a name fits no table.
        """
        for table in self.select(*prefixes):
            if not table.permanent:
                table.clear()

    @contextmanager
    def fresh(self) -> Iterator[Runtime]:
        """Inside the block the process remembers nothing; afterwards, what it did before. Permanent tables stay.

        It is for tests: calls in other threads see the empty tables, too.
        """
        before = {table.name: dict(table) for table in self.select() if not table.permanent}
        self.forget()
        try:
            yield self
        finally:
            self.forget()
            for name, entries in before.items():
                self._tables[name].update(entries)


def _lies_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


_RUNTIME = Runtime(memo.TABLES)


def current() -> Runtime:
    """The runtime of this process."""
    return _RUNTIME
