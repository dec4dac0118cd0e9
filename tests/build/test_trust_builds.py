"""Tampering with what CMake and the C++ client read: nothing foreign runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from attention_autotuner.codegen.artifact import BuildTarget
from attention_autotuner.codegen.entries import LIBRARY
from attention_autotuner.codegen.project import Project, configure
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.identity import values_of
from tests.cpp_programs import SMALL, ask, load, run

pytestmark = pytest.mark.build

STRANGER = 54321  # no user and no group of any machine


@pytest.fixture(scope="module")
def pick(cpp_programs: Path) -> Path:
    """The command that says what a bundle serves."""
    return cpp_programs / "client" / "attention_autotuner_pick"


def test_commands_added_to_what_cmake_learnt_do_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "cache")

    def run_cmake(root: Path) -> None:
        project = Project(
            root=root, target=BuildTarget(arch="80"), toolchain=find_toolchain(), store=store
        )
        for folder in (project.sources, project.logs, project.temporary):
            folder.mkdir(parents=True)
        (project.sources / "k0.cu").touch()
        configure(project)

    run_cmake(tmp_path / "1")
    (kept,) = (store.root / "cmake").iterdir()
    with (kept / "CMakeCUDACompiler.cmake").open("a") as file:
        file.write(f'execute_process(COMMAND touch "{tmp_path / "ran"}")\n')
    run_cmake(tmp_path / "2")
    assert "is not what was kept there" in caplog.text
    assert not (tmp_path / "ran").exists()
    assert "execute_process" not in (kept / "CMakeCUDACompiler.cmake").read_text()


@pytest.mark.parametrize(
    "place", [".", "index.json", "kernels", "kernels/entry", f"kernels/entry/{LIBRARY}"]
)
def test_a_bundle_that_others_can_change_or_own_is_refused(
    pick: Path, fake_bundle: Path, tmp_path: Path, place: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(fake_bundle, copy)
    place = place.replace("entry", "attention_forward_fake")
    mode = (copy / place).stat().st_mode
    for bits in (0o002, 0o020):
        (copy / place).chmod(mode | bits)
        if bits == 0o020 and os.geteuid() == 0:
            os.chown(copy / place, -1, STRANGER)  # root's group is root's own
        if bits == 0o002 or os.geteuid() == 0:
            assert "others can write to it" in load(pick, copy)
    (copy / place).chmod(mode)
    if os.geteuid() != 0:
        pytest.skip("only root gives files to other users")
    os.chown(copy / place, STRANGER, -1)
    assert f"it belongs to user {STRANGER} and has mode" in load(pick, copy)
    problem = json.dumps(values_of(SMALL))
    trusting = ("--check", "--load", "--problem-json", problem, "--trust-owner", str(STRANGER))
    run(pick, "--bundle", copy, *trusting)


def test_a_linked_entry_counts_as_what_it_leads_to(
    pick: Path, fake_bundle: Path, tmp_path: Path
) -> None:
    copy, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    shutil.copytree(fake_bundle, copy)
    elsewhere.mkdir()
    entry = copy / "kernels" / "attention_forward_fake"
    entry.symlink_to(entry.rename(elsewhere / entry.name))
    problem = json.dumps(values_of(SMALL))
    run(pick, "--bundle", copy, "--load", "--problem-json", problem)
    elsewhere.chmod(0o777)
    assert f"{elsewhere} is not used" in load(pick, copy)


def test_an_index_nested_deeply_is_refused(pick: Path, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("[" * 100_000 + "]" * 100_000)
    done = ask(pick, "--bundle", tmp_path)
    assert (done.returncode, "nested too deeply" in done.stderr) == (1, True)
