"""What a peer is, and how one that breaks is kept from taking the comparison with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import AttentionAutotunerError
from attention_autotuner.operations.shared.tensors import Inputs, Outputs
from attention_autotuner.tuning.measure import Entry

from .rivals import PICK


class PeerError(AttentionAutotunerError, RuntimeError):
    """A peer raised something of its own; the message begins with that error's type."""


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


class GuardedEntry:
    """A peer's entry whose errors, of whatever type, reach a race as its typed reasons.

    A race knows what to do with errors of this package and of torch. Compilers inside peers raise others.

    Args:
        peer: whose entry; made at once, and what that raises is raised again by :meth:`prepare`.
        problem: what is timed.

    Attributes:
        name: the peer's.
        entry: the peer's own, or None where it could not be made.
    """

    def __init__(self, peer: Peer, problem: Problem) -> None:
        self.name = peer.name
        self.entry: Entry | None = None
        self._failure: Exception | None = None
        try:
            self.entry = peer.entry(problem)
        except Exception as error:  # noqa: BLE001  # kept, and raised again where a race looks for it
            self._failure = error

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Prepare the peer's entry.

        Raises:
            PeerError: the entry could not be made, or raised what a race would not know.
        """
        if self.entry is None:
            raise PeerError(_told(self._failure)) from self._failure
        try:
            self.entry.prepare(inputs, outputs)
        except (AttentionAutotunerError, RuntimeError):
            raise
        except Exception as error:
            raise PeerError(_told(error)) from error

    def run(self, index: int) -> None:
        """Run the peer's entry.

        Raises:
            PeerError: it raised what a race would not know.
        """
        assert self.entry is not None  # prepare came first
        try:
            self.entry.run(index)
        except (AttentionAutotunerError, RuntimeError):
            raise
        except Exception as error:
            raise PeerError(_told(error)) from error


def _told(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"
