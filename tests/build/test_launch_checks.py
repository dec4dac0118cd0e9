"""Answers of artifacts to params and workspaces that they cannot take, and their descriptions of themselves."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core import abi
from attention_autotuner.core.candidate import Candidate, Family
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_forward_sm90.knobs import AttentionForwardSm90Knobs
from attention_autotuner.kernels.gemm_sm90.knobs import GemmSm90Knobs
from attention_autotuner.kernels.registry import kernels_for
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.operations.gemm.problem import of_sizes
from attention_autotuner.operations.params import SOMEWHERE, params_of
from tests.emulation.build import build
from tests.numerics.packed_sequences import RETENTION

pytestmark = pytest.mark.build

ATTENTION = Problem(seqlen_q=64, seqlen_k=4096, dim_qk=64, dim_v=64)
PRODUCT = of_sizes(128, 128, 4096)
SPLIT: dict[str, tuple[Problem, Candidate]] = {
    "scores_forward_sm80": (
        ATTENTION,
        Candidate.of(
            ATTENTION,
            ForwardKnobs(
                block_m=64,
                block_n=64,
                warps_m=4,
                num_stages=2,
                k_slice=64,
                split_kv=True,
                splits=3,
            ),
        ),
    ),
    "attention_forward_sm90": (
        ATTENTION,
        Candidate.of(
            ATTENTION,
            AttentionForwardSm90Knobs(
                warpgroups=2,
                block_n=64,
                mainloop="overlap",
                output="direct",
                split_kv=True,
                splits=3,
            ),
        ),
    ),
    "gemm_sm90": (
        PRODUCT,
        Candidate.of(PRODUCT, GemmSm90Knobs(block_m=128, block_n=128, stages=4, splits=3)),
    ),
}
BENT = replace(ATTENTION, direction="backward", modifications=("softcap",))
LATER: dict[str, tuple[Problem, Family, int]] = {
    "bent_sm80": (BENT, "sm80", 1004),
    "bent_sm90": (BENT, "sm90", 1004),
    "packed_forward": (RETENTION, "sm80", 1005),
    "packed_backward": (replace(RETENTION, direction="backward"), "sm80", 1005),
}


def default(problem: Problem, family: Family) -> Candidate:
    (kernel, *_) = kernels_for(problem, (family,))
    knobs = kernel.default(problem, H100().spec)
    assert knobs is not None
    return Candidate.of(problem, knobs)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Libraries by name, for the emulated machine: what answers is host code, which is the same."""
    made = {name: candidate for name, (_, candidate) in SPLIT.items()}
    made |= {name: default(problem, family) for name, (problem, family, _) in LATER.items()}
    root = tmp_path_factory.mktemp("libraries")
    return {name: build(candidate, root / name).path for name, candidate in made.items()}


def of_some_tensors(problem: Problem) -> Any:
    """Params of a problem of one batch entry and head, whose tensors are somewhere."""
    params: Any = params_of(problem)
    params.splits = 3
    for name, kind, *_ in params._fields_:
        if kind is abi.Tensor:
            setattr(params, name, abi.Tensor(data=SOMEWHERE))
    return params


def ask(library: Path, function: str) -> Any:
    exported = getattr(ctypes.CDLL(str(library)), f"{abi.SYMBOL_PREFIX}{function}")
    exported.restype, exported.argtypes = abi.PROTOTYPES[function]
    return exported


@pytest.mark.parametrize("name", SPLIT)
def test_params_of_another_size_are_not_read(libraries: dict[str, Path], name: str) -> None:
    params = of_some_tensors(SPLIT[name][0])
    wanted = ask(libraries[name], "workspace_bytes")
    assert wanted(ctypes.addressof(params)) > 0
    params.struct_size = ctypes.sizeof(ctypes.c_uint32) * 2
    assert wanted(ctypes.addressof(params)) == 0


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("workspace", [None, SOMEWHERE + 8])
def test_workspaces_that_do_not_do_are_refused(
    libraries: dict[str, Path], name: str, workspace: int | None
) -> None:
    params = of_some_tensors(SPLIT[name][0])
    launch = ask(libraries[name], "launch")
    status = launch(ctypes.addressof(params), workspace, None, 0)
    assert status == abi.STATUS_BAD_ALIGNMENT
    status = launch(ctypes.addressof(params), SOMEWHERE, None, 0)
    assert status == abi.STATUS_BAD_DEVICE  # it was not prepared


@pytest.mark.parametrize("name", LATER)
def test_kernels_describe_themselves_by_the_version_of_their_params(
    libraries: dict[str, Path], name: str
) -> None:
    info = abi.KernelInfo(struct_size=ctypes.sizeof(abi.KernelInfo))
    assert ask(libraries[name], "get_kernel_info")(ctypes.byref(info)) == abi.STATUS_OK
    assert info.abi_version == ask(libraries[name], "abi_version")() == LATER[name][-1]
