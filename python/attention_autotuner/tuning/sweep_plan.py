"""The plan of a sweep: its candidates, and the time that building and racing them should take, by the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..arch.policy import Policy
from ..core.candidate import Candidate
from ..core.problem import Direction, Op, Problem
from ..kernels.cost_model import rank
from .class_pools import class_of, pools

TOP_K = 8  # candidates that a problem adds to its class
MAX_CLASS = 8  # candidates of a class beside the defaults, however much time there is
BUILD_SHARE = 0.6  # of the budget that builds may take, which measuring overlaps
# Seconds of one core for one kernel, nvcc 13.0: medians of the kernels of these head dims.
BUILD_SECONDS: dict[tuple[Op, Direction], float] = {
    ("attention", "forward"): 9.0,
    ("attention", "backward"): 13.0,
    ("retnet", "forward"): 7.0,
    ("retnet", "backward"): 12.0,
    ("retention", "forward"): 7.0,
    ("retention", "backward"): 10.0,
    ("gemm", "forward"): 7.0,
}
VERIFY_SECONDS = 0.5  # a kernel
RACE_SECONDS = 2.0  # of timing rounds a problem
SET_UP_SECONDS = 2.0  # of a race: inputs, clocks, first launches
CONFIRM_SECONDS = 2.5  # a problem
CONFIRM_START_SECONDS = 3.0  # of the second process, a fork of one that waits
FIGURES = ("class_limit", "jobs", "build_seconds", "gpu_seconds", "seconds")  # of a plan


def racing_seconds(
    races: int, doubts: int = 0, race_seconds: float = RACE_SECONDS + SET_UP_SECONDS
) -> float:
    """Seconds that some races take, with the confirmation of their picks and of those that are doubted already."""
    if not races + doubts:
        return 0.0
    confirming = CONFIRM_START_SECONDS + (races + doubts) * CONFIRM_SECONDS
    return races * race_seconds + confirming


@dataclass(frozen=True, kw_only=True)
class Group:
    """Problems of one class, and what they race on.

    Attributes:
        problems: in the order of the sweep.
        pool: their candidates, the defaults first, then by how much the model thinks of them.
    """

    problems: tuple[Problem, ...]
    pool: tuple[Candidate, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of a sweep.

    Attributes:
        groups: in the order in which they are built and raced.
        class_limit: candidates of a class beside the defaults.
        jobs: compilations at once.
    """

    groups: tuple[Group, ...]
    class_limit: int
    jobs: int

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All of them, group by group."""
        return tuple(problem for group in self.groups for problem in group.problems)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The candidates to build, each once, in order."""
        return tuple(dict.fromkeys(candidate for group in self.groups for candidate in group.pool))

    @property
    def build_seconds(self) -> float:
        """Expected wall time of the builds, with nothing in the cache."""
        core_seconds = sum(
            BUILD_SECONDS[candidate.op, candidate.direction] for candidate in self.candidates
        )
        return core_seconds / min(self.jobs, max(1, len(self.candidates)))

    @property
    def gpu_seconds(self) -> float:
        """Expected time of verifying, racing and confirming."""
        return VERIFY_SECONDS * len(self.candidates) + racing_seconds(len(self.problems))

    @property
    def seconds(self) -> float:
        """Expected wall time of the sweep: the longer of the two, and what of the other does not overlap."""
        longer, lesser = sorted((self.build_seconds, self.gpu_seconds), reverse=True)
        return longer + lesser / max(1, len(self.groups))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "problems": len(self.problems),
            "classes": len({(p.padded_dim_qk, p.padded_dim_v) for p in self.problems}),
            "groups": [
                {
                    "problems": [problem.describe() for problem in group.problems],
                    "kernels": [candidate.name for candidate in group.pool],
                }
                for group in self.groups
            ],
            "kernels": len(self.candidates),
            **{name: getattr(self, name) for name in FIGURES},
        }


def make_plan(
    problems: Sequence[Problem], policy: Policy, *, budget_seconds: float, jobs: int
) -> Plan:
    """Choose what is built: as many candidates of each class as the builds' share of the budget affords.

    Args:
        problems: what to tune for.
        policy: whose candidates.
        budget_seconds: of the whole sweep.
        jobs: compilations at once.

    Raises:
        NoCandidateError: a problem has no legal candidate on this GPU.
    """
    keys = dict.fromkeys(class_of(problem) for problem in problems)
    defaults = {policy.untuned(problem) for problem in problems}
    affordable = BUILD_SHARE * budget_seconds * jobs
    affordable -= sum(BUILD_SECONDS[candidate.op, candidate.direction] for candidate in defaults)
    members = {key: [p for p in problems if class_of(p) == key] for key in keys}
    per_step = sum(BUILD_SECONDS[first.op, first.direction] for first, *_ in members.values())
    limit = max(1, int(min(MAX_CLASS, affordable / per_step))) if keys else 1
    pool_of = pools(problems, policy, top_k=TOP_K, class_limit=limit)
    groups = [
        Group(problems=tuple(mine), pool=tuple(pool_of[key])) for key, mine in members.items()
    ]
    return Plan(groups=tuple(groups), class_limit=limit, jobs=jobs)


def expectation(problem: Problem, policy: Policy) -> dict[str, Any]:
    """The expectation of the cost model for a problem, for a table: how many are legal, its first, and the default."""
    ranked = rank(problem, policy.served(problem), policy.spec)
    default = policy.untuned(problem)
    by_candidate = dict(ranked)
    best, estimate = ranked[0]
    return {
        "problem": problem.describe(),
        "legal": len(ranked),
        "best": best.name,
        "best_us": estimate.us,
        "limiter": estimate.limiter,
        "default": default.name,
        "default_us": by_candidate[default].us if default in by_candidate else None,
    }
