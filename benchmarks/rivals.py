"""Who of ours meets on a problem, and under which label each stands in a result file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.serving import dispatch

PICK = "pick"
DEFAULT = "default"
DETERMINISTIC = "deterministic"
DETERMINISTIC_DEFAULT = "deterministic_default"
STEP = "step"
CALL = "call"
AUTOGRAD = "autograd"


@dataclass(frozen=True, kw_only=True)
class Rivals:
    """A pick and what it has to beat.

    Attributes:
        problem: the problem.
        pick: what dispatch would run.
        layer: where that comes from.
        default: the policy's own, perhaps the same.
    """

    problem: Problem
    pick: Candidate
    layer: str
    default: Candidate

    def ours(self) -> list[Candidate]:
        """The default first: ties go to it."""
        return [self.default] if self.pick == self.default else [self.default, self.pick]


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Those of ours that one race times.

    Attributes:
        plain: for the problem itself.
        deterministic: for the same backward problem where two runs must agree bit for bit.
        opening: for the forward whose backward this is; with it a whole step can be timed.
    """

    plain: Rivals
    deterministic: Rivals | None = None
    opening: Rivals | None = None

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.plain.problem

    def rivals(self) -> Iterator[tuple[str, str, Rivals]]:
        """Those that compute the problem itself, with the labels of their pick and their default."""
        yield PICK, DEFAULT, self.plain
        if self.deterministic is not None:
            yield DETERMINISTIC, DETERMINISTIC_DEFAULT, self.deterministic

    def candidates(self) -> list[Candidate]:
        """Every kernel that the meeting may run, without repeats."""
        found = [one for _, _, each in self.rivals() for one in each.ours()]
        if self.opening is not None:
            found.append(self.opening.pick)
        return list(dict.fromkeys(found))


def rivals_of(problem: Problem, policy: Policy, device: int = 0) -> Rivals:
    """What dispatch would run for a problem, and the default beside it."""
    pick = dispatch.lookup(problem, policy, device=device)
    return Rivals(
        problem=problem, pick=pick.candidate, layer=pick.layer, default=policy.default(problem)
    )


def variants(problem: Problem) -> list[Problem]:
    """What is tuned for a problem: itself and, for a backward one, what may serve in deterministic mode.

    Every kernel of retention is deterministic, so that there is no second search for it.
    """
    if problem.direction == "forward" or problem.op == "retention":
        return [problem]
    return [problem, replace(problem, deterministic=True)]


def meeting_of(problem: Problem, policy: Policy, device: int = 0) -> Meeting:
    """Everyone of ours for a problem."""
    plain, *stricter = (rivals_of(each, policy, device) for each in variants(problem))
    if problem.direction == "forward":
        return Meeting(plain=plain)
    return Meeting(
        plain=plain,
        deterministic=stricter[0] if stricter else None,
        opening=rivals_of(forward_of(problem), policy, device),
    )


def forward_of(problem: Problem) -> Problem:
    """The forward problem whose gradients a backward problem is about."""
    return replace(problem, direction="forward", deterministic=False)
