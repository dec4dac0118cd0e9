"""The command ``export``: its problems, its picks and its files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import A100, H100, Policy, resolve
from attention_autotuner.cli import doctor, exporting, main
from attention_autotuner.codegen import installed
from attention_autotuner.codegen.bundle import open_bundle
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.source_digest import source_digest
from attention_autotuner.codegen.store import Store
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed, Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import (
    UnsupportedArchitectureError,
    UnsupportedProblemError,
)
from attention_autotuner.serving import exports
from attention_autotuner.serving.exports import (
    COMMON_DIMS,
    SHAPES,
    choose_picks,
    common_problems,
    environment_of,
)
from attention_autotuner.serving.picks import CacheHierarchy
from attention_autotuner.serving.untuned import read_problems
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.record_schema import (
    TuningRecord,
    space_digest,
)
from attention_autotuner.version import __version__
from tests.fake_bundles import publish
from tests.record_entries import entry

PROBLEM = Problem(dim_qk=64, dim_v=64)
POLICY = A100()
OTHER = next(c for c in POLICY.legal(PROBLEM) if c != POLICY.default(PROBLEM))


def record(problem: Problem, gpu_name: str) -> TuningRecord:
    """A record that picks another candidate than the default."""
    environment = Environment(gpu_name=gpu_name, num_sms=108, driver="550.54")
    default = POLICY.default(problem)
    entries = [
        entry(
            candidate,
            median,
            environment=environment.digest,
            source_digest=source_digest(render(candidate)),
            estimate_us=80.0,
        )
        for candidate, median in ((OTHER, 90.0), (default, 120.0))
    ]
    return TuningRecord(
        problem=problem.bucketed(),
        measured_problem=problem,
        purpose=problem.direction,
        arch=POLICY.name,
        space_digest=space_digest([entry.candidate for entry in entries]),
        pick=OTHER.name,
        default=default.name,
        confirmed=True,
        entries=tuple(entries),
        environment=environment,
    )


@pytest.fixture
def hierarchy(tmp_path: Path) -> CacheHierarchy:
    """A cache hierarchy over an empty store of user records."""
    return CacheHierarchy(settings.Settings(cache_dir=tmp_path / "cache"))


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """Fake builds that take no time; the list holds the requested candidates."""
    asked: list[Candidate] = []
    store = Store(tmp_path / "store")

    def build(candidates: Sequence[Candidate], policy: Policy, **_: Any) -> list[Any]:
        asked.extend(candidates)
        return [publish(store, candidate, arch=policy.build_arch) for candidate in candidates]

    monkeypatch.setattr(exporting, "build_candidates", build)
    monkeypatch.setenv("ATTENTION_AUTOTUNER_CACHE_DIR", str(tmp_path / "cache"))
    settings.reload()
    return asked


@pytest.fixture(autouse=True)
def _reload(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield
    monkeypatch.undo()
    settings.reload()


def export(*arguments: str | Path) -> int:
    return main(["export", *map(str, arguments)])


def test_common_problems_cover_every_kind_of_every_class() -> None:
    problems = common_problems()
    assert {(problem.dim_qk, problem.dim_v) for problem in problems} == set(COMMON_DIMS)
    kinds = Counter((p.direction, p.deterministic, p.causal, p.dtype) for p in problems)
    assert len(kinds) == 12
    assert set(kinds.values()) == {len(COMMON_DIMS) * len(SHAPES)}


@pytest.mark.parametrize("gpu", ["A100", "RTX4090", "H100", "H200"])
def test_every_common_problem_is_served_by_few_kernels(gpu: str, hierarchy: CacheHierarchy) -> None:
    policy = resolve(gpu)
    environment = environment_of(policy, hierarchy)
    assert gpu in str(environment.gpu_name)
    lean = choose_picks(
        common_problems(SHAPES[:1]), policy, hierarchy, environment, with_records=False, lean=True
    )
    kinds = {exports.kind_of(pick.problem) for pick in lean}
    assert {exports.kind_of(pick.problem) for pick in lean if pick.layer == "default"} == kinds
    assert len({pick.candidate for pick in lean}) <= len(kinds) == 72
    whole = choose_picks(common_problems(), policy, hierarchy, environment, with_records=False)
    for pick in whole:
        if pick.layer == "default":
            assert pick.candidate == policy.default(pick.problem)


def test_every_length_of_a_list_has_the_default_that_python_has(hierarchy: CacheHierarchy) -> None:
    """Defaults of forwards are no step function of the length: the nearest one of another is a guess."""
    policy = resolve("H200")
    problems = [
        Problem(batch=8, heads_q=12, heads_kv=12, dim_qk=64, dim_v=64, seqlen_q=n, seqlen_k=n)
        for n in (197, 257, 577, 729, 800, 1025, 1500, 2049, 3000)
    ]
    environment = environment_of(policy, hierarchy)
    picks = choose_picks(problems, policy, hierarchy, environment, with_records=False)
    served = {pick.problem: pick.candidate for pick in picks if pick.layer == "default"}
    assert served == {p.rounded(): policy.default(p.rounded()) for p in problems}
    assert len(set(served.values())) < len(problems)


def test_the_users_record_comes_first_and_the_default_stays(hierarchy: CacheHierarchy) -> None:
    hierarchy.records.put(record(PROBLEM, "NVIDIA A100-SXM4-80GB"))
    environment = environment_of(POLICY, hierarchy)
    assert environment == Environment(gpu_name="NVIDIA A100-SXM4-80GB")
    first, last = choose_picks([PROBLEM], POLICY, hierarchy, environment)
    assert (first.layer, first.candidate) == ("record", OTHER)
    assert (first.gpu_name, first.median_us, first.estimate_us) == (
        "NVIDIA A100-SXM4-80GB",
        90.0,
        80.0,
    )
    assert (last.layer, last.candidate) == ("default", POLICY.default(PROBLEM))
    # From a neighbouring problem come the pick and not the time.
    first, last = choose_picks([replace(PROBLEM, batch=8)], POLICY, hierarchy, environment)
    assert (first.layer, first.median_us, first.estimate_us) == ("record", None, None)
    # Without the user's records, and with one kernel for all.
    without = choose_picks([PROBLEM], POLICY, hierarchy, environment, with_records=False)
    assert all(pick.layer != "record" for pick in without)
    lean = choose_picks([PROBLEM], POLICY, hierarchy, environment, lean=True)
    assert {pick.candidate for pick in lean} == {OTHER}


def test_the_gpu_of_an_export(hierarchy: CacheHierarchy) -> None:
    assert environment_of(H100(), hierarchy) == Environment(gpu_name="H100")
    assert environment_of(resolve("H200"), hierarchy) == Environment(gpu_name="NVIDIA H200")
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"):
        hierarchy.records.put(record(PROBLEM, name))
    with pytest.raises(UnsupportedArchitectureError, match="--gpu-name: NVIDIA A100 80GB PCIe, "):
        environment_of(POLICY, hierarchy)
    named = environment_of(POLICY, hierarchy, "NVIDIA A100 80GB PCIe")
    assert len(exports.own_records(POLICY, hierarchy, named)) == 1


def test_export_writes_a_bundle_of_one_problem(
    built: list[Candidate], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export("--output", tmp_path / "b", "--device-type", "A100", "--dim-qk", "64") == 0
    bundle = open_bundle(tmp_path / "b")
    assert {pick.problem for pick in bundle.picks} == {PROBLEM.bucketed()}
    assert set(built) == {pick.candidate for pick in bundle.picks}
    said = capsys.readouterr().out
    assert f"bundle: {tmp_path / 'b'}" in said
    assert "proofs:" not in said  # the default was not measured


def test_export_takes_both_directions_of_a_step(built: list[Candidate], tmp_path: Path) -> None:
    arguments = ("--device-type", "A100", "--direction", "step", "--dtype", "bf16")
    assert export("--output", tmp_path / "b", *arguments) == 0
    assert {c.direction for c in built} == {"forward", "backward"}
    assert {c.dtype for c in built} == {"bf16"}


def test_export_takes_problems_from_a_file(
    built: list[Candidate], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "problems.json"
    file.write_text('[{"dim_qk": 64, "dim_v": 64}, {"op": "retention", "causal": true}]')
    arguments = ("--device-type", "A100", "--problems", file, "--json")
    assert export("--output", tmp_path / "b", *arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bundle"] == str(tmp_path / "b")
    assert said["kernels"] == len(set(built))
    assert {c.op for c in built} == {"attention", "retention"}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"dim": 3}', '[{"dim": 3}]', '[{"dim_qk": 3}]', "nonsense"]
)
def test_a_file_without_problems_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "problems.json"
    file.write_text(text)
    with pytest.raises(UnsupportedProblemError, match=r"problem|dim_qk"):
        read_problems(file)


def test_export_without_a_problem_takes_the_common_classes_and_the_users_records(
    built: list[Candidate], tmp_path: Path
) -> None:
    problem = Problem(dim_qk=48, dim_v=48, seqlen_q=2000, seqlen_k=2000)
    mine = next(c for c in POLICY.legal(problem) if c != POLICY.default(problem))
    kept = record(problem, "NVIDIA A100-SXM4-80GB")
    entry = replace(kept.entries[0], candidate=mine, source_digest=source_digest(render(mine)))
    CacheHierarchy(settings.current()).records.put(
        replace(kept, pick=mine.name, entries=(entry, kept.entries[1]))
    )
    assert export("--output", tmp_path / "b", "--device-type", "A100") == 0
    bundle = open_bundle(tmp_path / "b")
    (first,) = (pick for pick in bundle.picks if pick.layer == "record")
    assert (first.problem, first.candidate) == (problem.bucketed(), mine)
    assert {(p.problem.dim_qk, p.problem.dim_v) for p in bundle.picks} == {*COMMON_DIMS, (48, 48)}


def test_export_refuses_before_it_builds(
    built: list[Candidate], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    assert export("--output", tmp_path / "mine", "--device-type", "A100", "--force") == 1
    assert "is no bundle" in capsys.readouterr().err
    assert not built


def test_a_kernel_that_does_not_build_stops_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(candidates: Sequence[Candidate], *_: Any, **__: Any) -> list[Outcome]:
        return [BuildFailed(reason="no such type", log="/a/log") for _ in candidates]

    monkeypatch.setattr(exporting, "build_candidates", fail)
    assert export("--output", tmp_path / "b", "--device-type", "A100", "--dim-qk", "64") == 1
    assert "do not build" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_export_makes_a_wheel_of_the_common_classes(
    built: list[Candidate], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--bundle", "--output", tmp_path / "dist", "--device-type", "H200", "--json")
    assert export(*arguments) == 0
    (wheel,) = (tmp_path / "dist").iterdir()
    said = json.loads(capsys.readouterr().out)
    assert said["wheel"] == str(wheel)
    assert said["wheel_bytes"] == wheel.stat().st_size
    assert wheel.name.startswith("attention_autotuner_kernels_h200-")
    assert {c.padded_dim_qk for c in built} == {64, 80, 96, 128, 192, 256}
    assert said["kernels"] == len(set(built)) <= 72


def test_doctor_names_the_installed_bundles(
    built: list[Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "packages", tuple)
    assert doctor.check_bundles().detail.startswith("none; ")
    assert export("--output", tmp_path / "b", "--device-type", "A100", "--dim-qk", "64") == 0
    with settings.override(bundle=tmp_path / "b"):
        finding = doctor.check_bundles()
    assert finding.state == "ok"
    assert f"1 kernels for A100 of version {__version__} in {tmp_path / 'b'}" in finding.detail
    with settings.override(bundle=tmp_path / "nothing"):
        finding = doctor.check_bundles()
    assert finding.state == "broken"
    assert "is no bundle" in finding.fix
