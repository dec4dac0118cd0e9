"""retnet_attn_func on a GPU: masks and decays, their gradients, CUDA graphs, compilation, arrays, warm calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_autotuner import Decay, retnet_attn_func, settings
from attention_autotuner.api.retnet import torch_op as retnet_library
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import NotWarmError, UnsupportedProblemError
from attention_autotuner.reference import (
    Bands,
    check,
    decay_mask,
    retnet_attention,
    retnet_attention_low,
)
from attention_autotuner.serving import dispatch
from tests import gradients
from tests.numerics.kernel_pool import KernelPool

pytestmark = pytest.mark.gpu

HALF = Problem(
    op="retnet",
    mask="explicit",
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=129,
    seqlen_k=192,
    dim_qk=64,
    dim_v=64,
)
DECAY = replace(HALF, mask="decay", causal=True)
ODD = replace(HALF, seqlen_k=191, alignment_bytes=2)
# On Hopper its backward takes turns over bands of heads.
WIDE = replace(HALF, batch=32, seqlen_q=1024, seqlen_k=1024, dim_qk=256, dim_v=512)
LENGTHS = ((129, 192), (64, 72), (200, 200))


def directions(problem: Problem) -> tuple[Problem, ...]:
    """A problem and its backward problems, deterministic and not."""
    backward = replace(problem, direction="backward")
    return problem, backward, replace(backward, deterministic=True)


# Problems whose default kernels these tests run.
PROBLEMS = tuple(
    variant
    for problem in (
        HALF,
        replace(HALF, causal=True),
        replace(HALF, alignment_bytes=2),
        replace(HALF, dtype="bf16"),
        WIDE,
        ODD,
        DECAY,
        *(replace(HALF, seqlen_q=m, seqlen_k=n, causal=True) for m, n in LENGTHS),
    )
    for variant in directions(problem)
)
COLD = replace(HALF, dim_qk=40, dim_v=40)  # of a class that no other test calls
GAMMA = [0.9, 0.5, 0.99, 1.0]
SCALE = 64**-0.5
LONG_CYCLES = 2_000_000_000  # a second on any present GPU
RULES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"normalize": False},
    {"r_clamp_max": 8.0},
    {"r_grad": True},
    {"r_grad": True, "r_clamp_max": 8.0, "causal": True},
]
retnet: Callable[..., Any] = retnet_attn_func  # as an untyped caller sees it


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    torch.compiler.reset()
    gc.collect()  # a CUDA graph of an earlier test that is freed during a capture would end the capture
    with settings.override(mode="off"):
        yield
    torch.compiler.reset()


def make(
    problem: Problem = HALF, *, seed: int = 0, heads: int = 4, requires_grad: bool = False
) -> list[torch.Tensor]:
    """q, k, v and a mask of values around 1/4, so that sums are on both sides of 1."""
    q, k, v = gradients.make(problem, seed=seed, device="cuda", requires_grad=False)
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    shape = (heads, problem.seqlen_q, problem.seqlen_k)
    mask = torch.randn(shape, generator=generator, device="cuda") / 4
    row_scale = torch.linspace(-6, 2, problem.seqlen_q, device="cuda").exp2()
    tensors = [q, k, v, (mask * row_scale[:, None]).to(q.dtype)]
    for x in tensors:
        x.requires_grad_(requires_grad)
    return tensors


def assert_right(outputs: Any, tensors: list[torch.Tensor], **rules: Any) -> None:
    q, k, v, mask = (x.detach() for x in tensors)
    references = retnet_attention(q, k, v, mask, scale=SCALE, **rules)
    lows = retnet_attention_low(q, k, v, mask.to(q.dtype), scale=SCALE, **rules)
    causal = rules.get("causal", False)
    problem = replace(HALF, seqlen_q=q.shape[2], seqlen_k=k.shape[2], causal=causal)
    bands = (Bands.of(problem, "o", 4), None)  # low may have the exact r in rows of few keys
    for mine, reference, low, rows in zip(outputs, references, lows, bands, strict=False):
        comparison = check(mine.detach(), reference, low, rows)
        assert comparison.ok, comparison.reason


def assert_near(computed: Any, expected: Any, limit: float = 5e-3) -> None:
    """Bound the relative distance of whole tensors; the numerics tests check single elements."""
    for mine, reference in zip(computed, expected, strict=True):
        distance = (mine.double() - reference.double()).norm() / reference.double().norm()
        assert float(distance) < limit


def random_like(x: torch.Tensor, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(x.shape, generator=generator, device="cuda", dtype=x.dtype)


def train(
    tensors: list[torch.Tensor], grad_o: torch.Tensor | None = None, **rules: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients of all inputs; the gradient of o is random where none is given."""
    o = retnet(*tensors, scale=SCALE, **rules)
    return torch.autograd.grad(o, tensors, random_like(o) if grad_o is None else grad_o)


def reference_gradients(tensors: list[torch.Tensor], **rules: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of :func:`train` by the formula in fp64."""
    inputs_fp64 = [x.detach().double().requires_grad_() for x in tensors]
    q, k, v, mask = inputs_fp64
    o, _ = retnet_attention(q, k, v, mask, scale=SCALE, **rules)
    return torch.autograd.grad(o, inputs_fp64, random_like(o.to(tensors[0].dtype)).double())


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("heads", [1, 4])
def test_results_match_the_reference(rules: dict[str, Any], heads: int) -> None:
    tensors = make(heads=heads)
    outputs = retnet(*tensors, scale=SCALE, return_r=True, **rules)
    assert_right(outputs, tensors, **rules)
    alone = retnet(*tensors, scale=SCALE, **rules)
    assert gradients.same_bits((alone,), outputs[:1])
    assert outputs[1].dtype == torch.float32


def test_a_decay_equals_its_mask() -> None:
    q, k, v, _ = make()
    per_head = torch.tensor(GAMMA, device="cuda")
    ways: list[tuple[Any, torch.Tensor | None]] = [
        (None, None),
        (0.75, torch.full_like(per_head, 0.75)),
        (GAMMA, per_head),
        (per_head, per_head),
        (per_head.cpu(), per_head),
    ]
    for decays, gamma in ways:
        mask = decay_mask(gamma, 4, 129, 192, q.device).float()
        outputs = retnet(q, k, v, Decay(decays), scale=SCALE, return_r=True)
        assert_right(outputs, [q, k, v, mask], causal=True)


@pytest.mark.parametrize("layout", gradients.LAYOUTS[:4])
def test_views_are_read_without_a_copy(layout: gradients.Layout) -> None:
    tensors = make()
    outputs = retnet(*(layout(x) for x in tensors[:3]), tensors[3], scale=SCALE, return_r=True)
    assert_right(outputs, tensors)
    if layout is gradients.transposed:
        assert outputs[0].transpose(1, 2).is_contiguous()


MASK_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows between others": lambda m: torch.cat([m, m + 1], -1)[..., : m.shape[2]],
    "heads last but one": lambda m: m.transpose(0, 1).contiguous().transpose(0, 1),
    "between 16 bytes": gradients.unaligned,
    "odd rows": gradients.odd_rows,
    "one row for all": lambda m: m[:, 64:65].expand(m.shape),
    "one head for all": lambda m: m[:1].expand(m.shape),
}


@pytest.mark.parametrize("kind", MASK_LAYOUTS)
def test_masks_of_any_layout(kind: str) -> None:
    tensors = make()
    tensors[3] = MASK_LAYOUTS[kind](tensors[3])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = retnet(*tensors, scale=SCALE, return_r=True)
    assert torch.cuda.max_memory_allocated() - before < 2 * sum(x.nbytes for x in outputs)
    assert_right(outputs, tensors)
    tensors = [x.detach().requires_grad_() for x in tensors]
    assert_near(train(tensors), reference_gradients(tensors))


def test_an_odd_number_of_keys() -> None:
    tensors = make(ODD, requires_grad=True)
    assert_right(retnet(*tensors, scale=SCALE, return_r=True), tensors)
    assert_near(train(tensors), reference_gradients(tensors))


def test_bad_masks_are_refused() -> None:
    q, k, v, mask = make()
    for bad, message in (
        (mask.cpu(), "mask must be on q's device"),
        (mask.float(), "mask must have q's dtype torch.float16, got torch.float32"),
        (mask[:2], r"mask must be \[4 or 1, 129, 192\], got \[2, 129, 192\]"),
        (mask.mT.contiguous().mT, "mask must have unit stride in its last dim"),
        (Decay([0.9, 0.5, 0.1, 1.5]), r"gamma must lie in \(0, 1\], got 1.5 for head 3"),
        (Decay(torch.full((4,), 1.5)), r"gamma must lie in \(0, 1\], got 1.5 for head 0"),
        (Decay(torch.ones(4, device="cuda").requires_grad_()), "has no gradient"),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            retnet(q, k, v, bad)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("heads", [1, 4])
def test_gradients(rules: dict[str, Any], heads: int) -> None:
    tensors = make(heads=heads, requires_grad=True)
    computed = train(tensors, **rules)
    assert [x.shape for x in computed] == [x.shape for x in tensors]
    # Rows whose sum is at a limit of r may fall on either side of it.
    limit = 2e-2 if "r_grad" in rules else 5e-3
    assert_near(computed, reference_gradients(tensors, **rules), limit)


def test_gradients_in_bf16() -> None:
    tensors = make(replace(HALF, dtype="bf16"), requires_grad=True)
    assert_near(train(tensors), reference_gradients(tensors), 4e-2)


@pytest.mark.parametrize("rules", [{}, {"r_grad": True}], ids=str)
def test_gradients_of_a_decay(rules: dict[str, Any]) -> None:
    q, k, v, _ = make(requires_grad=True)
    o = retnet(q, k, v, Decay(GAMMA), scale=SCALE, **rules)
    computed = torch.autograd.grad(o, (q, k, v), random_like(o))
    gamma = torch.tensor(GAMMA, device="cuda", dtype=torch.float64)
    mask = decay_mask(gamma, 4, 129, 192, q.device)
    expected = reference_gradients([q, k, v, mask.to(torch.float64)], causal=True, **rules)
    assert_near(computed, expected[:3], 2e-2 if rules else 5e-3)


@pytest.mark.parametrize("place", range(4))
def test_only_tensors_that_require_grad_get_a_gradient(place: int) -> None:
    tensors = make()
    tensors[place].requires_grad_()
    o = retnet(*tensors, scale=SCALE)
    torch.autograd.backward(o, random_like(o))
    assert [x.grad is not None for x in tensors] == [n == place for n in range(4)]
    (mine,) = (x.grad for x in tensors if x.grad is not None)
    assert_near([mine], [reference_gradients(tensors)[place]])


def test_without_a_gradient_of_the_mask_no_memory_of_its_size_is_allocated() -> None:
    problem = replace(HALF, batch=1, seqlen_q=4096, seqlen_k=4096)
    q, k, v, mask = make(problem)
    for x in (q, k, v):
        x.requires_grad_()
    o = retnet(q, k, v, mask, scale=SCALE)
    grad_o = random_like(o)
    torch.autograd.grad(o, (q, k, v), grad_o, retain_graph=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(o, (q, k, v), grad_o)
    assert torch.cuda.max_memory_allocated() - before < 10 * q.nbytes < mask.nbytes / 2


@pytest.mark.parametrize("layout", [*gradients.LAYOUTS, gradients.one_row, gradients.one_value])
def test_gradients_of_o_of_any_layout(layout: gradients.Layout) -> None:
    tensors = make(requires_grad=True)
    o = retnet(*tensors, scale=SCALE)
    grad_o = layout(random_like(o))
    computed = torch.autograd.grad(o, tensors, grad_o, retain_graph=True)
    assert_near(computed, torch.autograd.grad(o, tensors, grad_o.contiguous()), 1e-3)


def problems_asked(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that dispatch is asked for from now on."""
    asked: list[Problem] = []
    kernel_for = dispatch.kernel_for

    def record(problem: Problem, *arguments: Any, **options: Any) -> Any:
        asked.append(problem)
        return kernel_for(problem, *arguments, **options)

    monkeypatch.setattr(dispatch, "kernel_for", record)
    gradients.forget_plans()
    return asked


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def test_repeats_agree_bit_for_bit_under_torchs_deterministic_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = problems_asked(monkeypatch)
    tensors = make(requires_grad=True)
    with deterministic_algorithms():
        runs = [train(tensors) for _ in range(10)]
    assert all(gradients.same_bits(runs[0], other) for other in runs[1:])
    train(tensors)
    assert [p.deterministic for p in asked if p.direction == "backward"] == [True, False]


def test_poisoned_memory_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients.poison(monkeypatch)
    try:
        tensors = make(requires_grad=True)
        assert_near(train(tensors, causal=True), reference_gradients(tensors, causal=True))
    finally:
        monkeypatch.undo()
        gradients.forget_plans()


@pytest.mark.parametrize("r_grad", [False, True])
def test_double_backward_matches_the_reference(r_grad: bool) -> None:
    tensors = make(replace(HALF, seqlen_q=64, seqlen_k=72), requires_grad=True)
    inputs_fp64 = [x.detach().double().requires_grad_() for x in tensors]
    computed = []
    for function, inputs in ((retnet, tensors), (retnet_attention, inputs_fp64)):
        result = function(*inputs, scale=SCALE, r_grad=r_grad)
        o = result if isinstance(result, torch.Tensor) else result[0]
        first = torch.autograd.grad(o.double().sin().sum(), inputs, create_graph=True)
        total = torch.stack([x.double().sum() for x in first]).sum()
        computed.append(torch.autograd.grad(total, inputs))
    assert_near(computed[0], computed[1], 2e-2)


# --- CUDA graphs ----------------------------------------------------------------------------------


def capture(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a function, which first runs on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.parametrize("problem", [HALF, WIDE])
def test_a_training_step_by_a_graph(problem: Problem) -> None:
    tensors = make(problem, heads=problem.heads_q, requires_grad=True)
    grad_o = random_like(retnet(*tensors, scale=SCALE).detach())
    with deterministic_algorithms():
        graph, captured = capture(lambda: train(tensors, grad_o))
        with torch.no_grad():
            for x, y in zip(tensors, make(problem, seed=7, heads=problem.heads_q), strict=True):
                x.copy_(y)
        graph.replay()
        torch.cuda.synchronize()
        assert gradients.same_bits(captured, train(tensors, grad_o))


@pytest.mark.parametrize("gamma", [None, GAMMA], ids=["usual", "numbers"])
def test_a_graph_of_a_decay(gamma: Any) -> None:
    q, k, v, _ = make()
    graph, (o, r) = capture(lambda: retnet(q, k, v, Decay(gamma), scale=SCALE, return_r=True))
    for x, fresh in zip((q, k, v), make(seed=7), strict=False):
        x.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    expected = retnet(q, k, v, Decay(gamma), scale=SCALE, return_r=True)
    assert gradients.same_bits((o, r), expected)


def test_a_cold_call_under_capture_is_refused_and_leaves_the_capture_alone() -> None:
    warm, cold = make(), make(COLD)
    retnet(*warm, scale=SCALE)
    retnet(*warm[:3], Decay(), scale=SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(NotWarmError, match="outside graph capture"):
            retnet(*cold)
        with pytest.raises(NotWarmError, match="these decays have to be moved"):
            retnet(*warm[:3], Decay([0.321, 0.5, 0.5, 0.5]))
        outputs = retnet(*warm, scale=SCALE, return_r=True)
    graph.replay()
    torch.cuda.synchronize()
    assert_right(outputs, warm)


# --- streams, waiting, torch's compiler and rules -------------------------------------------------


def test_a_warm_call_waits_for_nothing() -> None:
    tensors = make(requires_grad=True)
    gamma = torch.tensor(GAMMA, device="cuda")
    grad_o = random_like(tensors[0].detach())

    def run() -> Any:
        decayed = [retnet(*tensors[:3], Decay(x)) for x in (None, GAMMA, gamma)]
        return train(tensors, grad_o), decayed

    kept = [run() for _ in range(7)]  # memory for all of them
    kept.clear()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    done = torch.cuda.Event()
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = [run() for _ in range(5)]
        assert not done.query(), "the calls came back only after the work before them was done"
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_of_any_length(backend: str) -> None:
    torch._dynamo.utils.counters.clear()

    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        o, r = retnet(q * 2, k, v, mask, scale=SCALE, causal=True, return_r=True)
        return o.float().square().mean() + r.mean()

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for rows, keys in LENGTHS:
        tensors = make(replace(HALF, seqlen_q=rows, seqlen_k=keys), requires_grad=True)
        losses = [function(*tensors) for function in (compiled, layer)]
        torch.testing.assert_close(*losses, rtol=1e-3, atol=0.0)
        computed, expected = (torch.autograd.grad(loss, tensors) for loss in losses)
        assert_near(computed, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("r_grad", [False, True])
def test_the_ops_follow_torchs_rules(grad: bool, r_grad: bool) -> None:
    # Deterministic, as runs are compared.
    q, k, v, mask = make(replace(HALF, batch=1), requires_grad=grad)
    rules = (SCALE, False, True, None, r_grad)
    read = (q, k, v, mask, None, None)
    torch.library.opcheck(retnet_library.FORWARD_OP, (*read, *rules, "", True, True))
    o, r = retnet_library.FORWARD_OP(
        *(x.detach() for x in read[:4]), None, None, *rules, "", True, True
    )
    grad_o = random_like(o).requires_grad_(grad)
    torch.library.opcheck(
        retnet_library.BACKWARD_OP,
        (grad_o, *read, o if r_grad else None, r, *rules, "", True, True),
    )


def test_cupy_arrays_come_and_go() -> None:
    cupy = pytest.importorskip("cupy")
    tensors = make()
    expected = retnet(*tensors, scale=SCALE, return_r=True)
    arrays = [cupy.from_dlpack(x) for x in tensors]
    outputs = retnet(*arrays, scale=SCALE, return_r=True)
    assert all(isinstance(x, cupy.ndarray) for x in outputs)
    torch.cuda.synchronize()
    assert gradients.same_bits([torch.utils.dlpack.from_dlpack(x) for x in outputs], expected)
    decayed = retnet(*arrays[:3], Decay(cupy.asarray(GAMMA)), scale=SCALE)
    torch.cuda.synchronize()
    gamma = torch.tensor(GAMMA, device="cuda", dtype=torch.float64)
    assert_near(
        [torch.utils.dlpack.from_dlpack(decayed)],
        [retnet(*tensors[:3], Decay(gamma), scale=SCALE)],
        1e-3,
    )
    with pytest.raises(UnsupportedProblemError, match="one library"):
        retnet(*arrays[:3], tensors[3])
