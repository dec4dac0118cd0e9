"""The loss of the cost model's first picks against an exhaustive measurement, and a fit of its coefficients.

    python -m benchmarks.cost_model_regret measure --output regret.json     # needs a GPU
    python -m benchmarks.cost_model_regret measure --build-only             # fills the kernel cache, no GPU needed
    python -m benchmarks.cost_model_regret fit regret.json                  # arithmetic only

``measure`` takes four problems of two head-dim classes. Each is measured on a sample of 96 candidates that is fixed by
a seed, stratified, and the same for problems of one class but for the model's own first picks; kernels that a cache
folder holds already are not built again, so a folder filled elsewhere can be carried to the GPU. Every kernel is
verified on small shapes before it is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from attention_autotuner import settings as settings_module
from attention_autotuner.arch import ArchSpec, Policy, resolve
from attention_autotuner.codegen.files import read_text
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Ok, Outcome
from attention_autotuner.core.problem import Problem, of_shape
from attention_autotuner.core.report import CompilerReport
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.cost_model import estimate, rank, refine
from attention_autotuner.kernels.shared.calibration import Sample, calibrate, loss
from attention_autotuner.kernels.shared.coefficients import FITTED, Coefficients
from attention_autotuner.tuning.class_pools import small_problem
from attention_autotuner.tuning.pipeline import Built, LocalPipeline, Pipeline
from attention_autotuner.tuning.racing import FIGURES
from attention_autotuner.tuning.stages import built_of

from .contenders import Results, usable
from .exhaustive import SAMPLE, Regret, regret, sample
from .results import write_text

# 16k tokens of hidden size 2048, as in the published comparisons of attention kernels.
PROBLEMS = (
    of_shape((4, 16, 4096, 128, 128)),
    of_shape((16, 16, 1024, 128, 128), causal=True),
    of_shape((8, 32, 2048, 64, 64), causal=True),
    of_shape((32, 32, 512, 64, 64)),
)
SCHEMA = 1
REPORTED = (
    "registers",
    "spill_store_bytes",
    "spill_load_bytes",
    "static_smem_bytes",
    "loop_spills",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="build, verify and time a sample per problem")
    measuring.add_argument("--device-type", help="a policy's name; the present GPU's by default")
    measuring.add_argument("--cache-dir", type=Path, help="kernel cache; the setting by default")
    measuring.add_argument("--jobs", type=int, help="compilations at once")
    measuring.add_argument("--size", type=int, default=SAMPLE, help="candidates per problem")
    measuring.add_argument("--seed", type=int, default=0)
    measuring.add_argument("--seconds", type=float, default=15.0, help="of rounds per problem")
    measuring.add_argument("--problems", type=int, nargs="*", help="indices into the four")
    measuring.add_argument("--build-only", action="store_true")
    measuring.add_argument("--output", type=Path, help="packed where the name ends in .gz")
    fitting = commands.add_parser("fit", help="fit the coefficients to measured files")
    fitting.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    return measure(options) if options.command == "measure" else fit(options.files)


# --- measure --------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> int:
    """Build every sample in one batch, then verify and race problem by problem."""
    changes = {"cache_dir": options.cache_dir, "jobs": options.jobs}
    changes = {name: value for name, value in changes.items() if value is not None}
    with settings_module.override(**changes) as settings:
        policy = resolve(options.device_type)
        chosen = PROBLEMS if not options.problems else [PROBLEMS[i] for i in options.problems]
        samples = {problem: sample_of(problem, policy, options) for problem in chosen}
        pipeline = LocalPipeline(policy, settings)
        start = time.monotonic()

        def progress(done: int, total: int, message: str, seconds: float) -> None:
            print(f"[{time.monotonic() - start:6.0f} s] {done}/{total} {message}", file=sys.stderr)

        built = built_of(
            (c for candidates in samples.values() for c in candidates), pipeline, progress
        )
        if options.build_only:
            return 0
        if not pipeline.can_measure():
            print("no GPU here: nothing can be measured", file=sys.stderr)
            return 1
        problems = {candidate: small_problem(candidate) for candidate in built}
        right, checks = usable(problems, built, pipeline)
        for candidate, outcome in checks.items():
            if not outcome.ok:
                print(f"{candidate.name}: {outcome}", file=sys.stderr)
        documents = [
            measure_one(
                pipeline, policy, problem, candidates, built, right, checks, options.seconds
            )
            for problem, candidates in samples.items()
        ]
    summary = summarise(documents)
    result = {
        "schema": SCHEMA,
        "environment": pipeline.environment.to_json(),
        "spec": asdict(policy.spec),
        "policy": policy.name,
        "sample": {"size": options.size, "seed": options.seed},
        "summary": summary,
        "problems": documents,
    }
    print(json.dumps(summary, indent=1))
    if options.output is not None:
        write_text(options.output, json.dumps(result) + "\n")
    return 0


def sample_of(problem: Problem, policy: Policy, options: argparse.Namespace) -> list[Candidate]:
    """The candidates that are measured for a problem."""
    ranked = rank(problem, policy.legal(problem), policy.spec)
    return sample(ranked, policy.default(problem), size=options.size, seed=options.seed)


def measure_one(
    pipeline: Pipeline,
    policy: Policy,
    problem: Problem,
    candidates: Sequence[Candidate],
    built: Results,
    right: Mapping[Candidate, Built],
    checks: Mapping[Candidate, Outcome],
    seconds: float,
) -> dict[str, Any]:
    """Race one problem's sample; the document that is saved."""
    running = {candidate.name: right[candidate] for candidate in candidates if candidate in right}
    timings, interrupted = pipeline.measure(
        problem, running, budget_seconds=seconds, keep=(), on_round=lambda rounds, still: None
    )
    if interrupted:
        raise KeyboardInterrupt
    by_name = {timing.name: timing for timing in timings}
    rows = []
    for candidate in candidates:
        result, timing = built[candidate], by_name.get(candidate.name)
        expected = estimate(problem, candidate, policy.spec)
        row: dict[str, Any] = {
            "name": candidate.name,
            "config": candidate.config,
            "outcome": (checks[candidate] if timing is None else timing.outcome).to_json(),
            "estimate_us": expected.us,
            "limiter": expected.limiter,
        }
        if not isinstance(result, Outcome):
            row["report"] = {name: getattr(result.report, name) for name in REPORTED}
            row["refined_us"] = refine(problem, candidate, policy.spec, result.report).us
        if timing is not None and timing.samples:
            row |= {name: getattr(timing, name) for name in FIGURES}
        rows.append(row)
    ratios = {t.name: t.ratio_to_best for t in timings if t.outcome.ok and t.samples}
    ranked = rank(problem, policy.legal(problem), policy.spec)
    losses = regret(ranked, policy.default(problem), ratios)
    print(f"{problem.describe()}: {losses}", file=sys.stderr)
    return {
        "problem": asdict(problem),
        "environment": pipeline.environment.to_json(),
        "regret": asdict(losses),
        "candidates": rows,
    }


def summarise(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over the problems: best of the first picks over the exhaustive best."""
    regrets = [document["regret"] for document in documents]
    kinds = {
        kind: {
            str(picks): geometric_mean([losses[kind][picks] for losses in regrets])
            for picks in regrets[0][kind]
        }
        for kind in ("ranked", "shortlisted")
    }
    return {**kinds, "default": geometric_mean([losses["default"] for losses in regrets])}


# --- fit ------------------------------------------------------------------------------------------


def fit(files: Sequence[Path]) -> int:
    """Fit the coefficients to measured files and show what the fit changes."""
    samples: list[Sample] = []
    documents = []
    for path in files:
        result = json.loads(read_text(path))
        policy = type(resolve(result["policy"]))(spec_from(result["spec"]))
        for document in result["problems"]:
            problem = Problem(**document["problem"])
            documents.append((policy, problem, document))
            samples += samples_of(path.stem, policy, problem, document)
    fitted = calibrate(samples, FITTED)
    for title, coefficients in (("shipped", FITTED), ("fitted", fitted)):
        print(f"{title}: loss {loss(samples, coefficients):.5f}")
        for policy, problem, document in documents:
            losses = regret_of(policy, problem, document, coefficients)
            shares = ", ".join(f"{k}: {v:.4f}" for k, v in losses.shortlisted.items())
            correlation = f"correlation {losses.correlation:.3f}"
            print(f"  {problem.describe()}: {correlation}, shortlisted {shares}")
    print(fitted)
    return 0


def spec_from(data: dict[str, Any]) -> ArchSpec:
    """The spec that was measured under: a GPU's own may differ from its policy's."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return ArchSpec(**fields)


def samples_of(
    source: str, policy: Policy, problem: Problem, document: dict[str, Any]
) -> list[Sample]:
    """The measured candidates of a document, with times that share the best one's clocks."""
    timed = [row for row in document["candidates"] if "median_us" in row]
    best_us = min(row["median_us"] / row["ratio_to_best"] for row in timed)
    group = f"{source} {problem.describe()}"
    samples = []
    for row in timed:
        # Saved documents hold the worst of all kernels only.
        report = CompilerReport(**row["report"], stack_bytes=0, kernels=(), warnings=())
        predict = partial(_refined_us, problem, saved_candidate(row), policy.spec, report)
        measured_us = best_us * row["ratio_to_best"]
        samples.append(Sample(group=group, measured_us=measured_us, predict=predict))
    return samples


def _refined_us(*arguments: Any) -> float:
    return refine(*arguments).us


def saved_candidate(row: Mapping[str, Any]) -> Candidate:
    """The candidate of a saved row, which may be older than masks and than today's names are."""
    return candidate_from_config({"mask": "none"} | row["config"])


def regret_of(
    policy: Policy, problem: Problem, document: dict[str, Any], coefficients: Coefficients = FITTED
) -> Regret:
    """The loss of the first picks among the candidates that a saved document has measured.

    Args:
        policy: with the spec to predict under.
        problem: the document's.
        document: one problem of a saved result.
        coefficients: of the model.
    """
    ratios = {
        saved_candidate(row).name: row["ratio_to_best"]
        for row in document["candidates"]
        if "ratio_to_best" in row and row["outcome"]["kind"] == Ok.kind
    }
    offered = [candidate for candidate in policy.legal(problem) if candidate.name in ratios]
    ranked = rank(problem, offered, policy.spec, coefficients)
    return regret(ranked, policy.default(problem), ratios)


if __name__ == "__main__":
    sys.exit(main())
