"""Our kernels that one race times, and the labels under which they stand in a result file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.serving import dispatch
from attention_autotuner.tuning.pipeline import Built, Pipeline

PICK = "pick"
DEFAULT = "default"
DETERMINISTIC = "deterministic"
DETERMINISTIC_DEFAULT = "deterministic_default"
STEP = "step"
CALL = "call"
AUTOGRAD = "autograd"
Results = Mapping[Candidate, Built | Outcome]
WHOLE_STEPS = (STEP, AUTOGRAD)  # labels of forward and backward together


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A pick and the default that it has to beat.

    Attributes:
        problem: the problem.
        pick: what dispatch would run.
        layer: where that comes from.
        default: the policy's default, perhaps the same.
    """

    problem: Problem
    pick: Candidate
    layer: str
    default: Candidate

    def candidates(self) -> list[Candidate]:
        """The default first: ties go to it."""
        return [self.default] if self.pick == self.default else [self.default, self.pick]


@dataclass(frozen=True, kw_only=True)
class Contenders:
    """Our kernels in one race.

    Attributes:
        plain: for the problem itself.
        deterministic: for the same backward problem where two runs must agree bit for bit.
        forward: for the forward whose backward this is; with it a whole step can be timed.
    """

    plain: Selection
    deterministic: Selection | None = None
    forward: Selection | None = None

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.plain.problem

    def selections(self) -> Iterator[tuple[str, str, Selection]]:
        """The selections for the problem itself, with the labels of their pick and their default."""
        yield PICK, DEFAULT, self.plain
        if self.deterministic is not None:
            yield DETERMINISTIC, DETERMINISTIC_DEFAULT, self.deterministic

    def raced(self) -> list[Candidate]:
        """The kernels that compute the problem itself; one that serves in both modes is there once."""
        return list(dict.fromkeys(c for _, _, s in self.selections() for c in s.candidates()))

    def candidates(self) -> list[Candidate]:
        """Every kernel that the race may run, without repeats."""
        forward = [] if self.forward is None else [self.forward.pick]
        return list(dict.fromkeys([*self.raced(), *forward]))


def select(problem: Problem, policy: Policy) -> Selection:
    """The kernel that dispatch would run for a problem, and the default beside it."""
    pick = dispatch.lookup(problem, policy)
    return Selection(
        problem=problem,
        pick=pick.candidate,
        layer=pick.layer,
        default=policy.untuned(problem),
    )


def variants(problem: Problem) -> list[Problem]:
    """The problems that are tuned for one: itself and, for a backward one, the same in deterministic mode.

    Every kernel of retention is deterministic, so that there is no second search for it.
    """
    if problem.direction == "forward" or problem.op == "retention":
        return [problem]
    return [problem, replace(problem, deterministic=True)]


def contenders_of(problem: Problem, policy: Policy, *, defaults: bool = True) -> Contenders:
    """Our kernels for a problem.

    Args:
        problem: the problem.
        policy: whose picks.
        defaults: race the defaults and the picks of deterministic mode, too; False leaves the pick alone.
    """
    raced = variants(problem) if defaults else [problem]
    plain, *strict = (select(variant, policy) for variant in raced)
    backward = problem.direction == "backward"
    return Contenders(
        plain=plain if defaults else replace(plain, default=plain.pick),
        deterministic=strict[0] if strict else None,
        forward=select(forward_of(problem), policy) if backward else None,
    )


def forward_of(problem: Problem) -> Problem:
    """The forward problem whose gradients a backward problem is about."""
    return replace(problem, direction="forward", deterministic=False)


def flops_of(problem: Problem, label: str, lengths: Sequence[int] = ()) -> float:
    """Work of one of ours: of the problem, or of a whole step.

    Args:
        problem: the problem.
        label: of ours.
        lengths: of packed sequences, where they are not the typical ones that a problem counts.
    """
    flops = problem.flops + (forward_of(problem).flops if label in WHOLE_STEPS else 0)
    if not lengths:
        return flops
    return flops * sum(x * x for x in lengths) / sum(rows * keys for rows, keys in problem.lengths)


def usable(
    problems: Mapping[Candidate, Problem], results: Results, pipeline: Pipeline
) -> tuple[dict[Candidate, Built], dict[Candidate, Outcome]]:
    """The kernels that are built and right on their problems, and the outcome of every one."""
    right: dict[Candidate, Built] = {}
    outcomes: dict[Candidate, Outcome] = {}
    for candidate, problem in problems.items():
        result = results[candidate]
        if isinstance(result, Outcome):
            outcomes[candidate] = result
            continue
        outcome = pipeline.verify(problem, result, deterministic=candidate.deterministic)
        outcomes[candidate] = outcome
        if outcome.ok:
            right[candidate] = result
    return right, outcomes
