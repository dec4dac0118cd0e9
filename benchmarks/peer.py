"""What a peer is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attention_autotuner.codegen.problem import Problem
from attention_autotuner.tuning.measure import Entry

from .rivals import PICK


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another implementation.

    Attributes:
        name: in results and on the command line.
        title: in tables.
        entry: what is timed for a problem; what it compiles, it compiles on its first call.
        refusal: why it cannot compute a problem the way we do, or an empty string.
        against: the label of ours that does the same work.
        asked: whether a problem is one of those that it is timed on.
        ready: told of all problems that it will be timed on, and how many processes it may use, before the first race:
            what takes long and can be done for all of them at once.
    """

    name: str
    title: str
    entry: Callable[[Problem], Entry]
    refusal: Callable[[Problem], str]
    against: str = PICK
    asked: Callable[[Problem], bool] = lambda problem: True
    ready: Callable[[Sequence[Problem], int], None] | None = None
