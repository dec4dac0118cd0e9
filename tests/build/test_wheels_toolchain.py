from __future__ import annotations

from pathlib import Path

import pytest

from attention_autotuner.codegen.toolchain import find_nvcc
from attention_autotuner.codegen.wheels import WHEELS, check_wheels
from tests.wheel_compilers import download, run_alone

pytestmark = pytest.mark.build

# On a machine where wheels are the only compiler: no other nvcc is looked for, and PATH has none.
SCRIPT = """
import json, sys
from pathlib import Path
from attention_autotuner.codegen import toolchain
from attention_autotuner.codegen.artifact import BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store

toolchain.nvcc_places = lambda: iter(())
tools = toolchain.find_toolchain()
knobs = ForwardKnobs(block_m=64, block_n=64, warps_m=4, num_stages=2, k_slice=32)
kernel = render(Candidate(dtype="bf16", padded_dim_qk=32, padded_dim_v=32, knobs=knobs))
(built,) = build([kernel], BuildTarget(arch="80"), toolchain=tools, store=Store(sys.argv[1]))
print(json.dumps({"nvcc": str(tools.nvcc), "path": str(getattr(built, "path", "")), "why": str(built)}))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiler's wheels and nothing else."""
    target = tmp_path_factory.mktemp("wheels")
    download(WHEELS, target)
    return target


def test_wheels_make_a_whole_compiler(wheels: Path) -> None:
    (root,) = (wheels / "nvidia").glob("cu*")
    check_wheels(root)
    compiler = find_nvcc(root)
    assert compiler.root == root.resolve()
    assert compiler.flags == (f"-L{root.resolve()}/lib",)


def test_wheels_alone_compile_a_kernel(wheels: Path, tmp_path: Path) -> None:
    result = run_alone(SCRIPT, wheels, tmp_path / "cache")
    assert Path(result["nvcc"]).is_relative_to(wheels)
    assert Path(result["path"]).is_file(), result["why"]
