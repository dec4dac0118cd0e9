"""Build and run the C++ programs without a GPU, over kernels that run on the host."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attention_autotuner.codegen.toolchain import Toolchain
from attention_autotuner.codegen.tools import clean_environment
from attention_autotuner.core import abi
from attention_autotuner.core.identity import values_of
from attention_autotuner.core.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "tests" / "build" / "cpp"
FAKES = ROOT / "tests" / "unit"
SMALL = Problem(
    batch=1, heads_q=2, heads_kv=1, seqlen_q=32, seqlen_k=32, dim_qk=64, dim_v=48, causal=True
)
RETENTION = replace(SMALL, op="retention")


@dataclass(frozen=True, kw_only=True)
class Fake:
    """A kernel that runs on the host.

    Attributes:
        name: the name that the kernel reports, beginning with operation and direction.
        source: file name in the folder of the unit tests.
        options: compiler options.
        problem: the problem that the kernel is the pick of.
    """

    name: str
    source: str = "fake_kernel.c"
    options: tuple[str, ...] = ()
    problem: Problem = SMALL


FAKE_KERNELS = (
    Fake(name="attention_forward_fake"),
    Fake(
        name="attention_backward_fake",
        options=("-DBACKWARD",),
        problem=replace(SMALL, direction="backward"),
    ),
    Fake(name="retention_forward_fake", source="fake_retention.c", problem=RETENTION),
    Fake(
        name="retention_forward_decoding",
        source="fake_retention.c",
        problem=replace(RETENTION, form="recurrent"),
    ),
    Fake(
        name="retention_backward_fake",
        source="fake_retention.c",
        options=("-DBACKWARD",),
        problem=replace(RETENTION, direction="backward"),
    ),
)


def run(*command: str | Path, environment: Mapping[str, str] | None = None) -> str:
    """The standard output of a command, which must succeed."""
    done = ask(*command, environment=environment)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def ask(
    *command: str | Path, environment: Mapping[str, str] | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """The completed process of a command, whatever its exit status."""
    return subprocess.run(
        [str(part) for part in command],
        env=None if environment is None else dict(environment),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def cmake(
    toolchain: Toolchain, source: Path, build: Path, *options: str, target: str = "all"
) -> None:
    """Configure and build a project."""
    tools = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja}"]
    environment = clean_environment()
    run(toolchain.cmake, *tools, "-S", source, "-B", build, *options, environment=environment)
    run(toolchain.ninja, "-C", build, target, environment=environment)


def compile_library(folder: Path, fake: Fake) -> Path:
    """Compile a kernel that runs on the host."""
    library = folder / "kernel.so"
    command: list[str | Path] = ["gcc", "-std=gnu11", "-O1", "-shared", "-fPIC"]
    command += ["-fvisibility=hidden", f'-DNAME="{fake.name}"', *fake.options]
    command += [f"-I{ROOT / 'templates' / 'include'}", FAKES / fake.source, "-o", library, "-lm"]
    run(*command)
    return library


def index_of(
    kernels: Sequence[dict[str, Any]], picks: Sequence[dict[str, Any]], **changes: Any
) -> dict[str, Any]:
    """An index of a bundle."""
    index = {
        "schema": 1,
        "abi_version": abi.ABI_VERSION,
        "package_version": "0.1.0",
        "arch": "A100",
        "build_arch": "80",
        "created": "2026-11-21T00:00:00+00:00",
        "environment": None,
        "kernels": list(kernels),
        "picks": list(picks),
    }
    return index | changes


def pick_of(problem: Problem, kernel: int, layer: str = "default") -> dict[str, Any]:
    """A pick as written in an index."""
    return {
        "problem": values_of(problem.bucketed()),
        "kernel": kernel,
        "layer": layer,
        "gpu_name": None,
        "median_us": None,
        "estimate_us": 1.5,
    }


def checks_of(library: Path) -> dict[str, Any]:
    """Size and checksum of a library as an index has them."""
    content = library.read_bytes()
    return {
        "library_sha256": hashlib.sha256(content).hexdigest(),
        "library_bytes": len(content),
    }


def kernel_of(name: str, library: Path, root: Path) -> dict[str, Any]:
    """A kernel as written in an index."""
    return {
        "name": name,
        "library": library.relative_to(root).as_posix(),
        **checks_of(library),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "kernel_digest": hashlib.sha256(name.encode() * 2).hexdigest(),
        "target": {"arch": "80", "ptx": True},
        "toolchain": {},
        "candidate": {},
    }


def write_fake_bundle(root: Path, fakes: Sequence[Fake] = FAKE_KERNELS) -> Path:
    """A bundle of kernels that run on the host, each the default pick of its problem."""
    kernels, picks = [], []
    for fake in fakes:
        folder = root / "kernels" / fake.name
        folder.mkdir(parents=True)
        kernels.append(kernel_of(fake.name, compile_library(folder, fake), root))
        picks.append(pick_of(fake.problem, len(kernels) - 1))
    (root / "index.json").write_text(json.dumps(index_of(kernels, picks)), encoding="utf-8")
    return root


def load(pick: Path, bundle: Path, *more: str) -> str:
    """The reason that a bundle's attention forward kernel cannot be loaded."""
    problem = json.dumps(values_of(SMALL))
    done = ask(pick, "--bundle", bundle, "--load", "--problem-json", problem, *more)
    assert done.returncode == 1, done.stdout
    return done.stderr
