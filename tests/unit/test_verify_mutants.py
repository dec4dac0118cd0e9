"""Results that are wrong in late rows or in one head: one tolerance a tensor lets them pass, heads and bands do not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.bindings import TORCH_DTYPES, Binding, Truth, ways_of
from attention_autotuner.operations.shared.tensors import Inputs
from attention_autotuner.reference import Bands, Comparison, check

CPU = torch.device("cpu")
FORWARD = Problem(
    dtype="bf16", batch=1, heads_q=1, heads_kv=1, seqlen_q=4096, seqlen_k=4096, causal=True
)
NARROW = replace(FORWARD, seqlen_q=8192, seqlen_k=8192, dim_qk=64, dim_v=64)
BACKWARD = replace(FORWARD, direction="backward", seqlen_q=2048, seqlen_k=2048)
RETENTION = replace(
    FORWARD,
    op="retention",
    heads_q=8,
    heads_kv=8,
    seqlen_q=2048,
    seqlen_k=2048,
    dim_qk=64,
    dim_v=64,
)
DECAYS = replace(
    RETENTION,
    direction="backward",
    dtype="fp16",
    heads_q=4,
    heads_kv=4,
    seqlen_q=2133,
    seqlen_k=2133,
)
V_TILE = 64  # keys

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A problem called one way, what its outputs are compared with, and the outputs of a kernel that rounds."""

    problem: Problem
    inputs: Inputs
    references: dict[str, Truth]
    right: Tensors

    def compare(self, name: str, out: torch.Tensor) -> tuple[Comparison, Comparison]:
        """By one tolerance for the whole tensor, and by heads and bands."""
        _, ref, low = self.references[name]
        out = out.to(self.right[name].dtype)
        return check(out, ref, low), check(out, ref, low, Bands.of(self.problem, name, ref.dim()))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As an operand of a product, in fp32 again."""
    return x.to(dtype).float()


def attention_forward(problem: Problem, inputs: Inputs) -> Tensors:
    """Attention with P rounded and everything else in fp32."""
    dtype = TORCH_DTYPES[problem.dtype]
    q, k, v = (x.float() for x in (inputs.q, inputs.k, inputs.v))
    s = (problem.dim_qk**-0.5 * (q @ k.mT)).masked_fill(~visible(problem), -math.inf)
    top = s.amax(-1, keepdim=True)
    p = (s - top).exp()
    total = p.sum(-1, keepdim=True)
    o = rounded(p, dtype) @ v / total
    return {"o": o.to(dtype), "lse": (top + total.log())[..., 0]}


def attention_backward(
    problem: Problem, inputs: Inputs, silent: slice = slice(0, 0), eased: float = 1.0
) -> Tensors:
    """Gradients with P and dS rounded; delta is 0 in silent rows, and ``eased`` times what it is elsewhere."""
    dtype, scale = TORCH_DTYPES[problem.dtype], problem.dim_qk**-0.5
    read = {name: x.float() for name, x in inputs.tensors.items()}
    q, k, v, dout = (read[name] for name in ("q", "k", "v", "dout"))
    p = (scale * (q @ k.mT) - read["lse"][..., None]).exp().masked_fill(~visible(problem), 0.0)
    delta = eased * (dout * read["o"]).sum(-1, keepdim=True)
    delta[:, :, silent] = 0.0
    ds = rounded(p * (dout @ v.mT - delta), dtype)
    outcome = {
        "dq": scale * (ds @ k),
        "dk": scale * (ds.mT @ q),
        "dv": rounded(p, dtype).mT @ dout,
    }
    return {name: x.to(dtype) for name, x in outcome.items()}


def retention_forward(problem: Problem, inputs: Inputs) -> Tensors:
    """Retention by all pairs of tokens, with scores rounded."""
    dtype, scale = TORCH_DTYPES[problem.dtype], problem.dim_qk**-0.5
    q, k, v = (x.float() for x in (inputs.q, inputs.k, inputs.v))
    index = torch.arange(problem.seqlen_q)
    distance = (index[:, None] - index).clamp(min=0)
    log2 = inputs.tensors["log2_gamma"].view(-1, 1, 1)
    scores = scale * (q @ k.mT) * (distance * log2).exp2().masked_fill(~visible(problem), 0.0)
    return {"o": (rounded(scores, dtype) @ v).to(dtype)}


def gradients_of_decays(problem: Problem, inputs: Inputs) -> Tensors:
    """The gradient of log2 gamma by all pairs of tokens in fp32, with states rounded where they meet tokens."""
    dtype, length = TORCH_DTYPES[problem.dtype], problem.seqlen_q
    read = {name: x.float() for name, x in inputs.tensors.items()}
    q, k, v, dout = (read[name] for name in ("q", "k", "v", "dout"))
    initial, dfinal = read["initial_state"], read["dfinal_state"]
    index = torch.arange(length)
    log2 = read["log2_gamma"].view(-1, 1, 1)
    distance = (index[:, None] - index).clamp(min=0)
    scale = problem.dim_qk**-0.5
    pairs = scale * (q @ k.mT) * (dout @ v.mT) * (distance * log2).exp2()
    shares = (distance * pairs).sum((-2, -1))
    entering, leaving = ((n[:, None] * log2).exp2() for n in (index + 1, length - 1 - index))
    seen = scale * entering * (q @ rounded(initial, dtype)) * dout
    kept = leaving * (k @ rounded(dfinal, dtype)) * v
    shares += ((index + 1)[:, None] * seen).sum((-2, -1))
    shares += ((length - 1 - index)[:, None] * kept).sum((-2, -1))
    shares += length * ((length * log2).exp2() * initial * dfinal).sum((-2, -1))
    return {"dlog2_gamma": math.log(2) * shares}


def visible(problem: Problem) -> torch.Tensor:
    """``[seqlen_q, seqlen_k]``: keys that rows see."""
    return torch.ones(problem.seqlen_q, problem.seqlen_k).tril().bool()


def way_of(problem: Problem, note: str) -> Binding:
    """The first way to call a problem's kernels with this in its note."""
    return next(way for way in ways_of(problem) if note in way.note)


@functools.cache
def setting(problem: Problem) -> Setting:
    """Made once for all mutants of a problem."""
    kernel: dict[tuple[str, str], Callable[[Problem, Inputs], Tensors]] = {
        ("attention", "forward"): attention_forward,
        ("attention", "backward"): attention_backward,
        ("retention", "forward"): retention_forward,
        ("retention", "backward"): gradients_of_decays,
    }
    way = way_of(problem, "gammas of all sizes" if problem == DECAYS else "")
    inputs = way.inputs(problem, seed=0, device=CPU)
    return Setting(
        problem=problem,
        inputs=inputs,
        references={row[0]: row for row in way.truths(problem, inputs)},
        right=kernel[problem.op, problem.direction](problem, inputs),
    )


def scaled(rows: slice, factor: float) -> Callable[[Setting, str], torch.Tensor]:
    """Some rows of all heads times a factor."""

    def mutate(made: Setting, name: str) -> torch.Tensor:
        out = made.right[name].clone()
        out[:, :, rows] *= factor
        return out

    return mutate


def one_head(made: Setting, name: str) -> torch.Tensor:
    """The head that decays most, and so is smallest, 10 % too large."""
    out = made.right[name].clone()
    out[:, 0] *= 1.1
    return out


def stale_tile(made: Setting, name: str) -> torch.Tensor:
    """Rows of the second half read the first tile of V in place of the second."""
    v = made.inputs.v.clone()
    v[:, :, V_TILE : 2 * V_TILE] = v[:, :, :V_TILE]
    late = slice(made.problem.seqlen_q // 2, None)
    stale = attention_forward(
        made.problem, replace(made.inputs, tensors=dict(made.inputs.tensors) | {"v": v})
    )
    out = made.right[name].clone()
    out[:, :, late] = stale[name][:, :, late]
    return out


def without_delta(made: Setting, name: str) -> torch.Tensor:
    """Delta is 0 in the last 64 rows."""
    return attention_backward(made.problem, made.inputs, silent=slice(-64, None))[name]


def small_heads_zero(made: Setting, name: str) -> torch.Tensor:
    """Nothing but the largest of the gradients by gamma."""
    out = made.right[name]
    return out.masked_fill(out.abs() < out.abs().amax(-1, keepdim=True), 0.0)


MUTANTS = {
    "forward, the last 128 rows halved": (FORWARD, "o", scaled(slice(-128, None), 0.5)),
    "forward, the second half 10 % too small": (FORWARD, "o", scaled(slice(2048, None), 0.9)),
    "forward, a stale tile of V": (NARROW, "o", stale_tile),
    "backward, no delta in the last 64 rows": (BACKWARD, "dq", without_delta),
    "backward, dK of the second half 20 % too small": (
        BACKWARD,
        "dk",
        scaled(slice(1024, None), 0.8),
    ),
    "retention, one head 10 % off": (RETENTION, "o", one_head),
    "retention, the first 64 rows 10 % off": (RETENTION, "o", scaled(slice(0, 64), 1.1)),
    "retention, no gradient of small decays": (DECAYS, "dlog2_gamma", small_heads_zero),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_one_tolerance_lets_pass_is_wrong_by_heads_and_bands(mutant: str) -> None:
    problem, name, mutate = MUTANTS[mutant]
    made = setting(problem)
    by_tensor, by_parts = made.compare(name, mutate(made, name))
    assert by_tensor.ok, by_tensor.reason
    assert not by_parts.ok
    assert "head" in by_parts.reason


@pytest.mark.parametrize(
    "problem", [FORWARD, NARROW, BACKWARD, RETENTION, DECAYS], ids=Problem.describe
)
def test_a_kernel_that_rounds_as_it_must_is_right(problem: Problem) -> None:
    made = setting(problem)
    for name, out in made.right.items():
        comparison = made.compare(name, out)[1]
        assert comparison.ok, f"{name}: {comparison.reason}"
        assert comparison.parts > 1
