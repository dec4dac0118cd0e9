"""Exhaustive measurement: what the cost model is held against, and learns from.

    python -m benchmarks.exhaustive --output searches.jsonl.xz      # needs a GPU
    python -m benchmarks.exhaustive --build-only                    # fills the kernel cache, no GPU needed
    attention-autotuner report --model-card searches.jsonl.xz

*Exhaustive* is every legal candidate, or a sample of so many fixed by a seed, stratified over block_m, block_n, warps
and stages of each kernel in turn. The sample of a head-dim class does not depend on the problem, so problems of one
class share their builds; each problem adds the model's own first picks. Every kernel is verified on small shapes before
it is timed. The file is written after each class, so that a run that is cut off keeps what it had; one that is there is
added to, and its problems are not measured again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

from attention_autotuner import settings as settings_module
from attention_autotuner.arch import Policy, resolve
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import NoCandidateError, UnsupportedArchitectureError
from attention_autotuner.kernels.registry import kernel_of
from attention_autotuner.tuning.class_pools import ClassKey, class_of
from attention_autotuner.tuning.pipeline import LocalPipeline, Pipeline
from attention_autotuner.tuning.ranking import ranked
from attention_autotuner.tuning.record_schema import TuningRecord
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipping import evidence
from attention_autotuner.tuning.shortlist import Ranked, shortlist
from attention_autotuner.tuning.stages import built_of

from .results import write_text
from .search import Say, search, telling
from .suites import shape

SAMPLE = 96
FIRST = 10  # of the model's own picks that are inside every sample

_LONG, _SHORT = "b4 h16 s4096 d128", "b16 h16 s1024 d128 causal"
_CAUSAL_64, _MANY_64 = "b8 h32 s2048 d64 causal", "b32 h32 s512 d64"
_WIDE, _MASKED, _DECAYED = "b4 h8 s4096 d256", "b8 h16 s2048 d128", "b8 h16 s4096 d128 causal"
PROBLEMS = (
    *(shape(text, direction="backward") for text in (_LONG, _SHORT, _CAUSAL_64, _MANY_64, _WIDE)),
    shape(_LONG, direction="backward", deterministic=True),
    *(shape(text) for text in (_LONG, _SHORT, _CAUSAL_64, _MANY_64, _WIDE)),
    shape(_DECAYED, op="retention"),
    shape(_DECAYED, op="retention", direction="backward"),
    shape(_MASKED, op="retnet", mask="explicit"),
    shape(_MASKED, op="retnet", mask="explicit", direction="backward"),
)
"""The lengths and widths of the suites, both ways, all families and operations; those of a class are neighbours."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build every sample in one batch, then verify and race class by class; answers 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device-type", help="a policy's name; the present GPU's by default")
    parser.add_argument("--cache-dir", type=Path, help="kernels and records; the setting's")
    parser.add_argument("--jobs", type=int, help="compilations at once")
    parser.add_argument("--size", type=int, default=SAMPLE, help="candidates per problem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3.0, help="of rounds per problem")
    parser.add_argument("--only", nargs="*", default=[], help="words of a problem's description")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("searches.jsonl.xz"))
    options = parser.parse_args(arguments)
    start = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {line}", file=sys.stderr, flush=True)

    changes = {"cache_dir": options.cache_dir, "jobs": options.jobs}
    changes = {name: value for name, value in changes.items() if value is not None}
    with settings_module.override(**changes) as settings:
        try:
            policy = resolve(options.device_type)
        except UnsupportedArchitectureError as error:
            say(str(error))
            return 2
        known = list(evidence(options.output).values())
        done = {record.measured_problem for record in known}
        words = set(options.only)
        samples = {
            problem: sample_of(problem, policy, options.size, options.seed)
            for problem in PROBLEMS
            if problem not in done and words <= set(problem.describe().split())
        }
        pipeline = LocalPipeline(policy, settings)
        built_of(chain.from_iterable(samples.values()), pipeline, telling(say))
        if options.build_only:
            return 0
        if not pipeline.can_measure():
            say("no GPU here: nothing can be measured")
            return 2
        records = RecordStore(settings.cache_dir / "records")
        for searched in measured(samples, policy, pipeline, records, options.seconds, say):
            known += searched
            write(options.output, known)
    return 0


def sample_of(problem: Problem, policy: Policy, size: int, seed: int) -> list[Candidate]:
    """The candidates that are measured for a problem."""
    return sample(ranked(problem, policy), policy.untuned(problem), size=size, seed=seed)


def measured(
    samples: Mapping[Problem, Sequence[Candidate]],
    policy: Policy,
    pipeline: Pipeline,
    records: RecordStore,
    seconds: float,
    say: Say,
) -> Iterator[list[TuningRecord]]:
    """The records of each head-dim class: every problem of one races the samples of all of them."""
    classes: dict[ClassKey, list[Problem]] = {}
    for problem in samples:
        classes.setdefault(class_of(problem), []).append(problem)
    for key, problems in classes.items():
        pool = list(dict.fromkeys(chain.from_iterable(samples[problem] for problem in problems)))
        try:
            yield search(
                problems, policy, pipeline, records, pool_of={key: pool}, seconds=seconds, say=say
            )
        except NoCandidateError as error:  # the other classes have theirs
            say(str(error))


def write(path: Path, records: Iterable[TuningRecord]) -> None:
    """Write records as lines that :func:`.shipping.evidence` reads, without the proofs and names of logs."""
    lines = []
    for record in records:
        entries = (replace(e, outcome=replace(e.outcome, log="")) for e in record.entries)
        text = replace(record, entries=tuple(entries)).to_json()
        for entry in text["entries"]:
            entry["outcome"].pop("proof", None)
        lines.append(json.dumps(text, separators=(",", ":")) + "\n")
    write_text(path, "".join(lines))


def stratum_of(candidate: Candidate) -> tuple[object, ...]:
    """The traits that a stratum shares: tiles, warps and stages, of several passes those of every pass."""
    return kernel_of(candidate).describe(candidate).stratum


def stratified(candidates: Sequence[Candidate], seed: int) -> Iterator[Candidate]:
    """All candidates, those of each kernel in turn; every prefix is spread over the strata, the same for a seed."""
    kernels: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: c.name):
        kernels.setdefault(candidate.kernel, []).append(candidate)
    return _in_turn([_spread(members, random.Random(seed)) for members in kernels.values()])


def _in_turn(groups: Iterable[Iterable[Candidate]]) -> Iterator[Candidate]:
    """The first of every group, then the second of those that have one, and so on."""
    in_turn = chain.from_iterable(zip_longest(*groups))
    return (candidate for candidate in in_turn if candidate is not None)


def _spread(candidates: Sequence[Candidate], source: random.Random) -> Iterator[Candidate]:
    """A kernel's candidates, one of each stratum before the second of any."""
    strata: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        strata.setdefault(stratum_of(candidate), []).append(candidate)
    groups = list(strata.values())
    for group in groups:
        source.shuffle(group)
    source.shuffle(groups)
    return _in_turn(groups)


def sample(
    ranked: Sequence[Ranked],
    default: Candidate,
    *,
    size: int = SAMPLE,
    seed: int = 0,
) -> list[Candidate]:
    """The candidates that are measured for one problem.

    Args:
        ranked: all legal candidates, best first by the model.
        default: the policy's own; always inside.
        size: how many at most; all candidates when there are no more than that.
        seed: of the stratified rest.

    Returns:
        Distinct candidates: the default, the model's picks, then the stratified ones.

    Raises:
        ValueError: ``size`` does not hold the default and the model's picks.
    """
    first_picks = [candidate for candidate, _ in ranked[:FIRST]]
    first_picks += [candidate for candidate, _ in shortlist(ranked, default, FIRST)]
    chosen = list(dict.fromkeys([default, *first_picks]))
    if len(chosen) > size:
        raise ValueError(f"size must be at least {len(chosen)}, got {size}")
    for candidate in stratified([candidate for candidate, _ in ranked], seed):
        if len(chosen) == size:
            break
        if candidate not in chosen:
            chosen.append(candidate)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
