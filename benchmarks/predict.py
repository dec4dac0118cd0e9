"""The picks that the cost model predicts for GPUs nobody measured here: writes ``tuned/predicted/<policy>.json``.

    python -m benchmarks.predict                   # all policies; compiles what the store lacks
    python -m benchmarks.predict --policies A100   # some of them
    python -m benchmarks.predict --check           # says what is stale, compiles nothing

For each operation, direction and head-dim class the model chooses among a few kernels, and the compiler has its say on
those (:mod:`.prediction`). What shipped records have measured is kept in results/nvidia-h200/searches.json, and the
block of docs/cost_model.md that says how well the model does is written, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

from attention_autotuner import settings as settings_module
from attention_autotuner.arch import Policy
from attention_autotuner.codegen.build import Artifact, BuildTarget, build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import default_store
from attention_autotuner.codegen.toolchain import Toolchain, find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.identity import digest16, slug
from attention_autotuner.kernels.configs import knob_schema
from attention_autotuner.kernels.cost_model import estimate
from attention_autotuner.tuning.predicted import COLUMNS, SCHEMA, spec_digest
from attention_autotuner.tuning.record_schema import space_digest

from . import prediction_report
from .evidence import MARGIN, Trial, all_trials, keep
from .prediction import (
    POLICIES,
    ROUNDS,
    Choice,
    Contest,
    Family,
    defaults_only,
    families,
    verdict_of,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "python" / "attention_autotuner" / "tuned" / "predicted"
PAGE = ROOT / "docs" / "cost_model.md"
COMMAND = "python -m benchmarks.predict"
PROBES = 16  # candidates of a class whose estimates are in its fingerprint
CLASS_FIELDS = ("op", "direction", "mask", "form", "causal", "dim_qk", "dim_v")
STARTED = time.monotonic()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or say what is stale; status 1 if something is."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=[*POLICIES])
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the files")
    parser.add_argument("--cache-dir", type=Path, help="kernel store; the setting if not given")
    parser.add_argument("--jobs", type=int, help="compilations at once; the setting if not given")
    parser.add_argument("--check", action="store_true", help="write nothing, say what is stale")
    options = parser.parse_args(arguments)
    if not options.check:
        say(f"{keep()} searches are kept")
    trials = all_trials()
    policies = [POLICIES[name]() for name in options.policies]
    if options.check:
        reasons = [r for policy in policies for r in stale(policy, trials, options.output)]
        print("\n".join(reasons) or "nothing is stale")
        return 1 if reasons else 0
    changes = {"cache_dir": options.cache_dir, "jobs": options.jobs}
    changes = {name: value for name, value in changes.items() if value is not None}
    with settings_module.override(**changes):
        toolchain = find_toolchain(settings_module.current())
        for policy in policies:
            document = predict(policy, trials, toolchain)
            path = options.output / f"{slug(policy.name)}.json"
            options.output.mkdir(parents=True, exist_ok=True)
            path.write_text(dumps(document), encoding="utf-8")
            say(f"{path}: {prediction_report.summary(document)}")
    if options.output == FOLDER:
        text = prediction_report.page(PAGE.read_text(encoding="utf-8"), trials)
        PAGE.write_text(text, encoding="utf-8")
    return 0


def say(text: str) -> None:
    """A line of progress."""
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


# --- making a file --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """One family's share of a file."""

    family: Family
    trusted: bool
    choices: list[Choice]


def predict(policy: Policy, trials: Sequence[Trial], toolchain: Toolchain) -> dict[str, Any]:
    """A policy's document: all contests advance together, so that each round is one batch of builds."""
    contests: dict[Family, Contest] = {}
    for family in families():
        if verdict_of(policy, family.op, family.direction, trials).trusted:
            contests[family] = Contest(family=family, policy=policy)
            say(f"{policy.name}: {family.name}: {len(contests[family].times)} candidates ranked")
    for _ in range(ROUNDS):
        wanted = {family: contest.wanted() for family, contest in contests.items()}
        together = list(dict.fromkeys(one for each in wanted.values() for one in each))
        if not together:
            break
        say(f"{policy.name}: {len(together)} kernels to build")
        results = dict(zip(together, _build(together, policy, toolchain), strict=True))
        for family, contest in contests.items():
            for one in wanted[family]:
                result = results[one]
                contest.learn(one, result.report if isinstance(result, Artifact) else result)
    parts = [
        Part(
            family=family,
            trusted=family in contests,
            choices=contests[family].choices()
            if family in contests
            else defaults_only(family, policy),
        )
        for family in families()
    ]
    return {
        "schema": SCHEMA,
        "policy": policy.name,
        "created": datetime.now(timezone.utc).date().isoformat(),
        "spec": {
            "name": policy.spec.name,
            "num_sms": policy.spec.num_sms,
            "digest": spec_digest(policy),
        },
        "margin": MARGIN,
        "compiler": {
            "arch": policy.build_arch,
            "nvcc": toolchain.nvcc_version,
            "cutlass": toolchain.cutlass_version,
        },
        "columns": list(COLUMNS),
        "groups": [group for part in parts for group in _groups(part, policy)],
    }


def _build(
    candidates: Sequence[Candidate], policy: Policy, toolchain: Toolchain
) -> Sequence[Artifact | Any]:
    def progress(done: int, total: int, name: str, seconds: float) -> None:
        say(f"{done}/{total} {name} in {seconds:.0f} s")

    return build(
        [render(one) for one in candidates],
        BuildTarget(arch=policy.build_arch),
        toolchain=toolchain,
        store=default_store(),
        jobs=settings_module.current().jobs,
        progress=progress,
    )


def _groups(part: Part, policy: Policy) -> list[dict[str, Any]]:
    """The choices of a family, those of one class together; causal ones are a class of their own."""
    groups, digest = [], fingerprint(part.family, policy, trusted=part.trusted)
    by_class = groupby(part.choices, key=lambda choice: choice.problem.causal)
    for choices in (list(rows) for _, rows in by_class):
        first = choices[0].problem
        kernels = list(dict.fromkeys(c.candidate for c in choices if c.candidate is not None))
        groups.append(
            {
                "class": {name: getattr(first, name) for name in CLASS_FIELDS},
                "knob_schemas": [knob_schema(one.kernel) for one in kernels],
                "fingerprint": digest,
                "trusted": part.trusted,
                "kernels": [one.config for one in kernels],
                "picks": [_row(choice, kernels) for choice in choices],
            }
        )
    return groups


def _row(choice: Choice, kernels: list[Candidate]) -> list[Any]:
    """The values of :data:`~attention_autotuner.tuning.predicted.COLUMNS`."""
    problem, runner_up = choice.problem, choice.runner_up_us
    return [
        problem.batch,
        problem.heads_q,
        problem.heads_kv,
        problem.seqlen_q,
        None if choice.candidate is None else kernels.index(choice.candidate),
        round(choice.estimate_us, 1),
        round(choice.default_us, 1),
        None if runner_up is None else round(runner_up, 1),
    ]


def fingerprint(family: Family, policy: Policy, *, trusted: bool) -> str:
    """Digest of a family's shapes, defaults and space, and of what the model says to a sample of it.

    A change of the space, of the model or of the spec that could matter to it changes it; a comment does not. What the
    model may not replace has no use for what else is offered.
    """
    shapes = (family.shapes[0], family.shapes[-1])
    legal = policy.legal(shapes[0]) if trusted else []
    probes = legal[:: max(1, len(legal) // PROBES)]
    defaults = [policy.default(problem) for problem in family.shapes]
    times = [
        f"{estimate(problem, one, policy.spec).us:.5g}"
        for problem in shapes
        for one in (defaults[0], *probes)
    ]
    names = [one.name for one in (*probes, *defaults)]
    described = [problem.describe() for problem in family.shapes]
    return digest16(space_digest(legal), names, times, described)


def dumps(document: dict[str, Any]) -> str:
    """JSON with a line for each kernel and each shape."""
    lines = json.dumps({**document, "groups": []}, indent=1).removesuffix("[]\n}").splitlines()
    groups = []
    for group in document["groups"]:
        head = {k: v for k, v in group.items() if k not in ("kernels", "picks")}
        body = [f'   "{name}": {json.dumps(value)}' for name, value in head.items()]
        for name in ("kernels", "picks"):
            rows = ",\n".join(f"    {json.dumps(row)}" for row in group[name])
            body.append(f'   "{name}": [\n{rows}\n   ]' if rows else f'   "{name}": []')
        groups.append("  {\n" + ",\n".join(body) + "\n  }")
    return "\n".join(lines) + "[\n" + ",\n".join(groups) + "\n ]\n}\n"


# --- looking at one -------------------------------------------------------------------------------


def stale(policy: Policy, trials: Sequence[Trial], folder: Path = FOLDER) -> list[str]:
    """What a policy's file no longer agrees with; nothing when it is as it would be made now.

    Registers and spills are not looked at: only the compiler knows them.
    """
    path = folder / f"{slug(policy.name)}.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    found = []
    if document["spec"]["digest"] != spec_digest(policy):
        found.append(f"{path.name}: the spec {policy.spec.name} changed")
    if document["margin"] != MARGIN:
        found.append(f"{path.name}: the margin is {MARGIN} now")
    groups = {tuple(group["class"].values()): group for group in document["groups"]}
    for family in families():
        trusted = verdict_of(policy, family.op, family.direction, trials).trusted
        digest = fingerprint(family, policy, trusted=trusted)
        for causal, shapes in groupby(family.shapes, key=lambda problem: problem.causal):
            first = next(iter(shapes))
            group = groups.pop(tuple(getattr(first, name) for name in CLASS_FIELDS), None)
            name = f"{path.name}: {family.name}{' causal' if causal else ''}"
            if group is None:
                found.append(f"{name}: missing")
            elif group["trusted"] != trusted:
                found.append(f"{name}: measurements now say trusted={trusted}")
            elif group["fingerprint"] != digest:
                found.append(f"{name}: the shapes, the space, the cost model or the spec changed")
    found += [f"{path.name}: {key} is predicted no longer" for key in groups]
    return found


if __name__ == "__main__":
    sys.exit(main())
