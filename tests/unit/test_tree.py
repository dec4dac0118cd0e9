"""Digests of kernels that a bundle knows: they hold where all that kernels are made from has the same contents."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import A100
from attention_autotuner.codegen import bundle, installed, obtain, toolchain
from attention_autotuner.codegen.bundle import INDEX, BundledPick
from attention_autotuner.codegen.render import include_root, kernel_digest, render
from attention_autotuner.codegen.source_digest import source_digest
from attention_autotuner.codegen.tree import digest_of_tree
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.serving import runtime
from attention_autotuner.tuning import validity
from tests.fake_bundles import make_bundle

PROBLEM = Problem(dim_qk=64, dim_v=64)
CANDIDATE = A100().default(PROBLEM)
PICK = BundledPick(problem=PROBLEM, candidate=CANDIDATE, layer="default")


def later() -> int:
    """A time after every edit of a test."""
    return time.time_ns() + 10**10


def test_any_change_of_a_file_is_another_tree(tmp_path: Path) -> None:
    root = tmp_path / "include"
    shutil.copytree(include_root(), root)
    before = digest_of_tree([root], since_ns=later())
    assert before == digest_of_tree([include_root()], since_ns=later())
    header = root / "attention_autotuner" / "abi.h"
    text, times = header.read_text(), (header.stat().st_atime_ns, header.stat().st_mtime_ns)
    header.write_text(text.replace("1", "2", 1))  # of the same size, and of the same time
    os.utime(header, ns=times)
    assert header.stat().st_size == len(text.encode())
    assert digest_of_tree([root], since_ns=later()) not in (before, None)
    header.write_text(text)
    assert digest_of_tree([root], since_ns=later()) == before
    header.rename(header.with_name("abj.h"))
    assert digest_of_tree([root], since_ns=later()) not in (before, None)


def test_a_tree_that_changed_since_the_import_has_no_digest(tmp_path: Path) -> None:
    assert digest_of_tree([tmp_path]) is not None
    (tmp_path / "header.h").write_text("")
    os.utime(tmp_path / "header.h", (0, 0))
    assert digest_of_tree([tmp_path]) is None
    assert digest_of_tree([tmp_path], since_ns=later()) is not None
    assert digest_of_tree([tmp_path / "missing"], since_ns=later()) is None
    assert digest_of_tree(since_ns=later()) is not None


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A bundle that the setting names, and a machine that has nothing else."""
    monkeypatch.setattr(installed, "packages", tuple)
    monkeypatch.setattr(toolchain, "driver_release", lambda: None)
    for module, name in ((bundle, "digest_of_tree"), (installed, "present_tree")):
        monkeypatch.setattr(module, name, lambda: digest_of_tree(since_ns=later()))
    made = make_bundle(tmp_path, [PICK])
    with (
        settings.override(cache_dir=tmp_path / "cache", bundle=made.root),
        runtime.fresh(),
    ):
        yield made.root


def refuse(candidate: Candidate) -> None:
    pytest.fail(f"{candidate.name} was rendered")


def test_nothing_is_rendered_for_a_bundle_of_this_tree(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_digest(render(CANDIDATE))
    for module in (installed, obtain, validity):
        monkeypatch.setattr(module, "render", refuse)
    assert validity.PresentKernels().source(CANDIDATE) == source
    artifact = obtain.at_hand(CANDIDATE, "80")
    assert artifact is not None
    assert artifact.path.is_relative_to(root)


@pytest.mark.parametrize("tree", ["0" * 64, None, 3])
def test_digests_of_another_tree_are_taken_again(root: Path, tree: object) -> None:
    index = json.loads((root / INDEX).read_text())
    (kernel,) = index["kernels"]
    index |= {"tree": tree, "kernels": [{**kernel, "kernel_digest": "1", "source_digest": "2"}]}
    (root / INDEX).write_text(json.dumps(index))
    assert validity.PresentKernels().source(CANDIDATE) == source_digest(render(CANDIDATE))
    in_force = settings.current()
    assert installed.identity_of(CANDIDATE, in_force) == kernel_digest(render(CANDIDATE))
    assert obtain.at_hand(CANDIDATE, "80") is None


def test_a_kernel_of_other_sources_is_written_without_a_source_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(render(CANDIDATE), text="// of another day")
    monkeypatch.setattr("tests.fake_bundles.render", lambda candidate: changed)
    (kernel,) = make_bundle(tmp_path, [PICK]).kernels
    assert kernel.source_digest is None
