"""Launch knobs: one artifact for candidates that differ in them alone, one record entry and one launch for each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import A100, H100, Policy
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.codegen.bundle import INDEX, BundledPick, open_bundle
from attention_autotuner.codegen.render import render
from attention_autotuner.core import abi
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import BundleError
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.operations.shared import launching
from attention_autotuner.serving import dispatch, loader, picks, runtime
from attention_autotuner.tuning import isolated, tasks, tune
from attention_autotuner.tuning.entries import KernelEntry
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.stages import Engine, built_of
from tests.fake_bundles import make_bundle
from tests.fake_pipeline import FakePipeline, fast

FakeKernel = Callable[..., Path]
POLICY = H100(H200_SPEC)
PROBLEM = Problem(dtype="bf16", batch=8, heads_q=32, heads_kv=8, seqlen_q=4, seqlen_k=8192)
SMALL = Problem(batch=1, heads_q=2, heads_kv=1, seqlen_q=33, seqlen_k=45, dim_qk=16, dim_v=24)


def siblings(policy: Policy = POLICY) -> list[Candidate]:
    """Candidates of one artifact."""
    default = policy.default(PROBLEM)
    return [c for c in policy.legal(PROBLEM) if c.compiled == default.compiled]


@pytest.mark.parametrize("policy", [POLICY, A100()], ids=lambda policy: policy.spec.name)
def test_the_code_does_not_know_them_and_names_do(policy: Policy) -> None:
    same = siblings(policy)
    assert len(same) > 1
    assert len({c.name for c in same}) == len(same)
    assert {render(c).name for c in same} == {same[0].compiled.name}
    (text,) = {render(c).text for c in same}
    assert "kSplitKv = true" in text
    assert "kSplits" not in text
    for candidate in same:
        assert candidate.launch_knobs == {"splits": candidate.knobs.splits}
        assert candidate.compiled.launched(candidate.launch_knobs) == candidate
        assert candidate_from_config(json.loads(json.dumps(candidate.config))) == candidate
    assert same[0].compiled.launch_knobs == {}
    assert same[0].compiled.compiled == same[0].compiled


def test_split_counts_are_all_there_are() -> None:
    having = {
        (name, field.name)
        for name, kernel in KERNELS.items()
        for field in fields(kernel.knobs)
        if "launch" in field.metadata
    }
    assert having == {
        ("attention_forward_sm90", "splits"),
        ("scores_forward_sm80", "splits"),
        ("gemm_sm90", "splits"),
        ("gemm_sm90", "row_blocks"),
    }
    assert "splits" in {name for name, *_ in abi.AttentionForwardParams._fields_}


@pytest.mark.parametrize("splits", [0, -1])
def test_contradicting_knobs_are_refused(splits: int) -> None:
    knobs = POLICY.default(PROBLEM).knobs
    with pytest.raises(ValueError, match=f"got {splits}"):
        replace(knobs, splits=splits)
    with pytest.raises(ValueError, match="splits must be 1, or more with split_kv"):
        replace(knobs, split_kv=False, splits=2)


# --- searches -----------------------------------------------------------------------------------------


def test_a_search_builds_one_artifact_and_times_every_launch(tmp_path: Path) -> None:
    same, records = siblings(), RecordStore(tmp_path / "records")
    best = next(c for c in same if c != POLICY.default(PROBLEM))
    pipeline = FakePipeline(time_us=fast(best.name, 80.0), confirmed_ratio=1.2)
    result = tune(PROBLEM, POLICY, effort="full", records=records, pipeline=pipeline)
    assert result.pick == best
    assert len(pipeline.built) == len(set(pipeline.built)) < len(pipeline.measured)
    assert {c.name for c in same} <= set(pipeline.measured)
    assert pipeline.confirmations == [(best.name, POLICY.default(PROBLEM).name)]
    assert result.record is not None
    assert result.record.candidate == best
    known = {entry.candidate: entry.source_digest for entry in result.record.entries}
    assert len({known[c] for c in same}) == 1
    again = FakePipeline(time_us=fast(best.name, 80.0))
    recorded = tune(PROBLEM, POLICY, effort="full", records=records, pipeline=again)
    assert (recorded.status, recorded.pick, again.built) == ("recorded", best, [])


def test_a_failed_build_fails_every_candidate_of_it(tmp_path: Path) -> None:
    same = siblings()
    failing = same[0].compiled.name
    pipeline = FakePipeline(
        build_outcome=lambda name: BuildFailed(reason="no") if name == failing else None
    )
    records = RecordStore(tmp_path / "records")
    result = tune(PROBLEM, POLICY, effort="full", records=records, pipeline=pipeline)
    fates = {row.candidate: row.outcome for row in result.rows}
    assert all(isinstance(fates[c], BuildFailed) for c in same)


def test_rows_of_sweeps_know_what_to_launch(tmp_path: Path) -> None:
    same, pipeline = siblings()[:2], FakePipeline()
    records = RecordStore(tmp_path / "records")
    engine = Engine(policy=POLICY, pipeline=pipeline, records=records)
    (result,) = pipeline.build([render(same[0])], lambda *_: None)
    rows = [engine.prepared(c, result, "digest", default=False) for c in same]
    assert [row.built and row.built.launch_knobs for row in rows] == [c.launch_knobs for c in same]
    assert built_of(same, pipeline).keys() == set(same)
    assert [built.launch_knobs for built in built_of(same, pipeline).values()] == [  # type: ignore[union-attr]
        c.launch_knobs for c in same
    ]


# --- launches -----------------------------------------------------------------------------------------

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")


@needs_gcc
def test_launches_carry_them_and_share_the_library(fake_kernel: FakeKernel) -> None:
    plain = loader.load(fake_kernel())
    split = plain.with_launch_knobs({"splits": 8})
    assert plain.with_launch_knobs({}) is plain
    split.prepare(0)
    assert 0 in plain._prepared
    for kernel, splits in ((plain, 0), (split, 8)):
        for use in (kernel.set_launch_knobs, kernel.workspace_bytes):
            params = abi.AttentionForwardParams(struct_size=-1 % 2**32, abi_version=abi.ABI_VERSION)
            use(params)
            assert params.splits == splits


def test_races_launch_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[KernelEntry] = []

    class Sampler:
        def __init__(self, *tensors: object) -> None:
            pass

        def prepare(self, entry: KernelEntry) -> None:
            entries.append(entry)

        def round(self, order: list[str], alone: object) -> dict[str, float]:
            return dict.fromkeys(order, 100.0)

    monkeypatch.setattr(tasks, "Sampler", Sampler)
    knobs = {"first": {"splits": 4}, "second": {}}
    raced: Any = {
        name: [SimpleNamespace(path=tmp_path / "k.so", launch_knobs=knobs[name])] for name in knobs
    }
    isolated.measure(
        isolated.InProcess(0, tasks="tests.fake_tasks"), SMALL, raced, budget_seconds=0.1
    )
    assert {entry.name: dict(entry.launch_knobs) for entry in entries} == knobs
    assert {entry.path for entry in entries} == {tmp_path / "k.so"}


@needs_gcc
def test_verification_launches_with_them(
    fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def bind(kernel: loader.LoadedKernel, *tensors: Any) -> Callable[[], None]:
        seen.append(kernel.launch_knobs)
        return launching.bind(kernel, *tensors)

    monkeypatch.setattr(tasks, "bind", bind)
    for knobs in ({"splits": 3}, {}):
        library: Any = SimpleNamespace(
            path=fake_kernel("-DBLOCK_M=16", "-DBLOCK_N=16"), launch_knobs=knobs
        )
        worker = isolated.InProcess(0, tasks="tests.fake_tasks")
        assert isolated.verify(worker, SMALL, library, deterministic=True).ok
    assert [knobs for knobs, _ in groupby(seen)] == [{"splits": 3}, {}]


@needs_gcc
def test_dispatch_serves_the_pick_with_them(
    fake_kernel: FakeKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = POLICY.default(PROBLEM.bucketed())
    assert default.launch_knobs
    library = fake_kernel(f'-DNAME="{default.compiled.name}"')
    monkeypatch.setattr(dispatch, "obtain", lambda candidate, arch, *, settings: library)
    monkeypatch.setattr(dispatch, "running_on", lambda policy, device: policy)
    monkeypatch.setattr(dispatch, "collect", lambda device, **_: SimpleNamespace())
    gpu = SimpleNamespace(compute_capability=(9, 0), smem_per_block_bytes=232448, name="fake")
    monkeypatch.setattr(dispatch, "probe", lambda device: gpu)
    monkeypatch.setattr(dispatch, "_toolchain", lambda settings: None)
    with settings.override(mode="off", cache_dir=tmp_path), runtime.fresh():
        monkeypatch.setattr(
            picks.CacheHierarchy, "environment_of", lambda self, policy, present: present
        )
        kernel = dispatch.kernel_for(PROBLEM, POLICY, device=0)
    assert kernel.launch_knobs == default.launch_knobs
    assert kernel.info.name == default.compiled.name


# --- bundles ------------------------------------------------------------------------------------------


def test_a_bundle_holds_the_kernel_once_and_the_picks_say_the_rest(tmp_path: Path) -> None:
    first, second = siblings()[:2]
    longer = replace(PROBLEM, seqlen_k=32768)
    chosen = [
        BundledPick(problem=PROBLEM, candidate=first, layer="shipped"),
        BundledPick(problem=longer, candidate=second, layer="shipped"),
        BundledPick(problem=PROBLEM, candidate=first.compiled, layer="default"),
    ]
    bundle = make_bundle(tmp_path, chosen, policy="H100", arch="90")
    assert list(bundle.picks) == chosen
    assert [kernel.candidate for kernel in bundle.kernels] == [first.compiled]
    assert bundle.names == {first.compiled.name}
    index = json.loads((bundle.root / INDEX).read_text())
    launched = [pick.get("launch") for pick in index["picks"]]
    assert launched == [first.launch_knobs, second.launch_knobs, None]
    index["picks"][0]["launch"] = {"parts": 3}
    (bundle.root / INDEX).write_text(json.dumps(index))
    with pytest.raises(BundleError, match="parts"):
        open_bundle(bundle.root)
