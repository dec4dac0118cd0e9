"""The GPU smoke suite without a GPU: its coverage, and kernels that another machine built."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import Toolchain
from attention_autotuner.core.problem import Problem
from tests.fake_bundles import publish
from tests.gpu import smoke
from tests.numerics.kernel_pool import CARRIED, adopt

MAX_KERNELS = 97  # 16 cores build these in little more than a minute
HERE = Path("/usr")
TOOLCHAIN = Toolchain(
    nvcc=HERE / "nvcc",
    nvcc_version="13.0.48",
    cuda_root=HERE,
    cuda_flags=(),
    host_cxx=HERE / "g++",
    host_cxx_version="g++ 13.3.0",
    cutlass_include=HERE,
    cutlass_version="4.2.0",
    cmake=HERE / "cmake",
    cmake_version="4.1",
    ninja=HERE / "ninja",
)
PROBLEM = Problem(batch=2, heads_q=4, heads_kv=4, seqlen_q=512, seqlen_k=512, dim_qk=64, dim_v=64)


@pytest.fixture(scope="module")
def listed(repository: Path) -> list[str]:
    """The lines that the command prints about the suite."""
    command = [sys.executable, "-m", "tests.gpu.prebuild", "--list", "-m", "smoke"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


def test_the_suite_covers_operations_directions_families_and_dtypes(listed: list[str]) -> None:
    (summary,) = (line for line in listed if " tests need " in line)
    tests, count = (int(word) for word in summary.split() if word.isdigit())
    assert tests >= 200
    assert count <= MAX_KERNELS
    names = [line for line in listed if line.endswith(("_c16", "_c2"))]
    assert len(names) == count
    kinds = [
        *((f"attention_{way}_sm80",) for way in ("forward", "backward")),
        *((f"attention_{way}_sm90",) for way in ("forward", "backward")),
        *((f"retnet_{way}_explicit_sm90",) for way in ("forward", "backward")),
        ("retnet_forward_decay_sm80",),
        ("retnet_backward_decay_sm90",),
        ("retention_forward_sm80", "_parallel_"),
        ("retention_forward_sm90", "_chunkwise_"),
        ("retention_forward_sm80", "_recurrent_"),
        ("retention_backward_sm80",),
        ("retention_backward_sm90",),
    ]
    for start, *words in kinds:
        for dtype in ("fp16", "bf16"):
            having = [name for name in names if name.startswith(f"{start}_{dtype}_")]
            assert any(all(word in name for word in words) for name in having), (start, dtype)
    for op in ("attention", "retnet", "retention"):
        assert any(name.startswith(f"{op}_") and name.endswith("_c2") for name in names)


def test_every_function_named_in_the_suite_exists(repository: Path) -> None:
    named = {**smoke.FUNCTIONS}
    for functions in (smoke.CASES, smoke.SAMPLES):
        for module, function in functions.items():
            named[module] = (*named.get(module, ()), function)
    for module, names in named.items():
        text = (repository / "tests" / "gpu" / f"{module}.py").read_text(encoding="utf-8")
        for function in names:
            assert f"def {function}(" in text, f"{module}.{function}"


def test_kernels_of_another_compiler_are_adopted(tmp_path: Path) -> None:
    policy = resolve("H200").on((8, 0))  # whose kernels are built for several GPUs
    candidate = policy.default(PROBLEM)
    other = policy.default(replace(PROBLEM, dtype="bf16"))
    kernel, target = render(candidate), BuildTarget(arch="90")
    carried, store = Store(tmp_path / "carried"), Store(tmp_path / "store")
    built = publish(carried, candidate, arch="90", nvcc="13.0.88", content=b"carried")
    publish(carried, other, arch="80")  # for another GPU
    (carried.root / CARRIED).write_text(json.dumps([candidate.config, other.config]))
    assert store.get(kernel, target, TOOLCHAIN) is None
    for _ in range(2):  # a second time is no error
        assert adopt(carried.root, store, target, TOOLCHAIN) == 1
    adopted = store.get(kernel, target, TOOLCHAIN)
    assert isinstance(adopted, Artifact)
    assert adopted.path.read_bytes() == b"carried"
    assert adopted.toolchain == built.toolchain  # the real compiler
    assert store.get(render(other), target, TOOLCHAIN) is None
