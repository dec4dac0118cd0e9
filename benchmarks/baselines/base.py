"""A baseline: another implementation of one of our operations, and the entries by which a race times it.

How it is timed follows from the *mode*: the forward pass without gradients, the backward pass alone, both as one step
by the fastest way there is, or a step through autograd as a program takes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

from attention_autotuner.core.modifications import PACKED, WINDOW
from attention_autotuner.core.problem import NO_WINDOW, Direction, Op, Problem
from attention_autotuner.errors import AttentionAutotunerError
from attention_autotuner.operations.shared.tensors import Inputs, Outputs
from attention_autotuner.tuning.entries import Entry

from ..calls import (
    BackwardCall,
    Call,
    ForwardCall,
    Function,
    Layout,
    StepCall,
    as_given,
    others_of,
    packed_rows,
)
from ..contenders import AUTOGRAD, CALL, PICK

Limits = tuple[Callable[[Problem], str], ...]
Mode = Literal["forward", "backward", "step", "autograd"]
MODES: tuple[Mode, ...] = ("forward", "backward", "step", "autograd")
DIRECTION_OF: dict[Mode, Direction] = {
    mode: "forward" if mode == "forward" else "backward" for mode in MODES
}
"""Mode -> the direction of the problem that is measured; a step is timed on the inputs of its backward problem."""
CALLS: dict[Mode, type[Call]] = {
    "forward": ForwardCall,
    "backward": BackwardCall,
    "step": StepCall,
    "autograd": StepCall,
}


class BaselineError(AttentionAutotunerError, RuntimeError):
    """A baseline raised an error of another kind; the message begins with that error's type."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")


class Baseline(ABC):
    """Another implementation.

    Attributes:
        name: in results and on the command line.
        title: in tables.
        op: the operation that it computes.
        layout: between our tensors and the function's, in either direction.
        gradients: how its backward pass is timed, for the documentation.
        called: its forward pass is compared with our function called the same way, not with our kernel alone.
        modifications: that it can be called with, a window and packed sequences among them.
        same: its results are those of our function, and are compared with them before it is timed.
        limits: each gives the reason why it cannot compute a problem of its operation as we do, or an empty string.
    """

    name: str
    title: str
    op: Op = "attention"
    layout: Layout = staticmethod(as_given)
    gradients = "through autograd"
    called = False
    same = True
    modifications: frozenset[str] = frozenset()
    limits: Limits = ()

    @abstractmethod
    def function(self, problem: Problem) -> Function:
        """The function of q, k, v and the operation's other tensors, which torch can differentiate."""

    def limit(self, problem: Problem) -> str:
        """The first reason why a problem of its operation cannot be timed, or an empty string."""
        return next(filter(None, (limit(problem) for limit in self.limits)), "")

    def available(self, problem: Problem) -> str:
        """The reason why it cannot be timed on a problem here; empty where it can."""
        if problem.op != self.op:
            return f"it computes {self.op}, not {problem.op}"
        lacking = [x for x in asked_of(problem) if x not in self.modifications]
        if lacking:
            return f"it is not called with {' and '.join(lacking)}"
        return self.limit(problem)

    def modes(self, modes: Sequence[Mode]) -> list[Mode]:
        """The modes of a trial in which it is timed: a step through autograd only once."""
        return [mode for mode in modes if mode != "autograd" or mode == modes[0]]

    def ours(self, problem: Problem, mode: Mode) -> str:
        """The label of ours that does the same work as its entry."""
        if mode == "forward" and self.called:
            return CALL
        return PICK if mode in ("forward", "backward") else AUTOGRAD

    def entry(self, problem: Problem, mode: Mode, name: str) -> Entry:
        """The entry of a race under a name."""
        return CALLS[mode](
            name=name,
            function=self.function(problem),
            others=others_of(problem),
            layout=packed_rows if problem.packed else self.layout,
        )

    def simpler(self, problem: Problem) -> Problem | None:
        """The problem of ours that it runs in place of a kernel of its own, so that it is built with ours."""
        return None

    def work_of(self, problem: Problem) -> Problem:
        """The problem whose work its time stands for: speeds are compared per FLOP of the two."""
        return problem

    def get_ready(self, problems: Sequence[Problem], processes: int) -> None:
        """Compile for all problems at once, before the first race, in at most so many processes."""
        return  # most compile nothing


def asked_of(problem: Problem) -> tuple[str, ...]:
    """The names of all that a caller asks for beside a causal mask: modifications, a window, packed sequences."""
    windowed = (WINDOW,) if problem.window_size != NO_WINDOW else ()
    return (*problem.modifications, *windowed, *((PACKED,) if problem.packed else ()))


def misaligned(problem: Problem) -> str:
    """The reason against functions whose causal mask starts at the top left."""
    other = problem.causal and problem.causal_offset != 0
    return "its causal mask is aligned top-left" if other else ""


def grouped_heads(problem: Problem) -> str:
    """The reason against functions that repeat no heads."""
    grouped = problem.heads_q != problem.heads_kv
    return "it takes as many heads of k and v as of q" if grouped else ""


def two_head_dims(problem: Problem) -> str:
    """The reason against functions whose q, k and v share one head dim."""
    if problem.dim_qk != problem.dim_v:
        return f"it takes one head dim, not {problem.dim_qk}/{problem.dim_v}"
    return ""


def top_left(problem: Problem) -> str:
    """The reason against functions whose causal mask ends at the bottom right."""
    oblong = problem.seqlen_q != problem.seqlen_k
    if problem.causal and problem.causal_alignment == "top_left" and oblong:
        return "its causal mask is aligned bottom-right"
    return ""


class GuardedEntry:
    """An entry whose errors, of whatever type, reach a race as its typed reasons.

    A race knows what to do with errors of this package and of torch. Compilers inside baselines raise others.

    Args:
        name: of the entry.
        make: makes it, at once; what that raises is raised again by :meth:`prepare`.
        check: raises an error where what the entry computes from its first inputs is wrong.

    Attributes:
        entry: the baseline's entry, or None where it could not be made.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Entry],
        check: Callable[[Entry, Inputs], None] | None = None,
    ) -> None:
        self.name, self._check = name, check
        self.entry: Entry | None = None
        self._failure: BaselineError | None = None
        try:
            self.entry = make()
        except Exception as error:  # noqa: BLE001  # kept, and raised where a race looks for it
            self._failure = BaselineError(error)

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Prepare the baseline's entry and check what it computes.

        Raises:
            BaselineError: the entry could not be made, or raised an error that a race would not know.
            DisagreementError: its results are wrong.
        """
        if self._failure is not None:
            raise self._failure
        self._guard(lambda entry: entry.prepare(inputs, outputs))
        check = self._check
        if check is not None:
            self._guard(lambda entry: check(entry, inputs[0]))

    def run(self, index: int) -> None:
        """Run the baseline's entry.

        Raises:
            BaselineError: it raised an error that a race would not know.
        """
        self._guard(lambda entry: entry.run(index))

    def _guard(self, action: Callable[[Entry], None]) -> None:
        assert self.entry is not None  # prepare came first
        try:
            action(self.entry)
        except (AttentionAutotunerError, RuntimeError):
            raise  # as a race knows it
        except Exception as error:
            raise BaselineError(error) from error
