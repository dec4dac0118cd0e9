"""The bounds of retnet's backward through r: right kernels pass, those with a wrong delta or sign fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.bindings import Binding, ways_of
from attention_autotuner.operations.shared.gammas import gammas_of
from attention_autotuner.operations.shared.tensors import Inputs
from attention_autotuner.reference import Bands, check, decay_mask

CPU = torch.device("cpu")
WIDE = Problem(
    op="retnet",
    mask="explicit",
    direction="backward",
    batch=1,
    heads_q=16,
    heads_kv=8,
    seqlen_q=165,
    seqlen_k=397,
    dim_qk=128,
    dim_v=128,
)
NARROW = replace(WIDE, seqlen_k=205, dim_qk=64, dim_v=64)
PROBLEMS = [
    WIDE,
    NARROW,
    replace(NARROW, dtype="bf16", causal=True),
    replace(NARROW, mask="decay", causal=True, seqlen_k=69),
]
CALLS = [
    pytest.param(problem, way, id=f"{problem.describe()}{way.note}")
    for problem in PROBLEMS
    for way in ways_of(problem)
    if "through r" in way.note
]

Tensors = dict[str, torch.Tensor]
Delta = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Sign = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Products summed in an order of their own: halves first."""
    half = q.shape[-1] // 2
    return q[..., :half] @ k[..., :half].mT + q[..., half:] @ k[..., half:].mT


def kernel(
    problem: Problem,
    inputs: Inputs,
    delta: Delta = lambda delta, r: delta / r,
    sign: Sign = lambda x, p: x.sign(),
) -> Tensors:
    """Gradients as kernels find them: fp32 sums of 16-bit products, P and dS rounded before theirs.

    Args:
        problem: gives shapes.
        inputs: of a way through r.
        delta: what goes from dX in rows where r acts, of ``rowsum(dout o)`` and r.
        sign: of X, from X and the rounded P.
    """
    dtype, group = inputs.q.dtype, problem.heads_q // problem.heads_kv
    large = {name: tensor.float() for name, tensor in inputs.tensors.items()}
    q, dout, o, r = (large[name] for name in ("q", "dout", "o", "r"))
    k, v = (large[name].repeat_interleave(group, 1) for name in ("k", "v"))
    if problem.mask == "decay":
        lengths, gamma = (problem.seqlen_q, problem.seqlen_k), gammas_of(large["log2_gamma"])
        mask = decay_mask(gamma, problem.heads_q, *lengths, CPU).float()
    else:
        mask = large["mask"]
    if problem.causal:
        mask = mask.tril(problem.causal_offset)
    scale, top = inputs.scalars["scale"], inputs.scalars.get("r_clamp_max", math.inf)
    r = r[..., None]
    s = scale * scores(q, k)
    x = s * mask
    p = (x / r).to(dtype).float()
    moved = delta((dout * o).flip(-1).sum(-1, keepdim=True), r)
    dx = dout @ v.mT / r - sign(x, p) * moved.masked_fill((r <= 1) | (r >= top), 0.0)
    ds = (dx * mask).to(dtype).float()
    by_kv_head = (problem.heads_kv, group)
    dmask = (dx * s).masked_fill(mask == 0, 0.0).sum(0)
    tensors = {
        "dq": scale * (ds @ k),
        "dk": scale * (ds.mT @ q).unflatten(1, by_kv_head).sum(2),
        "dv": (p.mT @ dout).unflatten(1, by_kv_head).sum(2),
        "dmask": dmask.sum(0, keepdim=True) if mask.shape[0] == 1 else dmask,
    }
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def reasons(problem: Problem, way: Binding, inputs: Inputs, tensors: Tensors) -> dict[str, str]:
    """Why outputs are wrong, by name; empty for right ones."""
    return {
        name: check(tensors[name], ref, low, Bands.of(problem, name, ref.dim())).reason
        for name, ref, low in way.references(problem, inputs)
    }


@pytest.mark.parametrize(("problem", "way"), CALLS)
def test_a_kernel_that_rounds_as_it_must_passes(problem: Problem, way: Binding) -> None:
    inputs = way.inputs(problem, seed=0, device=CPU)
    assert not any(reasons(problem, way, inputs, kernel(problem, inputs)).values())


@pytest.mark.parametrize(
    "delta",
    [
        pytest.param(lambda delta, r: torch.zeros_like(delta), id="dropped"),
        pytest.param(lambda delta, r: delta, id="not divided by r"),
        pytest.param(lambda delta, r: -delta / r, id="the wrong way"),
    ],
)
@pytest.mark.parametrize("problem", [WIDE, NARROW], ids=lambda problem: str(problem.describe()))
def test_a_kernel_with_a_wrong_delta_fails(problem: Problem, delta: Delta) -> None:
    way = next(way for way in ways_of(problem) if "to one mask" in way.note)
    inputs = way.inputs(problem, seed=0, device=CPU)
    faults = reasons(problem, way, inputs, kernel(problem, inputs, delta))
    assert faults["dq"]
    assert faults["dk"]
    assert not faults["dv"]


def test_a_sign_that_is_lost_where_p_underflows_is_wrong() -> None:
    problem = replace(WIDE, batch=4)
    way = next(way for way in ways_of(problem) if "to one mask" in way.note)
    inputs = way.inputs(problem, seed=0, device=CPU)
    tensors = kernel(problem, inputs, sign=lambda x, p: p.sign())
    assert any(reasons(problem, way, inputs, tensors).values())


def test_rows_where_the_order_of_a_sum_decides_a_sign_have_no_gradient() -> None:
    problem = replace(WIDE, batch=4)
    way = next(way for way in ways_of(problem) if "to one mask" in way.note)
    inputs = way.inputs(problem, seed=0, device=CPU)
    q = inputs.q.float()
    k = inputs.k.float().repeat_interleave(2, 1)
    flipped = (scores(q, k).sign() != scores(q.flip(-1), k.flip(-1)).sign()).any(-1)
    flipped |= (scores(q, k).sign() != (q @ k.mT).sign()).any(-1)
    silent = (inputs.tensors["dout"] == 0).all(-1)
    assert 0 < silent.float().mean() < 0.01
    assert not (flipped & ~silent).any()
