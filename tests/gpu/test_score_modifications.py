"""Score modifications on a GPU: default kernels of both directions against the reference, gradients, graphs, time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attention_autotuner import flash_attn_func, settings
from attention_autotuner.api.attention import modified, modified_autograd
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.reference import check
from tests.gpu.verifying import verify_all
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.score_modifications import KINDS, SHAPES, formula

pytestmark = pytest.mark.gpu

as_untyped: Any = flash_attn_func

DIMS: tuple[dict[str, Any], ...] = (
    {"dim_qk": 64, "dim_v": 64},
    {"dim_qk": 128, "dim_v": 128, "dtype": "bf16"},
    {"dim_qk": 192, "dim_v": 128},
    {"dim_qk": 256, "dim_v": 256, "dtype": "bf16"},
    {"dim_qk": 192, "dim_v": 192},
    {"dim_qk": 72, "dim_v": 80, "alignment_bytes": 2},
)
ALONE = (*DIMS[:2], DIMS[3])  # of kinds with one modification
SMALL: dict[str, Any] = {
    "dim_qk": 32,
    "dim_v": 32,
    "dtype": "bf16",
}  # whose backward takes long steps
PASSES: tuple[dict[str, Any], ...] = (
    {"direction": "forward"},
    {"direction": "backward"},
    {"direction": "backward", "deterministic": True},
)
LENGTHS: tuple[dict[str, Any], ...] = (*SHAPES, {"seqlen_q": 515, "seqlen_k": 1021, "causal": True})
BASE = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=300, seqlen_k=333)
SEVERAL = ("bent", "biased", "all")  # kinds with several modifications
VARIANTS: tuple[tuple[str, str], ...] = (
    *(
        ("forward", words)
        for words in (
            "overlap_flat",
            "g3n128_serial",
            "g4n64_serial_.*turns",
            "g4n64_scores_first_.*turns",
            "split",
        )
    ),
    *(("backward", word) for word in ("fused_.*own2bulk", "ordered", "two_pass")),
)
MORE: dict[str, dict[str, Any]] = {  # by modification
    "bias_table": {"batch": 1, "seqlen_q": 1500, "seqlen_k": 1700},  # tiles far from the diagonal
    "attn_mask": {"seqlen_q": 515, "seqlen_k": 1024},  # rows that are read in blocks of eight keys
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel and the problem that names it: the default, or one of a family by a pattern of its name."""

    problem: Problem
    family: str = ""
    pattern: str = ""

    def __str__(self) -> str:
        return " ".join([self.problem.describe(), self.family, self.pattern]).strip()

    def candidate(self, present: Policy) -> Candidate:
        """The kernel, or the default on a GPU without that family.

        Raises:
            StopIteration: the family has no kernel of such a name.
        """
        members = [c for c in present.legal(self.problem) if c.family == self.family]
        if not members:
            return present.default(self.problem)
        return next(c for c in members if re.search(self.pattern, c.name))


def cases() -> Iterator[Case]:
    """Defaults of all kinds; the other family's; sm90's main loops, splits, and ways of dQ."""
    for kind, named in product(KINDS, PASSES):
        for dims in DIMS if kind in SEVERAL else ALONE:
            yield Case(problem=replace(BASE, **KINDS[kind], **named, **dims))
    for kind, named in product(("bent", "window"), PASSES):
        yield Case(problem=replace(BASE, **KINDS[kind], **named, **DIMS[0]), family="sm80")
    for kind, (direction, pattern) in product(("bent", "biased"), VARIANTS):
        few = {"seqlen_q": 5, "heads_kv": 1} if pattern == "split" else {}
        named = {"direction": direction, **KINDS[kind], **DIMS[0], **few}
        yield Case(problem=replace(BASE, **named), family="sm90", pattern=pattern)
    for named, dims in product(PASSES, DIMS[:2]):
        yield Case(problem=replace(BASE, **KINDS["bias"], **named, **dims), family="sm90")
    for kind, named in product(("plain", "window", "alibi", "bias", "sinks"), PASSES[1:]):
        problem = replace(BASE, **KINDS.get(kind, {}), **named, **SMALL)
        yield Case(problem=problem, family="sm90", pattern="c128s2x2_own.*early")


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    with settings.override(mode="off"):
        yield


@pytest.mark.parametrize("case", cases(), ids=str)
def test_kernels(pool: KernelPool, case: Case, device: torch.device) -> None:
    made = case.candidate(pool.present)
    if getattr(made.knobs, "split_kv", False):
        made = made.launched({"splits": 3})
    kernel = pool.kernel(made)
    few = {"seqlen_q": 5} if case.pattern == "split" else {}
    shapes = (*LENGTHS, *(shape for name, shape in MORE.items() if name in made.modifications))
    problems = (replace(case.problem, **{**shape, **few}) for shape in shapes)
    verify_all(problems, kernel, deterministic=made.deterministic, device=device)


VALUES: dict[str, dict[str, Any]] = {
    "window": {"window_size": (127, 0)},
    "softcap": {"softcap": 30.0},
    "softcap that bites": {"softcap": 0.5},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True, "window_size": (127, 0)},
    "bias": {"bias": 128},
    "bias of near pairs and sinks": {"bias": 5, "sinks": True, "softcap": 2.0},
    "mask": {"attn_mask": (1, 8, 777, 1021)},
    "mask of all heads and a window": {"attn_mask": (2, 1, 777, 1021), "window_size": (500, 0)},
    "mask of keys": {"attn_mask": (2, 1, 1, 1021)},
    "mask of queries and softcap": {"attn_mask": (1, 8, 777, 1), "softcap": 2.0},
    "mask of pairs": {"attn_mask": (2, 8, 777, 1021)},
}


OF_CALLS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (127, -1)},
    "softcap": KINDS["softcap"],
    "alibi": KINDS["alibi"],
    "sinks": {**KINDS["sinks"], "window_size": (127, -1)},
    "alibi and sinks": {"modifications": ("alibi_slopes", "sinks")},
    "bias": KINDS["bias"],
    "bias and sinks": {"modifications": ("softcap", "bias_table", "sinks")},
    "mask": {"modifications": ("attn_mask",)},
    "mask and softcap": {"modifications": ("softcap", "attn_mask")},
    "none": {},
}
PROBLEMS: list[Problem] = [
    problem
    for named, direction in product(OF_CALLS.values(), ("forward", "backward"))
    for problem in (
        replace(BASE, direction=direction, causal=True, **DIMS[0], **named),
        replace(BASE, direction=direction, causal=True, **DIMS[1], **named),
        replace(BASE, direction=direction, causal=True, dim_qk=128, dim_v=128, **named),
        replace(Problem(causal=True, **named), direction=direction),  # of those that are timed
    )
]
"""What the calls below ask for: their default kernels are built ahead."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", VALUES)
def test_results_and_gradients_against_fp64(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device=device, dtype=of)
        return x.requires_grad_()

    leaves = [normal(2, 8, 777, 128), normal(2, 2, 1021, 128), normal(2, 2, 1021, 128)]
    options: dict[str, Any] = dict(VALUES[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = 2.0 ** -torch.arange(1, 9, device=device).float()
    learned = [name for name in ("sinks", "bias", "attn_mask") if name in options]
    for name in learned:
        shapes = {"sinks": (8,), "attn_mask": options[name]}
        shape = shapes.get(name) or (8, 2 * options[name] + 1)
        options[name] = normal(*shape, of=torch.float32)
        leaves.append(options[name])
    q, k, v = leaves[:3]
    results = flash_attn_func(q, k, v, causal=True, return_lse=True, **options)
    # Leaves of their own: gradients of the formula would be rounded to the dtype of ours.
    leaves_of, results_of = [leaves], [results]
    for of in (torch.float64, dtype):
        q, k, v, *others = (x.detach().to(of).requires_grad_() for x in leaves)
        replaced: dict[str, Any] = dict(zip(learned, others, strict=True))
        replaced = {**options, **replaced}
        leaves_of.append([q, k, v, *others])
        results_of.append(formula(q, k, v, causal=True, dtype=of, **replaced))
    grads = [torch.randn_like(x).double() for x in results]
    gradients = [
        torch.autograd.grad(sum((x.double() * g).sum() for x, g in zip(of, grads, strict=True)), by)
        for of, by in zip(results_of, leaves_of, strict=True)
    ]
    sides = [[*of, *to] for of, to in zip(results_of, gradients, strict=True)]
    for ours, exact, low in zip(
        *([x.detach().double() for x in side] for side in sides), strict=True
    ):
        comparison = check(ours, exact, low)
        assert comparison, comparison.reason


@pytest.mark.parametrize(("name", "shape"), [("bias", (8, 2 * 100 + 1)), ("attn_mask", (777, 777))])
def test_gradients_of_what_is_added_are_the_same_bits_each_time(
    name: str, shape: tuple[int, ...], device: torch.device
) -> None:
    q, k, v = (torch.randn(2, 8, 777, 128, device=device, dtype=torch.float16) for _ in range(3))
    added = torch.randn(shape, device=device, requires_grad=True)
    o = as_untyped(q, k, v, causal=True, **{name: added})
    o_grad = torch.randn_like(o)
    first, second = (torch.autograd.grad(o, added, o_grad, retain_graph=True) for _ in range(2))
    assert first[0].any()
    assert torch.equal(first[0], second[0])


def test_a_graph_follows_slopes_and_sinks(device: torch.device) -> None:
    q, k, v = (torch.randn(2, 4, 256, 64, device=device, dtype=torch.float16) for _ in range(3))
    slopes, sinks = torch.rand(4, device=device), torch.randn(4, device=device)
    options: dict[str, Any] = {"alibi_slopes": slopes, "sinks": sinks, "causal": True}
    flash_attn_func(q, k, v, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flash_attn_func(q, k, v, **options)
    slopes.mul_(2.0)
    sinks.add_(1.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, flash_attn_func(q, k, v, **options))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_checkpoints_recompute_what_a_call_kept(layout: str, device: torch.device) -> None:
    leaves = [torch.randn(2, 4, 256, 64, device=device, dtype=torch.float16) for _ in range(3)]
    if layout == "bshd":
        leaves = [x.transpose(1, 2) for x in leaves]
    leaves = [x.contiguous().requires_grad_() for x in leaves]
    mask = torch.randn(256, 256, device=device)
    for options in ({"window_size": (63, 0)}, {"attn_mask": mask}, {"softcap": 20.0}):
        arguments: dict[str, Any] = {**options, "layout": layout}

        results = []
        for _ in range(2):  # of calls like none before, then of warm ones
            o = checkpoint(as_untyped, *leaves, use_reentrant=False, **arguments)
            results.append(torch.autograd.grad(o.float().square().sum(), leaves))
        o = as_untyped(*leaves, **arguments)
        results.append(torch.autograd.grad(o.float().square().sum(), leaves))
        for first, *others in zip(*results, strict=True):
            for other in others:
                torch.testing.assert_close(other, first, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", ["plain", "window", "sinks", "bias", "mask", "added"])
def test_warm_calls_are_replayed(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    def make(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    shape = (2, 4, 256, 64) if layout == "bhsd" else (2, 256, 4, 64)
    leaves = [make(*shape) for _ in range(3)]
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window_size": (63, 0)},
        "sinks": {"sinks": make(4, dtype=torch.float32)},
        "bias": {"bias": make(4, 65, dtype=torch.float32)},
        "mask": {"attn_mask": torch.rand(256, 256, device=device) > 0.2},
        "added": {"attn_mask": make(256, 256)},
    }
    options = cases[name]
    leaves += [x for x in options.values() if torch.is_tensor(x) and x.requires_grad]

    def call() -> list[torch.Tensor]:
        o = as_untyped(*leaves[:3], layout=layout, **options)
        return [o, *torch.autograd.grad(o.float().square().sum(), leaves)]

    first = call()
    with torch.no_grad():
        alone = as_untyped(*leaves[:3], layout=layout, **options)
    monkeypatch.setattr(modified, "FORWARD_OP", None)  # the longer way
    monkeypatch.setattr(modified_autograd, "BACKWARD_OP", None)
    for _ in range(2):
        for ours, theirs in zip(call(), first, strict=True):
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
        monkeypatch.setattr(attention_plan, "backward_plan", None)  # nor one of its own any more
    with torch.no_grad():
        assert torch.equal(as_untyped(*leaves[:3], layout=layout, **options), alone)
    assert torch.equal(alone, first[0])
