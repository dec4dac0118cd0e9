"""Every operation. A new one is its folder here, one of the same name in ``api/``, and a word in NAMES.

This module is free of torch, and so is each operation's ``problem``; ``params`` and ``inputs`` of an operation are
imported when they are first asked for, by :mod:`.params` and :mod:`.bindings`, which stand above.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from ..core.operation import Semantics

NAMES = ("attention", "retnet", "retention", "gemm")
"""The folders of operations, in the order in which they are listed to users."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation, and the way to what its folder holds.

    Attributes:
        name: its name in a problem, and of its folder.
        semantics: what a problem of it may say, its FLOPs and bytes: ``SEMANTICS`` of its module ``problem``.
    """

    name: str
    semantics: Semantics

    def module(self, name: str) -> ModuleType:
        """A module of its folder, e.g. ``params``, imported when first asked for."""
        return import_module(f".{self.name}.{name}", __package__)


def _operation(name: str) -> Operation:
    problem = import_module(f".{name}.problem", __package__)
    return Operation(name=name, semantics=problem.SEMANTICS)


OPERATIONS: dict[str, Operation] = {name: _operation(name) for name in NAMES}
"""Name -> operation."""
