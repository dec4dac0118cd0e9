"""Prebuilt kernels on a GPU: a fresh process without a compiler, an empty cache, and the time of its first call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.codegen.bundle import open_bundle
from attention_autotuner.errors import BuildError
from benchmarks.first_call import BAR_SECONDS, SHAPE, WAYS, export, first_call, install

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of one class of head dims for the present GPU, written by the command."""
    output = export(tmp_path_factory.mktemp("bundles") / "bundle")
    assert len(open_bundle(output).kernels) >= 2
    return output


def check(report: dict[str, Any], cache: Path) -> None:
    assert report["ok"], report["why"]
    assert report["finite"]
    for way in WAYS:
        assert report[way] <= BAR_SECONDS, report
    assert not (cache / "kernels").exists()


# The problem that was exported, and one whose own pick need not be in the bundle.
@pytest.mark.parametrize("shape", [SHAPE, (2, 3, 777)])
def test_the_first_call_from_a_bundle(
    bundle: Path, tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    report = first_call(tmp_path / "cache", shape, ATTENTION_AUTOTUNER_BUNDLE=str(bundle))
    check(report, tmp_path / "cache")


def test_the_first_call_from_an_installed_package(bundle: Path, tmp_path: Path) -> None:
    report = first_call(tmp_path / "cache", SHAPE, **install(bundle, tmp_path))
    check(report, tmp_path / "cache")


def test_without_a_compiler_and_without_kernels_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="has to be built first: no usable nvcc"):
        first_call(tmp_path / "cache", (1, 1, 64))
