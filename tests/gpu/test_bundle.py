"""Prebuilt kernels on a GPU: a fresh process without a compiler, an empty cache, and the time of its first call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import detect
from attention_autotuner.codegen.bundle import open_bundle
from attention_autotuner.codegen.kernel_wheel import write_wheel

pytestmark = pytest.mark.gpu

FIRST_CALL_SECONDS = 1.0
# No compiler is left for the process to find. The GPU is in use before the first call, as in any program.
PROGRAM = """
import json, sys, time
import torch
from attention_autotuner import dispatch, flash_attn_func, reference
from attention_autotuner.codegen import toolchain

for name in ("_nvcc_places", "wheel_roots", "cu12_places"):
    setattr(toolchain, name, lambda: iter(()))
batch, heads, seqlen = map(int, sys.argv[1:4])
make = lambda: torch.randn(batch, heads, seqlen, 64, dtype=torch.float16, device="cuda")
q, k, v = (make().requires_grad_() for _ in range(3))
dout = make()
torch.cuda.synchronize()
start = time.perf_counter()
o = flash_attn_func(q, k, v)
torch.cuda.synchronize()
forward = time.perf_counter() - start
start = time.perf_counter()
o.backward(dout)
torch.cuda.synchronize()
backward = time.perf_counter() - start
inputs = [each.detach() for each in (q, k, v)]
exact, low = reference.attention(*inputs)[0], reference.attention_low(*inputs)[0]
verdict = reference.check(o.detach(), exact, low)
print(json.dumps({
    "forward_seconds": forward,
    "backward_seconds": backward,
    "ok": verdict.ok,
    "why": verdict.reason,
    "finite": all(bool(each.grad.isfinite().all()) for each in (q, k, v)),
}))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of one class for the GPU at hand, written by the command."""
    output = tmp_path_factory.mktemp("bundles") / "bundle"
    command = [sys.executable, "-m", "attention_autotuner", "export", "--output", str(output)]
    command += ["--direction", "step", "--dim-qk", "64", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kernels"] >= 2
    return output


def run(cache: Path, shape: tuple[int, int, int], **variables: str) -> dict[str, Any]:
    """The program's findings."""
    unwanted = ("CUDA_HOME", "CUDA_PATH", "ATTENTION_AUTOTUNER_NVCC", "ATTENTION_AUTOTUNER_BUNDLE")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, shape)],
        env={**kept, "ATTENTION_AUTOTUNER_CACHE_DIR": str(cache), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], cache: Path) -> None:
    assert found["ok"], found["why"]
    assert found["finite"]
    assert found["forward_seconds"] <= FIRST_CALL_SECONDS, found
    assert found["backward_seconds"] <= FIRST_CALL_SECONDS, found
    assert not (cache / "kernels").exists()


# The problem that was exported, and one whose own pick need not be in the bundle.
@pytest.mark.parametrize("shape", [(4, 16, 4096), (2, 3, 777)])
def test_the_first_call_from_a_bundle(
    bundle: Path, tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    found = run(tmp_path / "cache", shape, ATTENTION_AUTOTUNER_BUNDLE=str(bundle))
    check(found, tmp_path / "cache")


def test_the_first_call_from_an_installed_package(bundle: Path, tmp_path: Path) -> None:
    wheel = write_wheel(open_bundle(bundle), detect(0).spec.name, tmp_path / "dist")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)  # what pip does with a wheel of data
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    check(run(tmp_path / "cache", (4, 16, 4096), PYTHONPATH=path), tmp_path / "cache")


def test_without_a_compiler_and_without_kernels_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has to be built first: no usable nvcc"):
        run(tmp_path / "cache", (1, 1, 64))
