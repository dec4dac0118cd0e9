"""The cost model's errors as measured searches show them: small regression trees over knobs and cost terms, as JSON.

A residual is fitted elsewhere (:mod:`~..tuning.learning`) and needs no library to be read or asked. It changes the
order in which a search tries candidates, and nothing else: estimates stay those of the analytic model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, isfinite, log2
from typing import Any

from ..core.candidate import Candidate
from ..core.problem import Problem
from ..errors import RecordError
from .shared.estimates import Estimate

SCHEMA = 1
LARGEST = 0.7  # of a correction, in log space: what a tree says beyond is noise
SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "dim_qk", "dim_v")

Tree = float | tuple[int, float, Any, Any]
"""A leaf's value, or a feature's place, a threshold, and the trees up to it and beyond it."""


def scope_of(problem: Problem, candidate: Candidate) -> str:
    """The name of what shares its errors: a kernel in one operation and direction."""
    return f"{candidate.kernel} {problem.op} {problem.direction}"


def features(problem: Problem, candidate: Candidate, estimate: Estimate) -> dict[str, float]:
    """A candidate's knobs, its problem's sizes and the shares of its cost terms, by name; those that are 0 may lack."""
    said = dict(_flat(candidate.config, ""))
    said |= {name: log2(max(1, getattr(problem, name))) for name in SIZES}
    said |= {name: float(getattr(problem, name)) for name in ("causal", "deterministic")}
    said |= {f"share_{name}": us / estimate.us for name, us in estimate.terms.items()}
    waves = max(estimate.waves, 1e-3)
    said["rows"] = said["batch"] + said["heads_q"] + said["seqlen_q"]
    said["occupancy"], said["waves"] = float(estimate.occupancy), min(waves, 1000.0)
    said["last_wave"] = -(-waves // 1) / waves
    said["log2_us"] = log2(estimate.us)
    return said


def _flat(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, str):
            yield f"{prefix}{name}={value}", 1.0
        elif value is not None and not isinstance(value, Sequence):
            yield f"{prefix}{name}", float(value)


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A learned correction of the cost model on one architecture.

    Attributes:
        arch: the policy's name.
        scopes: of :func:`scope_of`, those that were measured on enough problems; others are left as they are.
        names: of the features, in the order in which trees name them.
        base: of every correction, beside the trees' leaves; log of measured over predicted.
        trees: whose leaves add up.
        origin: where it was learned: GPU, counts of problems and candidates, figures with and without it.
    """

    arch: str
    scopes: tuple[str, ...]
    names: tuple[str, ...]
    base: float
    trees: tuple[Tree, ...]
    origin: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash((self.arch, self.scopes, self.names, self.base, self.trees))

    def knows(self, problem: Problem, *candidates: Candidate) -> bool:
        """True where the kernels of candidates were measured on enough problems."""
        return all(scope_of(problem, candidate) in self.scopes for candidate in candidates)

    def correction(self, problem: Problem, candidate: Candidate, estimate: Estimate) -> float:
        """The factor from predicted to expected time: 1 where nothing was learned."""
        if not self.knows(problem, candidate) or not isfinite(estimate.us):
            return 1.0
        said = features(problem, candidate, estimate)
        values = [said.get(name, 0.0) for name in self.names]
        total = self.base + sum(_leaf(tree, values) for tree in self.trees)
        return exp(min(LARGEST, max(-LARGEST, total)))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form that :meth:`from_json` reads back."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Residual:
        """Rebuild from :meth:`to_json`.

        Raises:
            RecordError: the schema is another, or a field is missing, unknown or of another type.
        """
        try:
            said = dict(data)
            if said.pop("schema") != SCHEMA:
                raise ValueError(f"schema must be {SCHEMA}, got {data['schema']}")
            names = tuple(map(str, said["names"]))
            said["scopes"], said["names"] = tuple(map(str, said["scopes"])), names
            said["base"] = float(said["base"])
            said["trees"] = tuple(_tree(tree, len(names)) for tree in said["trees"])
            said["origin"] = dict(said["origin"])
            return cls(**said)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise RecordError(f"the learned model is damaged: {error!r}") from error


def _leaf(tree: Tree, values: Sequence[float]) -> float:
    while isinstance(tree, tuple):
        place, threshold, low, high = tree
        tree = low if values[place] <= threshold else high
    return tree


def _tree(said: Any, count: int) -> Tree:
    if not isinstance(said, (list, tuple)):
        value = float(said)
        if not isfinite(value):
            raise ValueError(f"a leaf must be finite, got {value}")
        return value
    place, threshold, low, high = said
    if not 0 <= int(place) < count:
        raise ValueError(f"a feature's place must be below {count}, got {place}")
    return int(place), float(threshold), _tree(low, count), _tree(high, count)
