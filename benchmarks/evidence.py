"""What measurements say of the cost model's own picks: whether they beat a policy's defaults, and by how much they err.

Three sources, all committed: the recorded searches of another implementation on an A100 and an RTX 4090; exhaustive
measurements of attention forward on an H200; and searches there, of which the pick, the default and the fastest other
are kept. A trial applies the rule by which predicted picks are made (:func:`chosen`) to one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from attention_autotuner.arch import Policy, resolve
from attention_autotuner.arch.resolution import KNOWN
from attention_autotuner.core.candidate import Candidate, Family
from attention_autotuner.core.problem import Direction, Op, Problem
from attention_autotuner.errors import RecordError
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.cost_model import rank, refine
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.kernels.shared.coefficients import FITTED
from attention_autotuner.tuning.class_pools import class_of
from attention_autotuner.tuning.record_schema import TuningRecord
from attention_autotuner.tuning.search import MIN_GAIN
from attention_autotuner.tuning.spills import check_spills

from .cost_model_regret import SavedReport, spec_from
from .tuning_logs import Log, LoggedRun, read_logs

ROOT = Path(__file__).resolve().parents[1]
EXHAUSTIVE = ROOT / "benchmarks" / "results" / "nvidia-h200" / "cost_model_regret.json"
RECORDS = ROOT / "benchmarks" / "results" / "nvidia-h200" / "records.jsonl"
KEPT = ROOT / "benchmarks" / "results" / "nvidia-h200" / "searches.json"
SCHEMA = 1  # of what is kept
TITLE = "what searches that shipped have measured: times over the best, by candidate"
MARGIN = 0.05  # predicted gain below which a default stays: about the model's own error, see docs/cost_model.md

LOGS, SAMPLES, SEARCHES = "logs", "exhaustive", "records"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measured problem, and what the rule would have served.

    Attributes:
        source: :data:`LOGS`, :data:`SAMPLES` or :data:`SEARCHES`.
        policy: the policy's name.
        family: of the kernels that were compared.
        problem: what was measured.
        predicted_gain: the model's time of the default over that of its own choice.
        own: measured time of the model's own choice over the best one's.
        default: measured time of the policy's default over the best one's.
    """

    source: str
    policy: str
    family: Family = "sm80"
    problem: Problem
    predicted_gain: float
    own: float
    default: float

    @property
    def served(self) -> float:
        """Measured time of what the rule serves over the best one's."""
        return self.own if chosen(self.predicted_gain) else self.default


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the trials say of one operation and direction under one policy.

    Attributes:
        trials: those that count.
        borrowed: whether they are another policy's, for want of own ones.
    """

    trials: tuple[Trial, ...]
    borrowed: bool

    @property
    def served(self) -> float:
        """Geometric mean of what the rule serves over the best."""
        return geometric_mean([trial.served for trial in self.trials])

    @property
    def own(self) -> float:
        """Geometric mean of the model's own choices over the best, whatever gain it predicts."""
        return geometric_mean([trial.own for trial in self.trials])

    @property
    def default(self) -> float:
        """Geometric mean of the policy's defaults over the best."""
        return geometric_mean([trial.default for trial in self.trials])

    @property
    def trusted(self) -> bool:
        """Whether the model may replace defaults.

        On a policy's own trials it must have beaten them by what a search asks of a pick. Borrowed ones are of a GPU
        whose measurements the defaults come from: there it is enough to have beaten them at all.
        """
        if self.borrowed or not self.trials:
            return bool(self.trials) and self.served < self.default
        return self.served * (1.0 + MIN_GAIN) <= self.default


def chosen(predicted_gain: float) -> bool:
    """Whether the model's choice replaces the default."""
    return predicted_gain >= 1.0 + MARGIN


def verdict(
    trials: Iterable[Trial],
    policy: str,
    op: Op,
    direction: Direction,
    family: Family = "sm80",
) -> Verdict:
    """What counts for a policy: its own GPU's trials, else the others'; of these, exhaustive ones where there are any.

    Trials of another family than the policy's default is of do not count.

    Records count only where nothing else does: they keep what a search found fast, so that a bad choice of the model is
    mostly missing from them (see :func:`record_trials` for what is done about that).
    """
    asked = (op, direction, family)
    about = [t for t in trials if (t.problem.op, t.problem.direction, t.family) == asked]
    own = [trial for trial in about if trial.policy == policy]
    counted = own or about
    full = [trial for trial in counted if trial.source != SEARCHES]
    return Verdict(trials=tuple(full or counted), borrowed=not own and bool(about))


def all_trials() -> tuple[Trial, ...]:
    """Every trial of the three sources."""
    return (*log_trials(), *exhaustive_trials(), *record_trials())


# --- the sources ----------------------------------------------------------------------------------


def log_trials() -> list[Trial]:
    """One trial for each log that has a run with the default's tile; runs spill there unseen."""
    trials = []
    for log in read_logs():
        policy = resolve(log.spec.name)
        ranked = log.ranked(FITTED)
        best_us = min(run.measured_us for run in ranked)
        like = [run for run in ranked if _same_tile(run, policy.default(log.problem).knobs)]
        if like:
            # Of several (V cut along the keys or not, other stages) the fastest: it does the default no wrong.
            default = min(like, key=lambda run: run.measured_us)
            trials.append(
                Trial(
                    source=LOGS,
                    policy=policy.name,
                    problem=log.problem,
                    predicted_gain=_gain(log, default, ranked[0]),
                    own=ranked[0].measured_us / best_us,
                    default=default.measured_us / best_us,
                )
            )
    return trials


def _gain(log: Log, default: LoggedRun, own: LoggedRun) -> float:
    return log.predict_us(default, FITTED) / log.predict_us(own, FITTED)


def _same_tile(run: LoggedRun, default: ForwardKnobs) -> bool:
    names = ("block_m", "block_n", "warps_m", "warps_n", "k_slice")
    return all(getattr(run.candidate.knobs, name) == getattr(default, name) for name in names)


def exhaustive_trials() -> list[Trial]:
    """One trial for each problem of the exhaustive measurements, after the compiler's report."""
    result = json.loads(EXHAUSTIVE.read_text(encoding="utf-8"))
    policy = type(resolve(result["policy"]))(spec_from(result["spec"]))
    trials = []
    for document in result["problems"]:
        problem = Problem(**document["problem"])
        default = policy.default(problem).name
        found: dict[str, tuple[float, float]] = {}
        for row in document["candidates"]:
            one = candidate_from_config({"mask": "none"} | row["config"])
            if "median_us" not in row:
                continue
            report = SavedReport(**row["report"])
            if one.name == default or check_spills(one, report, timed=False).ok:
                us = refine(problem, one, policy.spec, report).us
                found[one.name] = (us, row["ratio_to_best"])
        own = min(found, key=lambda name: (found[name][0], name))
        trials.append(
            Trial(
                source=SAMPLES,
                policy=policy.name,
                problem=problem,
                predicted_gain=found[default][0] / found[own][0],
                own=found[own][1],
                default=found[default][1],
            )
        )
    return trials


def record_trials(path: Path = KEPT) -> list[Trial]:
    """One trial for each search that is kept, see :func:`keep`, among the candidates of its default's family.

    The model's choice is its best of all legal candidates. One that is not kept was slower than what is kept beside the
    default, or spilled, or was never built: it is taken to be as slow as the slowest that is kept, default included, so
    that it never counts as a gain. How much it really lost is not known.
    """
    trials = []
    legal: dict[tuple[object, ...], list[Candidate]] = {}
    for search in json.loads(path.read_text(encoding="utf-8"))["searches"]:
        problem, default, timed = Problem(**search["problem"]), search["default"], search["ratios"]
        arch, gpu_name, family = search["policy"], search["gpu_name"], search["family"]
        policy = _policy_of(arch, gpu_name)
        # But for retention, the candidates of a class do not depend on the shape.
        shape = problem if problem.op == "retention" else class_of(problem)
        key = (arch, gpu_name, family, shape)
        if key not in legal:
            legal[key] = [one for one in policy.legal(problem) if one.family == family]
        ranked = rank(problem, legal[key], policy.spec)
        estimates = {one.name: found.us for one, found in ranked}
        if default not in estimates:
            continue  # no longer legal
        own = ranked[0][0].name
        best = min(timed.values())
        trials.append(
            Trial(
                source=SEARCHES,
                policy=arch,
                family=family,
                problem=problem,
                predicted_gain=estimates[default] / estimates[own],
                own=timed.get(own, max(timed.values())) / best,
                default=timed[default] / best,
            )
        )
    return trials


def keep(records: Path = RECORDS, path: Path = KEPT) -> int:
    """Take the timings of the evidence for shipped records into those that are kept, so that they outlive the records.

    Kept are records with timings of their default and of another candidate, one for each problem and family of the
    default, the latest. Deterministic mode is left out: it has no predicted picks.

    Returns:
        How many searches are kept now.
    """
    kept: dict[str, dict[str, Any]] = {}
    rows = json.loads(path.read_text(encoding="utf-8"))["searches"] if path.is_file() else []
    for line in records.read_text(encoding="utf-8").splitlines():
        try:
            record = TuningRecord.from_json(json.loads(line))
        except RecordError:
            continue  # of knobs that there are no longer
        default = record.entry(record.default)
        ratios = {
            entry.candidate.name: round(entry.measurement.ratio_to_best, 5)
            for entry in record.entries
            if entry.measurement is not None
        }
        if default is None or default.candidate.name not in ratios or len(ratios) < 2:
            continue
        if not record.problem.deterministic:
            rows.append(
                {
                    "policy": record.arch,
                    "gpu_name": record.environment.gpu_name,
                    "family": default.candidate.family,
                    "time_utc": record.environment.time_utc,
                    "problem": asdict(record.problem),
                    "default": default.candidate.name,
                    "ratios": ratios,
                }
            )
    for row in rows:  # the later replaces the earlier
        names = (row["policy"], row["gpu_name"], row["family"])
        kept[" ".join([*map(str, names), Problem(**row["problem"]).describe()])] = row
    lines = ",\n".join(f"  {json.dumps(kept[name])}" for name in sorted(kept))
    text = f'{{\n "schema": {SCHEMA},\n "title": "{TITLE}",\n "searches": [\n{lines}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8")
    return len(kept)


def _policy_of(arch: str, gpu_name: str | None) -> Policy:
    """The policy of a record, with its GPU's spec as it comes with the package, whatever was measured here since."""
    specs = [(spec, policy) for spec, policy in KNOWN if policy.name == arch]
    for spec, policy in specs:
        if any(name in (gpu_name or "") for name in spec.device_names):
            return policy(spec)
    spec, policy = specs[-1]
    return policy(spec)
