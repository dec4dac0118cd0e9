"""The result file of a suite, and what its rows say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_autotuner.arch import Policy
from attention_autotuner.codegen.files import write_atomic
from attention_autotuner.core.identity import slug
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning.environment import Environment

from .confidence import LEVEL, half_width, ratio_text, verdict
from .implementations import IMPLEMENTATIONS, WAYS, Implementation
from .suites import SUITES, Trial
from .verdict import library_versions

SCHEMA = 1
UNITS = {"tflops": "TFLOP/s", "gb_per_s": "GB/s"}
MARKS = {"faster": "", "even": "=", "slower": "!"}


class SuiteFile:
    """The result file of one suite on one GPU; rows of earlier runs stay until they are measured anew.

    Args:
        folder: of all results.
        suite: its name.
        environment: of the present run.
        policy: whose picks.
        peers: whom this run meets.
        seconds: of rounds a trial.
    """

    def __init__(
        self,
        folder: Path,
        suite: str,
        environment: Environment,
        policy: Policy,
        peers: Sequence[Implementation],
        seconds: float,
    ) -> None:
        gpu = slug(environment.gpu_name or "unknown")
        self.path = folder / gpu / f"suite_{suite}.json"
        earlier = {}
        if self.path.is_file():
            earlier = json.loads(self.path.read_text(encoding="utf-8"))
        self._rows: dict[str, dict[str, Any]] = {row["key"]: row for row in earlier.get("rows", [])}
        self._reasons: dict[str, str] = dict(earlier.get("unmeasured", {}))
        self._runs: dict[str, Any] = dict(earlier.get("runs", {}))
        self._run = environment.digest
        self._present = {
            "environment": environment.to_json(),
            "libraries": library_versions(),
            "seconds_per_case": seconds,
            "peers": [each.name for each in peers],
        }
        self._suite = SUITES[suite]
        self._policy = policy
        self._environment = environment

    def take(self, trial: Trial, found: dict[str, Any] | str) -> None:
        """Keep a row, or why there is none, and write the file whole."""
        if isinstance(found, str):
            if trial.key not in self._rows:
                self._reasons[trial.key] = found
        else:
            self._rows[trial.key] = {**found, "run": self._run}
            self._runs[self._run] = self._present
            self._reasons.pop(trial.key, None)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, json.dumps(self.document(), indent=1) + "\n")

    def document(self) -> dict[str, Any]:
        """What is written down."""
        place = {case.name: index for index, case in enumerate(self._suite.cases)}
        rows = sorted(
            self._rows.values(),
            key=lambda row: (
                place.get(row["case"], len(place)),
                WAYS.index(row["way"]),
                row["key"],
            ),
        )
        used = {row["run"] for row in rows}
        met = [name for name in IMPLEMENTATIONS if any(name in row["contests"] for row in rows)]
        return {
            "benchmark": f"suite_{self._suite.name}",
            "schema": SCHEMA,
            "suite": self._suite.name,
            "title": self._suite.title,
            "unit": self._suite.unit,
            "policy": self._policy.name,
            "spec": self._policy.spec.name,
            "confidence": LEVEL,
            "peers": {name: IMPLEMENTATIONS[name].title for name in met},
            "environment": self._environment.to_json(),
            "runs": {name: run for name, run in self._runs.items() if name in used},
            "rows": rows,
            "unmeasured": self._reasons,
        }


def reasons(row: Mapping[str, Any]) -> dict[str, str]:
    """Peer -> why it has no time in a row."""
    found = {}
    for name in row["contests"]:
        entry = row["entries"].get(name)
        if entry is None or "median_us" not in entry:
            outcome = {"kind": "untimed", "reason": ""} if entry is None else entry["outcome"]
            told = f"{outcome['kind']}: {outcome['reason']}"
            found[name] = outcome["reason"] if outcome["kind"] == "refused" else told
    return found


def rate(row: Mapping[str, Any], label: str, unit: str) -> float | None:
    """What one of a row's entries reached, in a suite's unit; None where it has no time.

    ``gb_per_s`` is of the bytes that must move, each tensor once.
    """
    entry = row["entries"].get(label, {})
    if "median_us" not in entry:
        return None
    if unit == "gb_per_s":
        return float(Problem(**row["problem"]).bytes_moved / entry["median_us"] / 1e3)
    return float(entry["tflops"])


def speed_text(found: Mapping[str, float] | None) -> str:
    """Our speed over another's with half its interval, e.g. ``1.17 ±0.4%``, and a mark where it is no gain."""
    if found is None:
        return ""
    mark = MARKS[verdict(found["low"], found["high"])]
    return f"{ratio_text(found['ratio'])} {half_width(found['ratio'], found['low'], found['high'])}{mark}"


def table(document: Mapping[str, Any]) -> list[str]:
    """A compact table for a terminal; ``!`` marks a loss, ``=`` what cannot be told apart.

    Below it stands why cells are empty.
    """
    unit = document["unit"]
    names = list(document["peers"])
    head = ["case", "way", "layer", "us", UNITS[unit], *names]
    lines = []
    absent: dict[str, dict[str, list[str]]] = {}
    for row in document["rows"]:
        entry, reached = row["entries"].get(row["ours"], {}), rate(row, row["ours"], unit)
        timed = "median_us" in entry
        figures = [f"{entry['median_us']:.1f}", f"{reached:.0f}"] if timed else [_kind(entry), ""]
        ratios = [speed_text(row["ratios"].get(name)) for name in names]
        lines.append([row["case"], row["way"], row["layer"], *figures, *ratios])
        for name, reason in reasons(row).items():
            absent.setdefault(name, {}).setdefault(reason, []).append(row["case"])
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *lines]
    ]
    for name, each in absent.items():
        text += [f"{name}: {reason} ({len(cases)} rows)" for reason, cases in each.items()]
    text += [f"not measured: {key}: {reason}" for key, reason in document["unmeasured"].items()]
    return text


def _kind(entry: Mapping[str, Any]) -> str:
    return str(entry.get("outcome", {}).get("kind", "untimed"))
