"""One line of a file of shipped picks, and the record that it stands for.

A file is JSON lines: a header with the GPU and the environments that the lines name, then one line for each problem
with its pick, its default and what was measured of both. All that was measured stands in the evidence, elsewhere; a
line has the digest of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..core.candidate import fields_of
from ..core.problem import Problem
from ..errors import RecordError
from ..kernels.configs import encode
from ..kernels.registry import KERNELS
from .environment import HARD_FIELDS, SOFT_FIELDS, Environment
from .lookup import Document
from .racing import FIGURES
from .record_schema import SCHEMA, CandidateEntry, TuningRecord

KEPT_FIELDS = (*HARD_FIELDS, "compute_capability", *SOFT_FIELDS, "python", "package")
"""Fields of an environment that a shipped record has: those that do not change from minute to minute."""

_DIGITS = 6  # that figures are rounded to
_DIGESTS = {
    "knob_schema": "schema",
    "source_digest": "source",
    "code_digest": "code",
    "kernel_digest": "exact",
}
"""Field of an entry -> its name in a line."""
_DEFAULTS = asdict(Problem())
_FASTEST = {"ratio_to_best": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
"""Figures of the candidate that the others are compared with, which its line does not repeat."""


def lasting(environment: Environment) -> Environment:
    """An environment without clocks, power, temperature and time."""
    return Environment(**{name: getattr(environment, name) for name in KEPT_FIELDS})


def stated(environment: Environment) -> Document:
    """The fields of an environment that are known, for the header of a file."""
    return {name: value for name, value in environment.to_json().items() if value is not None}


def to_line(record: TuningRecord, evidence: str) -> Document:
    """The line of a record.

    Args:
        record: the record.
        evidence: digest of its line of evidence.

    Raises:
        RecordError: its pick or default is a candidate of another problem.
    """
    problem = asdict(record.problem)
    line: Document = {
        "problem": {name: value for name, value in problem.items() if value != _DEFAULTS[name]},
        "measured": {
            name: value
            for name, value in asdict(record.measured_problem).items()
            if value != problem[name]
        },
        "purpose": record.purpose,
        "arch": record.arch,
        "space": record.space_digest,
        "confirmed": record.confirmed,
        "environment": lasting(record.environment).digest,
        "evidence": evidence,
        "pick": _entry_line(record.picked, record.problem),
    }
    usual: Document = {"measured": {}, "purpose": record.problem.direction, "confirmed": True}
    line = {name: value for name, value in line.items() if usual.get(name) != value}
    default = record.entry(record.default)
    if record.default != record.pick:
        line["default"] = record.default
        if default is not None and default.measurement is not None:
            line["default"] = _entry_line(default, record.problem)
    return line


def _entry_line(entry: CandidateEntry, problem: Problem) -> Document:
    candidate = entry.candidate
    if candidate != candidate.of(problem, candidate.knobs):
        raise RecordError(f"{candidate.name} does not serve {problem.describe()}")
    line = encode(candidate.knobs)
    line |= {
        short: getattr(entry, name)
        for name, short in _DIGESTS.items()
        if getattr(entry, name) is not None
    }
    if entry.measurement is not None:
        figures = {name: getattr(entry.measurement, name) for name in FIGURES}
        if figures.items() >= _FASTEST.items():
            figures = {name: value for name, value in figures.items() if name not in _FASTEST}
        line |= {name: _rounded(value) for name, value in figures.items() if value is not None}
    if entry.proof is not None:
        line["proof"] = asdict(entry.proof)
    return line | {"estimate_us": _rounded(entry.estimate_us)}


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def states(line: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """True for a line whose problem has fields of these values."""
    stated = line.get("problem")
    if not isinstance(stated, Mapping):
        return True  # :func:`to_document` says that it is damaged
    return all(stated.get(name, _DEFAULTS[name]) == value for name, value in fields.items())


def to_document(line: Mapping[str, Any], environments: Mapping[str, Any]) -> Document:
    """The record of a line, in the JSON form of the user's own records.

    Args:
        line: see :func:`to_line`.
        environments: of the header, by digest.

    Raises:
        RecordError: a field is missing or unknown.
    """
    try:
        problem = _DEFAULTS | line["problem"]
        environment = environments[line["environment"]]
        entries = {"pick": line["pick"], "default": line.get("default")}
        documents = [
            _entry_document(name, entry, problem, line["environment"])
            for name, entry in entries.items()
            if isinstance(entry, Mapping)
        ]
        default = line.get("default", "pick")
        return {
            "schema": SCHEMA,
            "problem": problem,
            "measured_problem": problem | line.get("measured", {}),
            "purpose": line.get("purpose", problem["direction"]),
            "arch": line["arch"],
            "space_digest": line["space"],
            "pick": "pick",
            "default": default if isinstance(default, str) else "default",
            "confirmed": line.get("confirmed", True),
            "environment": environment,
            "environments": {line["environment"]: environment},
            "entries": documents,
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"a line of shipped records lacks or distorts a field: {error!r}"
        ) from error


def _entry_document(
    name: str, line: Mapping[str, Any], problem: Mapping[str, Any], environment: str
) -> Document:
    """An entry under a name that is only its place in the line: the candidate's own follows from its knobs."""
    config = {"family": KERNELS[line["kernel"]].family, **fields_of(Problem(**problem))}
    config |= {part: line[part] for part in ("kernel", "knobs") if part in line}
    timing = {part: line[part] for part in FIGURES if part in line}
    if timing and not timing.keys() & _FASTEST.keys():
        timing |= _FASTEST
    return {
        "name": name,
        "candidate": config,
        "outcome": {"kind": "ok", "reason": "", "log": "", "proof": line.get("proof")},
        "measurement": {**timing, "environment": environment} if timing else None,
        "estimate_us": line["estimate_us"],
        **{part: line.get(short) for part, short in _DIGESTS.items()},
    }


def rekeyed_line(line: Mapping[str, Any], record: TuningRecord) -> Document:
    """A line with the digests of a record that was made of it, and all else as it was."""
    kept = dict(line)
    for part, entry in (("pick", record.picked), ("default", record.entry(record.default))):
        if isinstance(kept.get(part), Mapping) and entry is not None:
            kept[part] = _entry_line(entry, record.problem)
    return kept
