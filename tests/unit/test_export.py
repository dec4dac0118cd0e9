"""The command ``export``: which problems and picks it takes, and what it writes."""

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
    read_problems,
)
from attention_autotuner.serving.picks import Layers
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.record_schema import (
    TuningRecord,
    space_digest,
)
from attention_autotuner.version import __version__
from tests.bundling import publish
from tests.measured import entry

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
def layers(tmp_path: Path) -> Layers:
    """Layers over records of the user's own, of which there are none yet."""
    return Layers(settings.Settings(cache_dir=tmp_path / "cache"))


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """Builds everything in no time, and says what was asked for."""
    asked: list[Candidate] = []
    store = Store(tmp_path / "store")

    def build(candidates: Sequence[Candidate], policy: Policy, **_: Any) -> list[Any]:
        asked.extend(candidates)
        return [publish(store, exported, arch=policy.build_arch) for exported in candidates]

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


def test_the_common_classes_are_wanted_whole() -> None:
    problems = common_problems()
    assert {(exported.dim_qk, exported.dim_v) for exported in problems} == set(COMMON_DIMS)
    kinds = Counter((p.direction, p.deterministic, p.causal, p.dtype) for p in problems)
    assert len(kinds) == 12
    assert set(kinds.values()) == {len(COMMON_DIMS) * len(SHAPES)}


@pytest.mark.parametrize("gpu", ["A100", "RTX4090", "H100", "H200"])
def test_every_common_problem_is_served_by_few_kernels(gpu: str, layers: Layers) -> None:
    policy = resolve(gpu)
    environment = environment_of(policy, layers)
    assert gpu in str(environment.gpu_name)
    lean = choose_picks(
        common_problems(SHAPES[:1]), policy, layers, environment, own=False, lean=True
    )
    kinds = {exports.kind_of(pick.problem) for pick in lean}
    assert {exports.kind_of(pick.problem) for pick in lean if pick.layer == "default"} == kinds
    assert len({pick.candidate for pick in lean}) <= len(kinds) == 72
    whole = choose_picks(common_problems(), policy, layers, environment, own=False)
    for pick in whole:
        if pick.layer == "default":
            assert pick.candidate == policy.default(pick.problem)


def test_the_users_record_goes_before_the_rest_and_the_default_stays(layers: Layers) -> None:
    layers.records.put(record(PROBLEM, "NVIDIA A100-SXM4-80GB"))
    environment = environment_of(POLICY, layers)
    assert environment == Environment(gpu_name="NVIDIA A100-SXM4-80GB")
    first, last = choose_picks([PROBLEM], POLICY, layers, environment)
    assert (first.layer, first.candidate) == ("record", OTHER)
    assert (first.gpu_name, first.median_us, first.estimate_us) == (
        "NVIDIA A100-SXM4-80GB",
        90.0,
        80.0,
    )
    assert (last.layer, last.candidate) == ("default", POLICY.default(PROBLEM))
    # Of a neighbour, the choice and not the time.
    first, last = choose_picks([replace(PROBLEM, batch=8)], POLICY, layers, environment)
    assert (first.layer, first.median_us, first.estimate_us) == ("record", None, None)
    # For others, and where one kernel is to do for all.
    without = choose_picks([PROBLEM], POLICY, layers, environment, own=False)
    assert all(pick.layer != "record" for pick in without)
    lean = choose_picks([PROBLEM], POLICY, layers, environment, lean=True)
    assert {pick.candidate for pick in lean} == {OTHER}


def test_which_gpu_is_meant(layers: Layers) -> None:
    assert environment_of(H100(), layers) == Environment(gpu_name="H100")
    assert environment_of(resolve("H200"), layers) == Environment(gpu_name="NVIDIA H200")
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"):
        layers.records.put(record(PROBLEM, name))
    with pytest.raises(UnsupportedArchitectureError, match="--gpu-name: NVIDIA A100 80GB PCIe, "):
        environment_of(POLICY, layers)
    named = environment_of(POLICY, layers, "NVIDIA A100 80GB PCIe")
    assert len(exports.own_records(POLICY, layers, named)) == 1


def test_export_writes_a_bundle_of_one_problem(
    built: list[Candidate], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export("--output", tmp_path / "b", "--device-type", "A100", "--dim-qk", "64") == 0
    bundle = open_bundle(tmp_path / "b")
    assert {pick.problem for pick in bundle.picks} == {PROBLEM.bucketed()}
    assert set(built) == {pick.candidate for pick in bundle.picks}
    assert f"bundle: {tmp_path / 'b'}" in capsys.readouterr().out


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


@pytest.mark.parametrize("text", ["{}", "[]", '[{"dim": 3}]', '[{"dim_qk": 3}]', "nonsense"])
def test_a_file_of_no_problems_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "problems.json"
    file.write_text(text)
    with pytest.raises(UnsupportedProblemError, match=r"problem|dim_qk"):
        read_problems(file)


def test_export_without_a_problem_takes_the_common_classes_and_the_users_records(
    built: list[Candidate], tmp_path: Path
) -> None:
    own_problem = Problem(dim_qk=48, dim_v=48, seqlen_q=2000, seqlen_k=2000)
    mine = next(c for c in POLICY.legal(own_problem) if c != POLICY.default(own_problem))
    kept = record(own_problem, "NVIDIA A100-SXM4-80GB")
    entry = replace(kept.entries[0], candidate=mine, source_digest=source_digest(render(mine)))
    measured = replace(entry.measurement, candidate_name=mine.name)  # type: ignore[type-var]
    entry = replace(entry, measurement=measured)
    Layers(settings.current()).records.put(
        replace(kept, pick=mine.name, entries=(entry, kept.entries[1]))
    )
    assert export("--output", tmp_path / "b", "--device-type", "A100") == 0
    bundle = open_bundle(tmp_path / "b")
    (first,) = (pick for pick in bundle.picks if pick.layer == "record")
    assert (first.problem, first.candidate) == (own_problem.bucketed(), mine)
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


def test_doctor_names_the_bundles_that_are_here(
    built: list[Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "packages", tuple)
    assert doctor.check_bundles().detail.startswith("none; ")
    assert export("--output", tmp_path / "b", "--device-type", "A100", "--dim-qk", "64") == 0
    with settings.override(bundle=tmp_path / "b"):
        checks = doctor.check_bundles()
    assert checks.state == "ok"
    assert f"1 kernels for A100 of version {__version__} in {tmp_path / 'b'}" in checks.detail
    with settings.override(bundle=tmp_path / "nothing"):
        checks = doctor.check_bundles()
    assert checks.state == "broken"
    assert "is no bundle" in checks.fix
