"""Fake GPU, compiler and records under dispatch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention_autotuner.arch import A100, Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.serving import dispatch, picks
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.lookup import Hit, Query
from attention_autotuner.tuning.validity import Miss
from tests.devices import A100_80GB

PROBLEM = Problem(batch=2, heads_q=4, heads_kv=4, seqlen_q=1000, seqlen_k=1000)
GPU = A100_80GB


def other_candidate(policy: Policy) -> Candidate:
    """A legal candidate that is not the default."""
    default = policy.default(PROBLEM.bucketed())
    return next(c for c in policy.legal(PROBLEM.bucketed()) if c != default)


@dataclass
class Level:
    """A level of the cache hierarchy that holds records: its answer, and the queries it got."""

    answer: Any = None
    asked: list[Query] = field(default_factory=list)

    def find(self, query: Query) -> Hit | Miss:
        self.asked.append(query)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            answer: Hit | Miss = self.answer
            return answer
        return Miss(field="problem", expected=query.problem.describe(), recorded="nothing")


class Kernel:
    """A kernel from the loader: remembers what it was prepared for."""

    def __init__(self, candidate: Candidate, failure: Exception | None) -> None:
        self.candidate = candidate
        self.info = SimpleNamespace(name=candidate.name)
        self.failure = failure
        self.path = Path("kernel.so")
        self.prepared: list[int] = []

    def prepare(self, device: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.prepared.append(device)


class World:
    """A machine made of fakes, which the tests set up and question."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
        self.gpu = GPU
        self.present: Policy = A100()
        self.records, self.shipped = Level(), Level()
        self.build_failures: dict[str, Exception] = {}
        self.prepare_failures: dict[str, Exception] = {}
        self.obtained: list[tuple[str, str]] = []
        self.swapped: dict[str, Candidate] = {}
        self.cache_dir = cache_dir
        monkeypatch.setattr(dispatch, "probe", lambda device: self.gpu)
        monkeypatch.setattr(dispatch, "detect", lambda device: self.present)
        monkeypatch.setattr(picks, "RecordStore", lambda root: self.records)
        monkeypatch.setattr(picks, "ShippedRecords", lambda: self.shipped)
        monkeypatch.setattr(dispatch, "collect", lambda device, **_: Environment(gpu_name="fake"))
        monkeypatch.setattr(dispatch, "obtain", self.obtain)
        monkeypatch.setattr(dispatch, "load", self.load)

    def obtain(self, candidate: Candidate, arch: str, *, settings: Any) -> Candidate:
        self.obtained.append((candidate.name, arch))
        if candidate.name in self.build_failures:
            raise self.build_failures[candidate.name]
        return candidate

    def load(self, candidate: Candidate) -> Kernel:
        answer = self.swapped.get(candidate.name, candidate)
        return Kernel(answer, self.prepare_failures.get(candidate.name))

    def hit(self, candidate: Candidate, layer: Any, **changes: Any) -> Hit:
        record: Any = SimpleNamespace(candidate=candidate)
        return replace(Hit(record=record, layer=layer, exact=True, unverified=()), **changes)
