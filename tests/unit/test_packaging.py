"""The files of a wheel, and the package installed from the wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.codegen.wheels import WHEELS, WHEELS_CU12
from attention_autotuner.kernels.registry import KERNELS

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

SOURCES = (
    "arch",
    "codegen",
    "python",
    "templates",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
TOY, INCLUDE = "naive_sm80", "templates/include/attention_autotuner"
PROGRAM = """
import json, sys
import attention_autotuner
from attention_autotuner import arch, templates
from attention_autotuner.core.problem import Problem
from attention_autotuner.codegen.render import include_closure, render
candidate = arch.resolve("A100").default(Problem())
kernel = render(candidate)
print(json.dumps({
    "files": [attention_autotuner.__file__, arch.__file__, next(iter(templates.__path__))],
    "version": attention_autotuner.__version__,
    "headers": sorted(include_closure(kernel.text)),
    "torch": "torch" in sys.modules,
}))
"""


def toy_folders(repository: Path) -> dict[str, Path]:
    """The folders of a kernel family that the package does not have, by their paths in the sources."""
    toy = repository / "tests" / "toy_family"
    return {
        f"python/attention_autotuner/kernels/{TOY}": toy / TOY,
        f"{INCLUDE}/{TOY}": toy / "include" / TOY,
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A wheel built from a copy of the sources with one more kernel family, so that the tree stays clean."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (repository / name).is_dir():
            shutil.copytree(
                repository / name,
                copy / name,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            )
        else:
            shutil.copy(repository / name, copy / name)
    for target, folder in toy_folders(repository).items():
        shutil.copytree(folder, copy / target, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = (copy / "dist").glob("*.whl")
    return built


def configuration(repository: Path) -> dict[str, dict[str, object]]:
    text = (repository / "pyproject.toml").read_text(encoding="utf-8")
    parsed: dict[str, dict[str, object]] = tomllib.loads(text)
    return parsed


def test_the_wheel_holds_every_source_and_every_template(wheel: Path, repository: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    mapped = {"arch": "arch", "codegen": "codegen", "templates": "templates"}
    wanted = {
        f"attention_autotuner/{inside}/{path.relative_to(repository / folder).as_posix()}"
        for folder, inside in mapped.items()
        for path in (repository / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    package = repository / "python" / "attention_autotuner"
    wanted |= {
        f"attention_autotuner/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {
        f"{target}/{path.relative_to(folder).as_posix()}".removeprefix("python/").replace(
            INCLUDE, "attention_autotuner/templates/include/attention_autotuner"
        )
        for target, folder in toy_folders(repository).items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert not wanted - held
    assert {name for name in held if name.startswith("attention_autotuner/")} == wanted


def test_the_source_distribution_holds_the_client_and_the_examples(
    tmp_path: Path, repository: Path
) -> None:
    for name in (*SOURCES, "MANIFEST.in", "client", "examples"):
        (tmp_path / name).symlink_to(repository / name)
    metadata = tmp_path / "metadata"  # in place of one beside the sources
    metadata.mkdir()
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(metadata)]
    command += ["sdist", "--dist-dir", str(tmp_path / "dist")]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    (built,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(built) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"client/src/bundle.cpp", "client/include/attention_autotuner/client.hpp"}
    wanted |= {"client/CMakeLists.txt", "examples/cpp/CMakeLists.txt", "examples/cpp/attention.cpp"}
    wanted |= {"templates/include/attention_autotuner/abi.h", "examples/train_gpt.py"}
    assert wanted <= held


def test_no_packaging_file_names_a_kernel(repository: Path) -> None:
    packing = [
        (repository / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "setup.py")
    ]
    assert not [name for name in KERNELS for text in packing if name in text]


def said_from(folder: Path, place: Path) -> Any:
    """The answer of the program with the package of a folder, and of site-packages its dependencies alone."""
    places = f"{place}{os.pathsep}{sysconfig.get_path('purelib')}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_installed_wheel_imports_and_renders_from_its_own_files(
    wheel: Path, tmp_path: Path
) -> None:
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--target", str(target), str(wheel)], check=True)
    said = said_from(tmp_path, target)
    assert all(Path(name).is_relative_to(target) for name in said["files"]), said["files"]
    assert "attention_autotuner/abi.h" in said["headers"]
    assert not said["torch"]
    assert f"-{said['version']}-" in wheel.name


def test_a_checkout_serves_from_pythonpath_alone(tmp_path: Path, repository: Path) -> None:
    said = said_from(tmp_path, repository / "python")
    assert all(Path(name).resolve().is_relative_to(repository) for name in said["files"])
    assert "attention_autotuner/abi.h" in said["headers"]


def test_the_toolchain_extras_are_those_of_the_error_messages(repository: Path) -> None:
    extras = configuration(repository)["project"]["optional-dependencies"]
    assert isinstance(extras, dict)
    assert sorted(extras["toolchain"]) == sorted(WHEELS)
    assert sorted(extras["toolchain-cu12"]) == sorted(WHEELS_CU12)


def test_constraints_pin_the_versions_of_reported_results(repository: Path) -> None:
    text = (repository / "constraints.txt").read_text(encoding="utf-8")
    assert re.findall(r"^(torch|nvidia-cutlass)==(\S+)$", text, re.MULTILINE) == [
        ("torch", "2.13.0"),
        ("nvidia-cutlass", "4.2.0.0"),
    ]


def test_editors_reach_the_mapped_folders_by_links(repository: Path) -> None:
    listed = configuration(repository)["tool"]["setuptools"]
    assert isinstance(listed, dict)
    mapped: dict[str, str] = listed["package-dir"]
    folders = {name.partition(".")[2]: folder for name, folder in mapped.items() if "." in name}
    package = repository / "python" / "attention_autotuner"
    links = {path.name: path for path in package.iterdir() if path.is_symlink()}
    assert links.keys() == folders.keys()
    for name, link in links.items():
        assert not link.readlink().is_absolute()
        assert link.resolve() == (repository / folders[name]).resolve()
