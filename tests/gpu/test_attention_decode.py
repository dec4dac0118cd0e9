"""Few queries on long keys by attention's forwards: every split count gives what the reference gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_autotuner.arch import A100, H100
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_forward_sm90.knobs import knobs_of
from tests.gpu.verifying import verify_all
from tests.numerics import harness
from tests.numerics.cases import Case
from tests.numerics.kernel_pool import KernelPool

pytestmark = pytest.mark.gpu

FEW = Problem(
    dtype="bf16", batch=3, heads_q=8, heads_kv=2, seqlen_q=1, seqlen_k=2000, dim_qk=128, dim_v=128
)
DECODING = {
    "one": FEW,
    "late": replace(FEW, seqlen_q=5, seqlen_k=1333, causal=True),
    "early": replace(FEW, seqlen_q=5, seqlen_k=900, causal=True, causal_alignment="top_left"),
    "odd_group": replace(FEW, heads_q=10, seqlen_q=3, causal=True),
    "rows": replace(FEW, heads_q=2, seqlen_q=77, causal=True),
    "chunk": replace(FEW, batch=1, seqlen_q=300, seqlen_k=2600, causal=True),
    "dims": replace(FEW, dim_qk=96, dim_v=96),
    "unlike_dims": replace(FEW, heads_kv=8, dim_qk=192),
    "wide_dims": replace(FEW, dim_qk=256, dim_v=256),
    "short": replace(FEW, seqlen_k=1),
}
CHUNK = replace(
    FEW,
    batch=1,
    heads_q=8,
    heads_kv=1,
    seqlen_q=300,
    seqlen_k=9000,
    dim_qk=64,
    dim_v=64,
    causal=True,
)
UNEVEN = replace(CHUNK, heads_q=3, heads_kv=3, seqlen_q=3000, seqlen_k=3000)
TALL = {
    "claimed": UNEVEN,
    "claimed_d128": replace(UNEVEN, dim_qk=128, dim_v=128),
    "no_groups": replace(CHUNK, heads_kv=8, seqlen_q=512),
    "softcap": replace(CHUNK, modifications=("softcap",)),
    "masks": replace(CHUNK, modifications=("attn_mask",), seqlen_k=4000),
    "unlike_dims": replace(CHUNK, dim_qk=192, dim_v=128),
    "d160": replace(CHUNK, batch=2, seqlen_q=384, seqlen_k=10000, dim_qk=160, dim_v=160),
    **{f"d{dim}": replace(CHUNK, dim_qk=dim, dim_v=dim) for dim in (32, 64, 80, 96, 112, 128)},
}
PROBLEMS = [*DECODING.values(), *TALL.values()]


def stream_of(family: str, problem: Problem, device: torch.device) -> Candidate:
    """The default that splits keys of a family on the present GPU."""
    if family == "sm80":
        return A100().default(problem)
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return H100().default(problem)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("name", DECODING)
def test_split_counts(pool: KernelPool, name: str, family: str, device: torch.device) -> None:
    problem = DECODING[name]
    default = stream_of(family, problem, device)
    assert default.family == family
    assert default.knobs.split_kv
    for splits in (1, 2, 3, 7, 40):
        candidate = default.launched({"splits": splits})
        kernel = pool.kernel(candidate)
        for seed in harness.SEEDS:
            case = Case(problem=problem)
            assert harness.errors_of(kernel, case, seed=seed, device=device) == [], candidate.name


@pytest.mark.parametrize("name", TALL)
def test_tiles_of_three_and_four_warpgroups_split_keys(
    pool: KernelPool, name: str, device: torch.device
) -> None:
    default = stream_of("sm90", TALL[name], device)
    assert default.knobs.split_kv
    assert knobs_of(default).warpgroups > 2
    assert (knobs_of(default).schedule == "dynamic") is name.startswith("claimed")
    for splits in (knobs_of(default).splits, 3):
        candidate = default.launched({"splits": splits})
        kernel = pool.kernel(candidate)
        if TALL[name].modifications:
            verify_all([TALL[name]], kernel, deterministic=candidate.deterministic, device=device)
            continue
        for seed in harness.SEEDS:
            case = Case(problem=TALL[name])
            assert harness.errors_of(kernel, case, seed=seed, device=device) == [], default.name
