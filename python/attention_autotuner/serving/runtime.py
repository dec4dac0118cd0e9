"""Resets of what a process remembers between calls: launch plans, decisions, loaded kernels, probed devices.

Tables are declared beside their users with :class:`~..core.memo.Table`, which keeps each look-up a single dict access
and each layer free of imports from above; they are reset here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..core.memo import TABLES


def forget(*prefixes: str) -> None:
    """Empty tables, so that the next call works everything out again; permanent ones stay.

    Args:
        prefixes: those whose name is, or lies below, one of these, e.g. ``plans.attention``; all without any.

    Raises:
        KeyError: a name fits no table.
    """
    for prefix in prefixes:
        if not any(_lies_below(name, prefix) for name in TABLES):
            raise KeyError(f"no table is called {prefix}; known: {', '.join(TABLES)}")
    for name, table in list(TABLES.items()):
        chosen = not prefixes or any(_lies_below(name, prefix) for prefix in prefixes)
        if chosen and not table.permanent:
            table.clear()


@contextmanager
def fresh() -> Iterator[None]:
    """Inside the block the process remembers nothing; afterwards, what it did before. Permanent tables stay.

    It is for tests: calls in other threads see the empty tables, too.
    """
    before = {name: dict(table) for name, table in list(TABLES.items()) if not table.permanent}
    forget()
    try:
        yield
    finally:
        forget()
        for name, entries in before.items():
            TABLES[name].update(entries)


def _lies_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")
