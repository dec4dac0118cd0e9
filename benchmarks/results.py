"""Result files: one for each suite and GPU, compact, with every row of the last run that measured it.

A file holds the suite, its runs with their environments, a summary for each comparison, and a row a line. A row of an
earlier run stays until it is measured again; a trial that has never been measured has a reason instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from statistics import NormalDist, geometric_mean
from typing import Any

from attention_autotuner.arch import Policy
from attention_autotuner.codegen.files import write_atomic
from attention_autotuner.core.identity import slug
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning.environment import Environment, installed_version

from .baselines import BASELINES
from .baselines.base import MODES
from .contenders import DETERMINISTIC
from .suites import Suite, Trial

ROOT = Path(__file__).resolve().parents[1]
TUNED = ROOT / "python" / "attention_autotuner" / "tuned"
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = 2
LIBRARIES = (
    "triton",
    "fla-core",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cudnn-cu13",
)
UNITS = {"tflops": "TFLOP/s", "gb_per_s": "GB/s"}
LEVEL = NormalDist().inv_cdf(0.975)  # standard errors on either side of a 95 % interval
DIGITS = 6  # significant ones of a figure that is written
FEWER_DIGITS = {"spread_us": 3, "error": 3, "tflops": 4}
_DEFAULTS = asdict(Problem())

Document = dict[str, Any]


# --- files ----------------------------------------------------------------------------------------


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document compactly: its fields, and the items of a list or mapping among them, a line each."""
    fields = ",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in document.items())
    write_text(path, f"{{\n{fields}\n}}\n")


def write_text(path: Path, text: str) -> None:
    """Write a text whole, for everybody to read, into a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    path.chmod(0o644)


def _lines(value: Any) -> str:
    if isinstance(value, Mapping) and any(isinstance(item, Mapping) for item in value.values()):
        items = [f"{json.dumps(name)}: {_compact(item)}" for name, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n}"
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(rounded(value), separators=(",", ":"))


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """The value with every float in it cut to so many significant digits, or to :data:`FEWER_DIGITS`."""
    if isinstance(value, float):
        short = float(f"{value:.{digits}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    if isinstance(value, Mapping):
        return {name: rounded(item, FEWER_DIGITS.get(name, digits)) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def problem_of(row: Mapping[str, Any]) -> Problem:
    """The problem of a row, which names only the fields that differ from a problem's defaults."""
    return Problem(**row["problem"])


def file_of(folder: Path, suite: str, gpu_name: str | None) -> Path:
    """The result file of a suite on a GPU."""
    return folder / slug(gpu_name or "unknown") / f"{suite}.json"


class SuiteFile:
    """The result file of one suite on one GPU.

    Args:
        folder: of all results.
        suite: the suite.
        environment: of the present run.
        policy: whose picks.
        seconds: of rounds a trial.
    """

    def __init__(
        self, folder: Path, suite: Suite, environment: Environment, policy: Policy, seconds: float
    ) -> None:
        self.path = file_of(folder, suite.name, environment.gpu_name)
        earlier = json.loads(self.path.read_text("utf-8")) if self.path.is_file() else {}
        self._rows: dict[str, dict[str, Any]] = {row["key"]: row for row in earlier.get("rows", [])}
        self._reasons: dict[str, str] = dict(earlier.get("unmeasured", {}))
        self._runs: dict[str, Any] = dict(earlier.get("runs", {}))
        self._run = environment.digest
        self._present = {
            "environment": environment.to_json(),
            "libraries": library_versions(),
            "seconds": seconds,
        }
        self._suite, self._policy = suite, policy

    def take(self, trial: Trial, result: Mapping[str, Any] | str) -> None:
        """Keep a row, or why there is none, and write the file whole."""
        if isinstance(result, str):
            if trial.key not in self._rows:
                self._reasons[trial.key] = result
        else:
            fields = asdict(trial.problem)
            problem = {name: value for name, value in fields.items() if value != _DEFAULTS[name]}
            earlier = [self._rows.pop(key) for key in self._keys_of(trial)]
            self._rows[trial.key] = rounded({**result, "problem": problem, "run": self._run})
            for row in earlier:
                if (rest := in_other_modes(row, trial)) is not None:
                    self._rows[rest["key"]] = rest
            self._runs[self._run] = self._present
            self._reasons.pop(trial.key, None)
        write(self.path, self.document())

    def _keys_of(self, trial: Trial) -> list[str]:
        """The rows of a trial's case that have some of its modes."""
        held = [key for mode in MODES if (key := trial.key_from(mode)) in self._rows]
        return [key for key in held if not set(trial.modes).isdisjoint(self._rows[key]["modes"])]

    def document(self) -> Document:
        """The document to write."""
        place = {case.name: index for index, case in enumerate(self._suite.cases)}
        rows = sorted(
            self._rows.values(),
            key=lambda row: (
                place.get(row["case"], len(place)),
                problem_of(row).direction != "forward",
                row["key"],
            ),
        )
        names = {name.split()[0] for row in rows for name in row["entries"]}
        runs = {name: run for name, run in self._runs.items() if name in {r["run"] for r in rows}}
        return {
            "schema": SCHEMA,
            "suite": self._suite.name,
            "title": self._suite.title,
            "unit": self._suite.unit,
            "policy": self._policy.name,
            "spec": self._policy.spec.name,
            "baselines": {name: b.title for name, b in BASELINES.items() if name in names},
            "runs": runs,
            "summary": summarise(self._suite, rows),
            "rows": rows,
            "unmeasured": self._reasons,
        }


def library_versions() -> dict[str, str | None]:
    """The versions of the libraries that baselines come from; None where one is not installed."""
    return {name: installed_version(name) for name in LIBRARIES}


# --- figures of rows ------------------------------------------------------------------------------


def interval(ratio: float, error: float) -> tuple[float, float]:
    """The 95 % confidence interval of a ratio.

    Args:
        ratio: the median of paired ratios.
        error: standard error of its logarithm, which :meth:`Race.compare` widens where samples are few.

    Raises:
        ValueError: the ratio is not positive, or the error is negative.
    """
    if not ratio > 0.0 or not error >= 0.0:
        raise ValueError(
            f"an interval needs a positive ratio and an error of at least 0, got {ratio} and {error}"
        )
    return exp(log(ratio) - LEVEL * error), exp(log(ratio) + LEVEL * error)


def standing(ratio: float, error: float) -> str:
    """``faster``, ``slower`` or ``even``: what the interval of our speed over another's says of ours."""
    low, high = interval(ratio, error)
    return "faster" if low > 1.0 else "slower" if high < 1.0 else "even"


def half_width(ratio: float, error: float) -> str:
    """Half of an interval in percent of its ratio, e.g. ``±0.4%``."""
    low, high = interval(ratio, error)
    return f"±{(high - low) / 2.0 / ratio:.1%}"


def ratio_text(ratio: float) -> str:
    """A ratio with two decimals, or three where two would hide which side of 1 it is on."""
    return f"{ratio:.3f}" if abs(ratio - 1.0) < 0.005 else f"{ratio:.2f}"


def rate(row: Mapping[str, Any], label: str, unit: str) -> float | None:
    """The rate of one of a row's entries in a suite's unit; None where it has no time.

    ``gb_per_s`` is of the bytes that must move, each tensor once.
    """
    entry = row["entries"].get(label, {})
    if "median_us" not in entry:
        return None
    if unit == "gb_per_s":
        return float(problem_of(row).bytes_moved / entry["median_us"] / 1e3)
    return float(entry["tflops"])


def failure(row: Mapping[str, Any], label: str) -> str:
    """The reason why an entry of a row has no time; empty where it has one."""
    entry = row["entries"].get(label, {"outcome": {"kind": "untimed", "reason": ""}})
    if "median_us" in entry:
        return ""
    kind, reason = entry["outcome"]["kind"], entry["outcome"]["reason"]
    return str(reason if kind == "refused" else f"{kind.replace('_', ' ')}: {reason}".rstrip(": "))


def in_other_modes(row: Mapping[str, Any], trial: Trial) -> dict[str, Any] | None:
    """The part of a row that is of modes that a trial does not measure, with its run; None where there is none."""
    modes = [mode for mode in row["modes"] if mode not in trial.modes]
    if not modes:
        return None

    def kept(name: str) -> bool:
        *_, last = name.split()
        if last == "autograd":  # ours beside a step of others through autograd, too
            return not {"step", last}.isdisjoint(modes)
        return (last if last in MODES else row["modes"][0]) in modes

    return {
        **row,
        "key": trial.key_from(modes[0]),
        "modes": modes,
        "ours": next(name for name in row["entries"] if kept(name)),
        **{part: {n: v for n, v in row[part].items() if kept(n)} for part in ("entries", "ratios")},
    }


def comparisons(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Comparison -> the rows that were to hold it: baselines in one mode, and our deterministic mode."""
    named: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        for name in row["entries"]:
            if name.split()[0] in BASELINES or name == DETERMINISTIC:
                named.setdefault(name, []).append(row)
    return named


def summarise(suite: Suite, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per comparison: geometric mean and least of our speed over the other's, and the bars that are missed.

    A problem that the other computed and we did not is a missed bar of its own.
    """
    summary = {}
    for name, compared in comparisons(rows).items():
        ratios = {row["key"]: row["ratios"][name] for row in compared if name in row["ratios"]}
        if not ratios:
            continue
        least = min(ratios, key=lambda key: float(ratios[key]["ratio"]))
        figures: dict[str, Any] = {
            "problems": len(ratios),
            "geometric_mean": geometric_mean([ratio["ratio"] for ratio in ratios.values()]),
            "min": ratios[least]["ratio"],
            "min_at": least,
        }
        standings = [standing(ratio["ratio"], ratio["error"]) for ratio in ratios.values()]
        figures |= {word: standings.count(word) for word in ("faster", "even", "slower")}
        bars = suite.bars.get(name, {})
        missed = [figure for figure, bar in bars.items() if figures[figure] < bar]
        for row in compared:
            problem, key = problem_of(row), row["key"]
            of_rows = suite.row_bars.get(name, {})
            bar = of_rows.get(row["case"], of_rows.get(f"{problem.dim_qk}/{problem.dim_v}", 0.0))
            if name in suite.tile_bars and "share_of_tiles" in row and key in ratios:
                bar = max(bar, tile_bar(row, name, *suite.tile_bars[name]))
            if key in ratios and ratios[key]["ratio"] < bar:
                missed.append(f"{key} ({bar:.3g})")
            elif key not in ratios and "median_us" in row["entries"][name]:
                missed.append(key)
        summary[name] = {**figures, "missed": missed}
    return summary


def tile_bar(row: Mapping[str, Any], name: str, factor: float, us: float) -> float:
    """The least speed over ours on all tiles of a row that visits a share of these; see ``Suite.tile_bars``."""
    all_us = row["entries"][name]["median_us"]
    return float(all_us / (factor * row["share_of_tiles"] * all_us + us))


def table(document: Mapping[str, Any]) -> list[str]:
    """A compact table for a terminal; ``!`` marks a loss, ``=`` what cannot be told apart.

    Below it stands why cells are empty.
    """
    unit, rows = document["unit"], document["rows"]
    names = [name for name in comparisons(rows) if name != DETERMINISTIC]
    lines = [["case", "mode", "layer", "us", UNITS[unit], *names]]
    absent: dict[str, list[str]] = {}
    for row in rows:
        reached, entry = rate(row, row["ours"], unit), row["entries"].get(row["ours"], {})
        figures = [failure(row, row["ours"]), ""]
        if reached is not None:
            figures = [f"{entry['median_us']:.1f}", f"{reached:.0f}"]
        ratios = [speed_text(row["ratios"].get(name)) for name in names]
        lines.append([row["case"], row["modes"][0], row["layer"], *figures, *ratios])
        for name in names:
            if name in row["entries"] and (reason := failure(row, name)):
                absent.setdefault(f"{name}: {reason}", []).append(row["case"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    text += [f"{reason} ({len(cases)} rows)" for reason, cases in absent.items()]
    return text + [f"not measured: {key}: {why}" for key, why in document["unmeasured"].items()]


def speed_text(ratio: Mapping[str, float] | None) -> str:
    """Our speed over another's with half its interval, e.g. ``1.17 ±0.4%``, and a mark where it is no gain."""
    if ratio is None:
        return ""
    speed, error = ratio["ratio"], ratio["error"]
    mark = {"faster": "", "even": "=", "slower": "!"}[standing(speed, error)]
    return f"{ratio_text(speed)} {half_width(speed, error)}{mark}"
