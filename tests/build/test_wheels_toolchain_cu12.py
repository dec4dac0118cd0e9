"""A compiler for drivers of CUDA 12 from PyPI wheels: chosen by the driver, and its kernels are of CUDA 12."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from pathlib import Path

import pytest

from attention_autotuner.codegen.wheels import WHEELS_CU12
from attention_autotuner.core import abi
from tests.wheel_compilers import download, run_alone

pytestmark = pytest.mark.build

# On a machine where wheels are the only compiler, whose driver is of CUDA 12: a forward kernel of each family.
SCRIPT = """
import json, sys
from attention_autotuner.codegen import toolchain
from attention_autotuner.codegen.artifact import BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.kernels.scores_backward_sm90.knobs import BackwardSm90Knobs, Sm90Pass
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store

toolchain.nvcc_places = lambda: iter(())
toolchain.driver_release = lambda: (12, 4)
tools = toolchain.find_toolchain()
knobs = ForwardKnobs(block_m=64, block_n=64, warps_m=4, num_stages=2, k_slice=16)
wide = Sm90Pass(warpgroups=2, block_columns=64, num_stages=2, slice_stages=2)
wide = BackwardSm90Knobs(dq=wide, dk=wide, dv=wide)
dims = {"dtype": "fp16", "padded_dim_qk": 16, "padded_dim_v": 16}
kernels = [
    render(Candidate(knobs=knobs, **dims)),
    render(Candidate(op="retnet", direction="backward", mask="explicit", knobs=wide, **dims)),
]
built = build(kernels, BuildTarget(arch="80"), toolchain=tools, store=Store(sys.argv[1]))
print(json.dumps({
    "version": tools.nvcc_version,
    "root": str(tools.cuda_root),
    "paths": [str(getattr(each, "path", each)) for each in built],
}))
"""


@pytest.fixture(scope="module")
def wheels(repository: Path) -> Path:
    """A folder with these wheels and nothing else, kept between runs under the ignored ``build``."""
    key = hashlib.sha256("\n".join(WHEELS_CU12).encode()).hexdigest()[:16]
    target = repository / "build" / f"wheels-cu12-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    download(WHEELS_CU12, partial)
    partial.rename(target)
    return target


def test_a_driver_of_cuda_12_gets_kernels_of_cuda_12(wheels: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    said = run_alone(SCRIPT, wheels, tmp_path / "store", ATTENTION_AUTOTUNER_CACHE_DIR=str(cache))
    assert said["version"].startswith("12.")
    assert said["version"].endswith("+13.0.88")
    assert Path(said["root"]).parent == cache / "toolchains"
    for path in said["paths"]:
        library = Path(path)
        record = json.loads((library.parent / "build.json").read_text())
        assert record["toolchain"]["nvcc"] == said["version"]
        content = library.read_bytes()
        if record["target"]["ptx"]:
            assert (
                b".version 8." in content
            )  # the PTX, not compressed: a driver of CUDA 12 reads it
        assert b".version 9." not in content
        loaded = ctypes.CDLL(str(library))
        assert loaded.attention_autotuner_abi_version() == 1002 < abi.ABI_VERSION
