"""The defaults of attention and retention of family ``sm90`` against races of kernels: arithmetic only.

    python -m benchmarks.default_races benchmarks/results/nvidia-h200/forward_plans.json.xz
    python -m benchmarks.default_races benchmarks/results/nvidia-h200/backward_defaults.json.xz
    python -m benchmarks.default_races benchmarks/results/nvidia-h200/retention_forward_defaults.json.xz

Prints, for each pair of head dims and mask, how much slower the default is than the fastest kernel that was raced; of
attention's forward also the costs of a tile that fit its plans best, to be compared with the table in
``attention_forward_sm90/plans.py``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean, geometric_mean

from scipy.optimize import minimize

from attention_autotuner.arch import Policy, resolve
from attention_autotuner.codegen.files import read_text
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_forward_sm90.plans import (
    LAUNCH_US,
    Costs,
    Plan,
    plans_of,
    times_of,
)
from attention_autotuner.operations.registry import OPERATIONS

from .suites import shape

_STAGES = re.compile(r"_q\dk\dv\d_o[qd]")


@dataclass(frozen=True, kw_only=True)
class Race:
    """One race of kernels on a shape.

    Attributes:
        problem: the shape.
        us: microseconds by the label of the knobs, without stages.
    """

    problem: Problem
    us: Mapping[str, float]


def without_stages(label: str) -> str:
    """The label of knobs without stages and the way of O, by which kernels of a race do not differ."""
    return _STAGES.sub("", label)


def read_races(path: Path) -> tuple[Race, ...]:
    """The races of a file.

    Raises:
        OSError, ValueError, KeyError: it cannot be read, or holds something else.
    """
    document = json.loads(read_text(path))
    op = document.get("op", "attention")
    fields = {
        "op": op,
        "mask": document.get("mask", OPERATIONS[op].semantics.default_mask),
        "direction": document.get("direction", "forward"),
    }
    return tuple(
        Race(
            problem=shape(race["shape"], dtype="bf16", **fields),
            us={without_stages(label): us for label, us in race["us"].items()},
        )
        for race in document["races"]
    )


def regrets(
    races: Iterable[Race], choose: Callable[[Problem], str]
) -> Iterator[tuple[Race, float]]:
    """The time of what is chosen over that of the fastest kernel, for the races that had it.

    Args:
        races: of any shapes.
        choose: gives the label of a problem's knobs.
    """
    for race in races:
        us = race.us.get(without_stages(choose(race.problem)))
        if us is not None:
            yield race, us / min(race.us.values())


def default_of(policy: Policy) -> Callable[[Problem], str]:
    """The label of the default's knobs, as a call has it."""
    return lambda problem: policy.untuned(problem).knobs.label


def fit(races: Iterable[Race], plan: Plan, *, causal: bool, sms: int) -> Costs:
    """The costs of a plan's tile with the least squares of logarithms of time.

    Args:
        races: of the head dims that the plan is for.
        plan: its knobs, and costs to begin with.
        causal: of which races.
        sms: of the GPU.
    """
    label = f"g{plan.warpgroups}n{plan.block_n}_{plan.mainloop}_optimistic_"
    label += "turns" if plan.ping_pong else "free"
    measured = [
        (race.problem, schedule, us)
        for race in races
        if race.problem.causal == causal
        for schedule in ("static", "dynamic")
        if (us := race.us.get(f"{label}_{schedule}")) is not None
    ]

    def loss(logs: Sequence[float]) -> float:
        costs = (exp(logs[0]), exp(logs[1]))
        tried = replace(plan, costs=(costs, costs))
        times = [(times_of(problem, tried, sms), kind, us) for problem, kind, us in measured]
        return fmean(
            log((LAUNCH_US[causal] + by_schedule[kind]) / us) ** 2
            for by_schedule, kind, us in times
            if kind in by_schedule
        )

    begun = [log(cost) for cost in plan.costs[causal]]
    fixed, step = minimize(loss, begun, method="Nelder-Mead").x
    return exp(fixed), exp(step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the regret of defaults, and the costs that fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device-type", default="H200")
    parser.add_argument("--no-fit", action="store_true", help="print the regret alone")
    options = parser.parse_args(arguments)
    policy, races = resolve(options.device_type), read_races(options.file)
    of_dims: dict[tuple[int, int], list[Race]] = {}
    for race in races:
        of_dims.setdefault((race.problem.padded_dim_qk, race.problem.padded_dim_v), []).append(race)
    for dims, raced in of_dims.items():
        for causal in (False, True):
            masked = [race for race in raced if race.problem.causal == causal]
            ratios = [ratio for _, ratio in regrets(masked, default_of(policy))]
            if not ratios:
                continue
            mean, most = geometric_mean(ratios), max(ratios)
            mask = "causal" if causal else "no mask"
            print(f"{dims} {mask}: {mean:.3f}, at most {most:.2f}, of {len(ratios)} shapes")
            first = masked[0].problem
            fits = not options.no_fit and (first.op, first.direction) == ("attention", "forward")
            for plan in plans_of(first) if fits else ():
                fixed, step = fit(masked, plan, causal=causal, sms=policy.spec.num_sms)
                name = f"{plan.warpgroups} {plan.mainloop} {plan.block_n}"
                print(f"    {name}: ({fixed:.2f}, {step:.3f}) for {plan.costs[causal]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
