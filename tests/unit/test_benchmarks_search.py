"""Tuning a suite at once, with stand-ins for compiler and GPU."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import resolve
from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.core.outcome import BuildFailed, Ok, Wrong
from attention_autotuner.core.report import CompilerReport
from attention_autotuner.errors import NoCandidateError
from attention_autotuner.kernels.legality import check
from attention_autotuner.serving import dispatch
from attention_autotuner.tuning import class_pools, shipping
from attention_autotuner.tuning.lookup import Hit, Query
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipped import ShippedRecords
from benchmarks import run
from benchmarks.settling import all_evidence, evidence_file, settle_and_ship
from benchmarks.suites import trials
from tests.fake_benchmark import (
    GPU,
    LONG,
    POLICY,
    SHORT,
    WIDE,
    FakePipeline,
    candidates_of,
    run_search,
)


def test_problems_of_a_class_share_one_pool_and_all_is_built_at_once(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    run_search([SHORT, LONG, WIDE], pipeline, RecordStore(tmp_path))
    (batch,) = pipeline.batches
    assert len(batch) == len(set(batch))
    assert batch == [c.name for problem in (SHORT, WIDE) for c in candidates_of(problem)]
    assert sorted(pipeline.verified) == sorted(batch)  # each once, not once a problem
    names = {problem: set(raced) for problem, raced in pipeline.raced}
    assert names[SHORT] == names[LONG] != names[WIDE]
    assert POLICY.default(SHORT).name in names[LONG]
    firsts = [raced[0] for _, raced in pipeline.raced]
    assert firsts == [POLICY.default(problem).name for problem in (SHORT, LONG, WIDE)]


def test_the_fastest_is_recorded_unconfirmed_and_dispatch_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, best, *_ = candidates_of(SHORT, [SHORT])
    pipeline = FakePipeline(time_us=lambda problem, name: 90.0 if name == best.name else 100.0)
    (record,) = run_search([SHORT], pipeline, RecordStore(tmp_path / "records"))
    assert (record.candidate, record.confirmed) == (best, False)
    assert record.default == POLICY.default(SHORT).name
    assert {entry.outcome.kind for entry in record.entries} == {"ok"}
    monkeypatch.setattr(dispatch, "environment_of", lambda device, in_force: GPU)
    with settings.override(cache_dir=tmp_path, mode="cached"):
        pick = dispatch.lookup(SHORT, POLICY)
    assert (pick.layer, pick.candidate) == ("record", best)


def test_a_gain_below_one_percent_keeps_the_default(tmp_path: Path) -> None:
    _, best, *_ = candidates_of(SHORT, [SHORT])
    pipeline = FakePipeline(time_us=lambda problem, name: 99.5 if name == best.name else 100.0)
    (record,) = run_search([SHORT], pipeline, RecordStore(tmp_path))
    assert (record.candidate, record.confirmed) == (POLICY.default(SHORT), True)


def spilling(name: str) -> CompilerReport:
    return replace(parse_ptxas(""), loop_spills=True, spill_store_bytes=4000)


def test_failures_fall_out_with_their_reasons_and_a_spilling_default_stays(tmp_path: Path) -> None:
    default, unbuildable, wrong, *_ = candidates_of(SHORT, [SHORT])
    assert default == POLICY.default(SHORT)
    pipeline = FakePipeline(
        build_outcome=lambda name: BuildFailed(reason="no") if name == unbuildable.name else None,
        check=lambda name: Wrong(reason="off") if name == wrong.name else Ok(),
    )
    (record,) = run_search([SHORT], pipeline, RecordStore(tmp_path / "first"))
    kinds = {entry.candidate: entry.outcome.kind for entry in record.entries}
    assert (kinds[unbuildable], kinds[wrong], kinds[default]) == ("build_failed", "wrong", "ok")
    assert all(
        unbuildable.name not in raced and wrong.name not in raced for _, raced in pipeline.raced
    )
    (record,) = run_search([SHORT], FakePipeline(report=spilling), RecordStore(tmp_path / "second"))
    kinds = {entry.candidate: entry.outcome.kind for entry in record.entries}
    assert kinds.pop(default) == "ok"
    assert set(kinds.values()) == {"spilled"}


def test_a_class_without_a_usable_kernel_is_an_error(tmp_path: Path) -> None:
    pipeline = FakePipeline(check=lambda name: Wrong(reason="off"))
    with pytest.raises(NoCandidateError, match="off"):
        run_search([SHORT], pipeline, RecordStore(tmp_path))


def test_an_interrupted_race_ends_the_search_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_search([SHORT], FakePipeline(interrupt=True), RecordStore(tmp_path))


def test_shipping_keeps_the_picks_of_other_problems(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "records")
    first, second = run_search([SHORT, WIDE], FakePipeline(), store)
    shipping.ship(tmp_path, "NVIDIA H100 80GB HBM3", [first])
    path = shipping.ship(tmp_path, "NVIDIA H100 80GB HBM3", [second])
    shipping.ship(tmp_path, "NVIDIA H100 80GB HBM3", [second])
    assert len(path.read_text().splitlines()) == 1 + 2
    for record in (first, second):
        query = Query(problem=record.problem, arch=POLICY.name, environment=GPU)
        assert isinstance(ShippedRecords(tmp_path).find(query), Hit)


def test_shipped_picks_are_timed_again_without_a_new_search(tmp_path: Path) -> None:
    gpu = "NVIDIA H100 80GB HBM3"
    records = RecordStore(tmp_path / "records")
    wanted = trials(["attention_forward"], words=["512"], dims=[64])
    problems = [trial.problem for trial in wanted]
    shipping.ship(tmp_path, gpu, run_search([*problems, WIDE], FakePipeline(), records))
    pipeline = FakePipeline()
    options = run.parse(["tune", "--suite", "attention_forward", "--again", str(tmp_path)])
    assert run.tune(wanted, POLICY, pipeline, records, options) == 0
    (batch,) = pipeline.batches
    held = {
        entry.candidate.name
        for record in shipping.evidence(shipping.evidence_path(tmp_path, gpu)).values()
        for entry in shipping.trimmed(record).entries
        if record.problem.dim_qk == 64
    }
    assert len(held) >= shipping.ENTRIES
    assert set(batch) == held | {POLICY.default(problem).name for problem in problems}


def test_evidence_of_picks_that_were_timed_again_is_apart(tmp_path: Path) -> None:
    gpu = GPU.gpu_name
    assert gpu is not None
    records = RecordStore(tmp_path / "records")
    (record,) = run_search([SHORT], FakePipeline(), records)
    row = {"problem": asdict(SHORT), "pick": record.pick, "entries": {"pick": {}}}
    says: list[str] = []
    for again, lines in ((False, 1), (True, 2)):
        settle_and_ship([row], POLICY, records, GPU, tmp_path, says.append, again=again)
        assert len(says) == lines
    searched, apart = (evidence_file(tmp_path, gpu, again=again) for again in (False, True))
    assert apart == searched.parent / "again" / searched.name
    assert apart.read_text() == searched.read_text() != ""
    assert all_evidence(tmp_path, gpu) == shipping.evidence(searched)


def test_a_suite_is_tuned_by_its_settings_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int | None]] = []

    def pools(problems: Any, policy: Any, *, top_k: int, class_limit: int | None) -> Any:
        asked.append((len(problems), top_k, class_limit))
        return {}

    monkeypatch.setattr(class_pools, "pools", pools)
    monkeypatch.setattr(run, "search", lambda *arguments, **rest: [])
    for options in ([], ["--top-k", "2", "--class-limit", "3"]):
        parsed = run.parse(["tune", "--suite", "retnet,retention", *options])
        run.tune(trials(parsed.suite), POLICY, FakePipeline(), RecordStore(tmp_path), parsed)
    # Masked gradients are tuned in both modes.
    assert asked == [(15, 4, 5), (16, 5, 8), (15, 2, 3), (16, 2, 3)]


def test_kernels_that_the_policy_does_not_allow_are_not_timed_again() -> None:
    large = next(
        candidate
        for candidate in resolve("H200").legal(SHORT)
        if check(candidate, resolve("RTX4090").spec) is not None
    )
    (pool,) = class_pools.known_pools([SHORT], resolve("RTX4090"), [large]).values()
    assert pool == [resolve("RTX4090").default(SHORT)]
