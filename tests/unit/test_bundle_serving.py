"""Kernels of a bundle serve before a compiler is looked for, and only those that are the very same kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attention_autotuner.codegen.obtain as module
from attention_autotuner import settings
from attention_autotuner.arch import A100, H100, DeviceProperties
from attention_autotuner.codegen import bundle as bundle_module
from attention_autotuner.codegen import installed, toolchain
from attention_autotuner.codegen.artifact import Artifact
from attention_autotuner.codegen.bundle import BundledPick
from attention_autotuner.codegen.obtain import at_hand, obtain
from attention_autotuner.codegen.store import Store
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import (
    ArtifactError,
    BundleError,
    NotWarmError,
    StoreError,
    ToolchainError,
    UnsupportedArchitectureError,
)
from attention_autotuner.serving import dispatch, runtime
from attention_autotuner.tuning.environment import Environment
from tests.devices import A100_80GB, H200, RTX3090
from tests.fake_bundles import make_bundle, publish
from tests.record_entries import PROOF

POLICY = A100()
PROBLEM = Problem(dim_qk=64, dim_v=64)
DEFAULT = POLICY.default(PROBLEM)
OTHER = next(c for c in POLICY.legal(PROBLEM) if c != DEFAULT)
PICKS = [BundledPick(problem=PROBLEM, candidate=DEFAULT, layer="default")]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernels are installed and no driver is here; what earlier tests found is forgotten."""
    monkeypatch.setattr(installed, "packages", tuple)
    monkeypatch.setattr(toolchain, "driver_release", lambda: None)
    with runtime.fresh():
        yield


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: Any) -> None:
        raise ToolchainError("install nvcc")

    monkeypatch.setattr(module, "find_toolchain", refuse)
    monkeypatch.setattr(dispatch, "find_toolchain", refuse)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler must not even be looked for."""

    def fail(settings: Any) -> None:
        pytest.fail("a compiler was looked for")

    monkeypatch.setattr(module, "find_toolchain", fail)


def drive(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """Put a driver here that runs kernels of a CUDA release."""
    for place in (toolchain, module):
        monkeypatch.setattr(place, "driver_release", lambda: (major, minor))


def test_a_bundle_serves_without_a_look_for_a_compiler(never: None, tmp_path: Path) -> None:
    made = make_bundle(tmp_path, PICKS)
    with settings.override(cache_dir=tmp_path / "cache", bundle=made.root):
        result = obtain(DEFAULT, "80")
        assert result.path.is_relative_to(made.root)
        assert at_hand(OTHER, "80") is None
    assert not (tmp_path / "cache").exists()


def test_the_users_own_build_comes_before_a_bundle(never: None, tmp_path: Path) -> None:
    made = make_bundle(tmp_path, PICKS)
    store = Store(tmp_path / "cache")
    publish(store, DEFAULT, nvcc="13.1.2")
    with settings.override(cache_dir=store.root, bundle=made.root):
        assert obtain(DEFAULT, "80").path.is_relative_to(store.root)


@pytest.mark.parametrize("place", ["a file", "a file/below"])
def test_a_cache_that_cannot_be_used_stops_no_bundle(
    never: None, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_bundle(tmp_path, PICKS)
    (tmp_path / "a file").write_text("")
    with settings.override(cache_dir=tmp_path / place, bundle=made.root):
        assert obtain(DEFAULT, "80").path.is_relative_to(made.root)


def test_a_cache_that_cannot_be_read_is_passed_over_with_a_warning(
    never: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: Any) -> None:
        raise StoreError("cannot use the kernel cache")

    made = make_bundle(tmp_path, PICKS)
    monkeypatch.setattr(Store, "find", refuse)
    with settings.override(bundle=made.root):
        assert obtain(DEFAULT, "80").path.is_relative_to(made.root)
    assert "passed over: cannot use the kernel cache" in caplog.text


def test_kernels_of_other_sources_are_passed_over_with_one_line(
    no_compiler: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(bundle_module, "__version__", "0.0.9")
    made = make_bundle(tmp_path, PICKS)
    for name, other in (("kernel_digest", lambda kernel: "f" * 64), ("present_tree", str)):
        monkeypatch.setattr(installed, name, other)
    with settings.override(cache_dir=tmp_path / "cache", bundle=made.root):
        for _ in range(2):
            with pytest.raises(ToolchainError, match="has to be built first"):
                obtain(DEFAULT, "80")
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == 1
    assert "it is of version 0.0.9" in lines[0]
    assert DEFAULT.name in lines[0]


def test_a_kernel_for_an_older_device_serves_only_where_nothing_can_be_built(
    no_compiler: None, tmp_path: Path
) -> None:
    made = make_bundle(tmp_path, PICKS)
    with settings.override(cache_dir=tmp_path / "cache", bundle=made.root):
        assert at_hand(DEFAULT, "90") is None
        assert obtain(DEFAULT, "90").target.arch == "80"


def test_kernels_that_the_driver_cannot_run_are_passed_over(
    no_compiler: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = make_bundle(tmp_path, PICKS)
    drive(monkeypatch, 12, 4)
    with settings.override(cache_dir=tmp_path / "cache", bundle=made.root):
        assert at_hand(DEFAULT, "80") is None
        assert "built by CUDA 13.0.88, the driver here runs kernels of CUDA 12" in caplog.text
        publish(Store(tmp_path / "cache"), DEFAULT, nvcc="12.9.86+13.0.88")
        assert obtain(DEFAULT, "80").toolchain["nvcc"] == "12.9.86+13.0.88"


def test_a_setting_that_names_no_bundle_is_an_error(tmp_path: Path) -> None:
    with (
        settings.override(bundle=tmp_path / "nothing"),
        pytest.raises(BundleError, match=r"ATTENTION_AUTOTUNER_BUNDLE: .* is no bundle"),
    ):
        at_hand(DEFAULT, "80")


def test_the_gpus_at_hand_may_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed.package_name("H200") == "attention_autotuner_kernels_h200"
    here = [H200, RTX3090, RTX3090]

    def probe(device: int) -> DeviceProperties:
        if device >= len(here):
            raise UnsupportedArchitectureError(f"device {device} does not exist")
        return here[device]

    monkeypatch.setattr(installed, "probe", probe)
    assert [installed.package_name(name) for name in installed.present()] == [
        "attention_autotuner_kernels_h200",
        "attention_autotuner_kernels_rtx3090",
    ]
    here.clear()
    assert installed.present() == ()


class Loaded:
    """A stand-in for a loaded kernel."""

    def __init__(self, artifact: Any) -> None:
        self.path = artifact.path
        self.info = SimpleNamespace(name=artifact.name)

    def prepare(self, device: int) -> None:
        """Nothing to prepare on no device."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 that loads anything."""
    monkeypatch.setattr(dispatch, "probe", lambda device: A100_80GB)
    monkeypatch.setattr(dispatch, "detect", lambda device: POLICY)
    monkeypatch.setattr(
        dispatch, "collect", lambda device, **_: Environment(gpu_name=A100_80GB.name)
    )
    monkeypatch.setattr(dispatch, "load", Loaded)


def served(problem: Problem) -> str:
    return dispatch.kernel_for(problem, POLICY, device=0).info.name


def test_a_call_whose_pick_is_not_built_takes_the_bundles(
    machine: None, never: None, tmp_path: Path
) -> None:
    made = make_bundle(tmp_path, [BundledPick(problem=PROBLEM, candidate=OTHER, layer="default")])
    with settings.override(cache_dir=tmp_path / "cache", bundle=made.root, mode="off"):
        assert dispatch.lookup(PROBLEM, POLICY).candidate == DEFAULT
        assert served(PROBLEM) == OTHER.name
        assert served(replace(PROBLEM, batch=512)) == OTHER.name


@pytest.mark.parametrize("place", ["a file", "a file/below"])
def test_a_call_is_served_though_the_cache_cannot_be_used(
    machine: None, never: None, tmp_path: Path, place: str
) -> None:
    made = make_bundle(tmp_path, [BundledPick(problem=PROBLEM, candidate=OTHER, layer="default")])
    (tmp_path / "a file").write_text("")
    with settings.override(cache_dir=tmp_path / place, bundle=made.root):
        assert served(PROBLEM) == OTHER.name
    assert (tmp_path / "a file").read_text() == ""


def test_a_call_whose_pick_is_in_the_bundle_takes_that(
    machine: None, never: None, tmp_path: Path
) -> None:
    picks = [BundledPick(problem=PROBLEM, candidate=OTHER, layer="shipped"), *PICKS]
    made = make_bundle(tmp_path, picks)
    with settings.override(cache_dir=tmp_path / "cache", bundle=made.root, mode="off"):
        assert served(PROBLEM) == DEFAULT.name


def test_a_bundle_of_another_policy_lends_no_kernels(
    machine: None, no_compiler: None, tmp_path: Path
) -> None:
    made = make_bundle(
        tmp_path,
        [BundledPick(problem=PROBLEM, candidate=OTHER, layer="default")],
        policy="H100",
    )
    with (
        settings.override(cache_dir=tmp_path / "cache", bundle=made.root, mode="off"),
        pytest.raises(ToolchainError, match=DEFAULT.name),
    ):
        served(PROBLEM)


def test_the_users_record_is_compiled_where_it_can_be(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_bundle(tmp_path, [BundledPick(problem=PROBLEM, candidate=OTHER, layer="default")])
    built = publish(Store(tmp_path / "elsewhere"), DEFAULT)
    pick = dispatch.Pick(candidate=DEFAULT, layer="record")  # type: ignore[attr-defined]  # re-exported
    monkeypatch.setattr(dispatch.CacheHierarchy, "choose", lambda *_, **__: (pick, None))  # type: ignore[attr-defined]
    monkeypatch.setattr(dispatch, "obtain", lambda *_, **__: built)
    monkeypatch.setattr(dispatch, "find_toolchain", lambda settings: None)
    with settings.override(cache_dir=tmp_path / "cache", bundle=made.root):
        assert served(PROBLEM) == DEFAULT.name

    def refuse(settings: Any) -> None:
        raise ToolchainError("install nvcc")

    monkeypatch.setattr(dispatch, "find_toolchain", refuse)
    monkeypatch.setattr(dispatch, "obtain", obtain)
    with settings.override(cache_dir=tmp_path / "other", bundle=made.root):
        assert served(PROBLEM) == OTHER.name


def test_what_a_bundle_lent_serves_its_bucket_under_capture_too(
    machine: None, never: None, tmp_path: Path
) -> None:
    made = make_bundle(tmp_path, [BundledPick(problem=PROBLEM, candidate=OTHER, layer="default")])
    shorter = replace(PROBLEM, seqlen_q=PROBLEM.seqlen_q - 1)
    assert shorter.bucketed() == PROBLEM.bucketed()
    with settings.override(cache_dir=tmp_path / "cache", bundle=made.root):
        with pytest.raises(NotWarmError):
            dispatch.kernel_for(shorter, POLICY, device=0, must_be_warm=True)
        assert served(PROBLEM) == OTHER.name
        warm = dispatch.kernel_for(shorter, POLICY, device=0, must_be_warm=True)
        assert warm.info.name == OTHER.name
        dispatch.invalidate()
        assert dispatch.kernel_for(shorter, POLICY, device=0, must_be_warm=True) is warm


def test_with_tuning_off_no_other_pick_of_a_bundle_stands_in(
    machine: None, no_compiler: None, tmp_path: Path
) -> None:
    pick = BundledPick(problem=PROBLEM, candidate=OTHER, layer="shipped", proof=PROOF)
    made = make_bundle(tmp_path, [pick])
    with settings.override(cache_dir=tmp_path / "cache", bundle=made.root):
        assert served(PROBLEM) == OTHER.name
    with (
        settings.override(cache_dir=tmp_path / "cache", bundle=made.root, mode="off"),
        pytest.raises(ToolchainError, match=DEFAULT.name),
    ):
        served(PROBLEM)


def test_a_kernel_of_a_bundle_that_does_not_load_gives_way_to_the_pick(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_bundle(tmp_path, [BundledPick(problem=PROBLEM, candidate=OTHER, layer="default")])
    built = publish(Store(tmp_path / "elsewhere"), DEFAULT)

    def load(artifact: Any) -> Loaded:
        if artifact.name == OTHER.name:
            raise ArtifactError("GLIBC_2.99 not found")
        return Loaded(artifact)

    def take(candidate: Candidate, arch: str, **_: Any) -> Artifact:
        return built if candidate == DEFAULT else obtain(candidate, arch)

    monkeypatch.setattr(dispatch, "load", load)
    monkeypatch.setattr(dispatch, "obtain", take)
    with (
        caplog.at_level(logging.WARNING),
        settings.override(cache_dir=tmp_path / "cache", bundle=made.root),
    ):
        assert served(PROBLEM) == DEFAULT.name
        assert served(replace(PROBLEM, batch=512)) == DEFAULT.name
    assert caplog.text.count("GLIBC_2.99 not found") == 1


def test_kernels_of_a_family_that_the_gpu_does_not_run_do_not_stand_in(
    no_compiler: None, machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked = Problem(op="retnet", mask="explicit", dim_qk=64, dim_v=64)
    policy = H100()
    wide_candidate, narrow = policy.default(masked), policy.on((12, 0)).default(masked)
    assert (wide_candidate.family, narrow.family) == ("sm90", "sm80")
    made = make_bundle(
        tmp_path,
        [BundledPick(problem=masked, candidate=wide_candidate, layer="default")],
        policy="H100",
        arch="90",
    )
    monkeypatch.setattr(dispatch, "probe", lambda device: replace(H200, compute_capability=(12, 0)))
    with (
        settings.override(cache_dir=tmp_path / "cache", bundle=made.root),
        pytest.raises(ToolchainError, match=f"{narrow.name} has to be built"),
    ):
        dispatch.kernel_for(masked, policy, device=0)
