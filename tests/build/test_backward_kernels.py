"""Backward kernels as they are built: one unit of each kind that a plan can have."""

from __future__ import annotations

import ctypes

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core import abi
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import resources
from attention_autotuner.kernels.scores_backward_sm80.knobs import KeyPass
from tests.candidates import backward
from tests.pass_names import pass_named

pytestmark = pytest.mark.build

SMALL = backward(
    "one_pass",
    padded_dim_qk=64,
    padded_dim_v=64,
    keys=KeyPass(block_m=64, block_n=64, warp_pairs=2, num_stages=2),
)
WIDE = resolve("RTX4090").default(Problem(direction="backward", dim_qk=256, dim_v=512))
MAX_SECONDS = 35.0
MAX_BYTES = 4.8 * 2**30


@pytest.fixture(scope="module")
def built(kernel_store: Store) -> dict[str, Artifact]:
    kernels = [render(selected) for selected in (SMALL, WIDE)]
    results = build(kernels, BuildTarget(arch="80"), toolchain=find_toolchain(), store=kernel_store)
    kernels_by_name = {}
    for kernel, result in zip(kernels, results, strict=True):
        assert isinstance(result, Artifact), result
        kernels_by_name[kernel.name] = result
    return kernels_by_name


@pytest.mark.parametrize("candidate", [SMALL, WIDE], ids=["one_pass", "three_kernels"])
def test_every_pass_is_reported_by_itself_and_spills_in_no_loop(
    built: dict[str, Artifact], candidate: Candidate
) -> None:
    report = built[candidate.name].report
    assert report.loop_spills is False
    reported = {pass_named(candidate, kernel.name): kernel for kernel in report.kernels}
    assert reported.keys() == {None, *candidate.knobs.passes}
    assert report.registers == max(kernel.registers for kernel in report.kernels)
    for needs in resources.kernels(candidate):
        assert reported[needs.name].registers >= needs.fragment_registers
        assert reported[needs.name].static_smem_bytes == 0


@pytest.mark.parametrize("candidate", [SMALL, WIDE], ids=["one_pass", "three_kernels"])
def test_builds_stay_within_time_and_memory(
    built: dict[str, Artifact], candidate: Candidate
) -> None:
    artifact = built[candidate.name]
    assert artifact.build_seconds <= MAX_SECONDS
    assert artifact.build_peak_bytes <= MAX_BYTES


def test_the_split_plan_needs_no_more_than_99_kib(built: dict[str, Artifact]) -> None:
    assert WIDE.knobs.plan == "three_kernels"
    info = _info(built[WIDE.name])
    assert info.dynamic_smem_bytes == resources.smem_bytes(WIDE) <= 99 * 1024


def _info(artifact: Artifact) -> abi.KernelInfo:
    library = ctypes.CDLL(str(artifact.path))
    info = abi.KernelInfo(struct_size=ctypes.sizeof(abi.KernelInfo))
    assert library.attention_autotuner_get_kernel_info(ctypes.byref(info)) == abi.STATUS_OK
    return info


def test_a_library_describes_itself_without_a_gpu(built: dict[str, Artifact]) -> None:
    info = _info(built[SMALL.name])
    assert info.name == SMALL.name.encode()
    assert (info.padded_dim_qk, info.padded_dim_v) == (64, 64)
    assert (info.block_m, info.block_n) == (64, 64)
    assert info.num_threads == SMALL.knobs.num_threads
    assert info.dynamic_smem_bytes == resources.smem_bytes(SMALL)


def _workspace_bytes(artifact: Artifact, selected: Candidate, heads_kv: int) -> int:
    """Of 2 sequences with 4 query heads, 100 queries and 300 keys."""
    library = ctypes.CDLL(str(artifact.path))
    library.attention_autotuner_workspace_bytes.restype = ctypes.c_size_t
    params = abi.AttentionBackwardParams(
        struct_size=ctypes.sizeof(abi.AttentionBackwardParams),
        abi_version=abi.ABI_VERSION,
        batch=2,
        heads_q=4,
        heads_kv=heads_kv,
        seqlen_q=100,
        seqlen_k=300,
        dim_qk=selected.padded_dim_qk,
        dim_v=selected.padded_dim_v,
    )
    return int(library.attention_autotuner_workspace_bytes(ctypes.byref(params)))


def test_the_workspace_holds_statistics_and_the_sums_of_dq(built: dict[str, Artifact]) -> None:
    wide_candidate, small = (
        _workspace_bytes(built[selected.name], selected, heads_kv=4) for selected in (WIDE, SMALL)
    )
    # Two floats for each of 100 rows at least, with room for a tile beyond them.
    assert 8 * 8 * 100 <= wide_candidate <= 8 * 8 * 512
    # And 128 rows of 64 sums for each head.
    assert small - wide_candidate == 8 * 128 * 64 * 4


@pytest.mark.parametrize("selected", [SMALL, WIDE], ids=["one_pass", "three_kernels"])
def test_the_workspace_holds_the_parts_of_shared_groups(
    built: dict[str, Artifact], selected: Candidate
) -> None:
    alone, shared = (_workspace_bytes(built[selected.name], selected, heads_kv=n) for n in (4, 1))
    # dK and dV in fp32 for each of the four CTAs that share a block of keys.
    assert shared - alone == 4 * 2 * 300 * (selected.padded_dim_qk + selected.padded_dim_v) * 4
