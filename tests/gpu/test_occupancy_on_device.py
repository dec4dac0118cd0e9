"""The CTAs that an SM holds of compiled kernels: the driver's count, and the one that estimates are made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from attention_autotuner.arch import Policy
from attention_autotuner.arch.occupancy import occupancy
from attention_autotuner.codegen.artifact import Artifact
from attention_autotuner.codegen.toolchain import find_disassembler
from attention_autotuner.codegen.tools import run_tool
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.registry import kernel_of
from attention_autotuner.tuning.sweeps import DIRECTIONS
from tests.numerics.kernel_pool import KernelPool

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")


@dataclass(frozen=True)
class Default:
    """The default kernel of a problem, by those of any GPU or with those of the present one alone."""

    problem: Problem
    everywhere: bool

    def candidate(self, present: Policy) -> Candidate:
        return (present.on((8, 0)) if self.everywhere else present).default(self.problem)


DEFAULTS = [
    Default(Problem(direction=direction, causal=True, dim_qk=dim, dim_v=dim), everywhere)
    for dim in (64, 128)
    for direction in DIRECTIONS
    for everywhere in (True, False)
]


@pytest.mark.parametrize("default", DEFAULTS, ids=lambda d: d.problem.describe())
def test_an_sm_holds_as_many_ctas_as_the_model_says(
    pool: KernelPool, default: Default, tmp_path: Path
) -> None:
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("cuobjdump is missing")
    candidate = default.candidate(pool.present)
    pool.kernel(candidate)
    artifact = pool.built[candidate]
    assert isinstance(artifact, Artifact)
    run_tool([disassembler, "-xelf", "all", artifact.path], seconds=60.0, folder=tmp_path)
    (cubin,) = tmp_path.glob("*.cubin")
    module = cupy.RawModule(path=str(cubin))
    for launch in kernel_of(candidate).passes(candidate):
        needs, symbol = launch.needs, launch.symbol or f"{candidate.kernel}I"
        compiled = [kernel for kernel in artifact.report.kernels if re.search(symbol, kernel.name)]
        assert compiled, symbol
        for kernel in compiled:
            function = module.get_function(kernel.name)
            function.max_dynamic_shared_size_bytes = needs.smem_bytes
            counted = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
                function.kernel.ptr, needs.threads, needs.smem_bytes
            )
            smem_bytes = needs.smem_bytes + kernel.static_smem_bytes
            assert counted == occupancy(
                pool.present.spec,
                threads=needs.threads,
                registers=kernel.registers,
                smem_bytes=smem_bytes,
            ), kernel.name
