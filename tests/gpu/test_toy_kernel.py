"""The toy family of tests/toy_family on a GPU: a kernel unknown to the package, compared with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from attention_autotuner.arch import probe
from attention_autotuner.arch.resolution import native_arch
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import DType, Problem
from attention_autotuner.serving import loader
from tests.numerics import harness
from tests.numerics.cases import Case
from tests.toy_family.naive_sm80.knobs import NaiveKnobs
from tests.toy_family.placing import toy_family

pytestmark = pytest.mark.gpu

PLAIN = Problem(
    batch=2, heads_q=4, heads_kv=2, seqlen_q=131, seqlen_k=200, dim_qk=56, dim_v=40, causal=True
)
NAMED = {
    "causal": PLAIN,
    "whole": replace(PLAIN, causal=False, dim_qk=64, dim_v=48),
    "rows that see no key": replace(PLAIN, seqlen_k=77),
    "one token": replace(PLAIN, seqlen_q=1, causal=False),
}
KNOBS: dict[DType, NaiveKnobs] = {
    "fp16": NaiveKnobs(warps=4),
    "bf16": NaiveKnobs(warps=8, exponential="approximate"),
}


@pytest.fixture(scope="module")
def kernels(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[DType, loader.LoadedKernel]]:
    """A kernel for each dtype."""
    folder = tmp_path_factory.mktemp("toy")
    with toy_family(folder):
        candidates = [Candidate.of(replace(PLAIN, dtype=dtype), KNOBS[dtype]) for dtype in KNOBS]
        target = BuildTarget(arch=native_arch(probe(0).compute_capability))
        results = build(
            [render(candidate) for candidate in candidates],
            target,
            toolchain=find_toolchain(),
            store=Store(folder / "store"),
        )
        loaded: dict[DType, loader.LoadedKernel] = {}
        for dtype, result in zip(KNOBS, results, strict=True):
            assert isinstance(result, Artifact), result
            loaded[dtype] = loader.load(result)
            loaded[dtype].prepare(0)
        yield loaded


@pytest.mark.parametrize("dtype", KNOBS)
@pytest.mark.parametrize("name", NAMED)
def test_results_match_the_reference(
    kernels: dict[DType, loader.LoadedKernel], name: str, dtype: DType, device: torch.device
) -> None:
    case = Case(problem=replace(NAMED[name], dtype=dtype))
    for seed in harness.SEEDS:
        assert harness.errors_of(kernels[dtype], case, seed=seed, device=device) == []
