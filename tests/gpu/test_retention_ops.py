"""retention_func on a GPU: forms, states in place, decoding and training by CUDA graphs, gradients, no waiting."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from attention_autotuner import retention_func, settings
from attention_autotuner.api.retention import torch_op as retention_library
from attention_autotuner.core.problem import Form, Problem
from attention_autotuner.errors import NotWarmError, UnsupportedProblemError
from attention_autotuner.reference import (
    Bands,
    check,
    retention_chunkwise,
    retention_low,
)
from tests import gradients
from tests.numerics.workshop import Workshop

pytestmark = pytest.mark.gpu

HALF = Problem(
    op="retention",
    causal=True,
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=130,
    seqlen_k=130,
    dim_qk=64,
    dim_v=64,
)
TOKEN = replace(HALF, seqlen_q=1, seqlen_k=1)
FORMS: tuple[Form, ...] = get_args(Form)
LENGTHS = (130, 67, 256)


def directions(problem: Problem) -> tuple[Problem, Problem]:
    """A problem and its gradient's."""
    return problem, replace(problem, direction="backward", form="auto")


# Whose default kernels these tests run.
PROBLEMS = (
    *(replace(HALF, form=form) for form in FORMS),
    *(replace(TOKEN, form=form) for form in ("auto", "recurrent")),
    *directions(replace(HALF, dtype="bf16")),
    *directions(replace(HALF, alignment_bytes=2)),
    *(p for n in LENGTHS for p in directions(replace(HALF, seqlen_q=n, seqlen_k=n))),
)
COLD = replace(HALF, dim_qk=40, dim_v=40)  # of a class that no other test calls
GAMMA = [0.9, 0.5, 0.99, 1.0]
LONG_CYCLES = 2_000_000_000  # a second on any GPU of today
retention: Callable[..., Any] = retention_func  # as an untyped caller sees it


@pytest.fixture(autouse=True)
def _defaults(workshop: Workshop) -> Iterator[None]:
    """Default kernels serve, and they are built."""
    torch.compiler.reset()
    gc.collect()  # the graph of a test before that died during a capture would end it
    with settings.override(mode="off"):
        yield
    torch.compiler.reset()


def make(
    problem: Problem = HALF, *, seed: int = 0, requires_grad: bool = False
) -> list[torch.Tensor]:
    """q, k, v, gamma and a state."""
    q, k, v = gradients.make(problem, seed=seed, device="cuda", requires_grad=requires_grad)
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    shape = (problem.batch, problem.heads_q, problem.dim_qk, problem.dim_v)
    state = torch.randn(shape, generator=generator, device="cuda").requires_grad_(requires_grad)
    gamma = torch.tensor(GAMMA, device="cuda").requires_grad_(requires_grad)
    return [q, k, v, gamma, state]


def assert_right(found: tuple[torch.Tensor, torch.Tensor | None], tensors: Any) -> None:
    given: Any = [None if x is None else x.detach() for x in tensors]
    q, k, v, gamma, state = given
    truths = retention_chunkwise(q, k, v, gamma, initial_state=state)
    lows = retention_low(q, k, v, gamma, initial_state=state)
    problem = replace(HALF, seqlen_q=q.shape[2], seqlen_k=q.shape[2])
    for name, mine, truth, low in zip(("o", "final_state"), found, truths, lows, strict=True):
        if mine is not None:
            verdict = check(mine.detach(), truth, low, Bands.of(problem, name, truth.dim()))
            assert verdict.ok, verdict.reason


def assert_near(found: Any, expected: Any, limit: float = 5e-3) -> None:
    """Relative distances of tensors as a whole; how near each must be is the numerics' matter."""
    for mine, truth in zip(found, expected, strict=True):
        distance = (mine.double() - truth.double()).norm() / truth.double().norm()
        assert float(distance) < limit


def weights_like(x: torch.Tensor, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(x.shape, generator=generator, device="cuda", dtype=x.dtype)


def given_for(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of o, which has q's shape, and of the final state."""
    return [weights_like(tensors[0].detach()), weights_like(tensors[4].detach())]


def train(
    tensors: list[torch.Tensor], form: Form = "auto", given: list[torch.Tensor] | None = None
) -> tuple[torch.Tensor, ...]:
    """Gradients through both outputs."""
    q, k, v, gamma, state = tensors
    outputs = retention(q, k, v, gamma, form=form, initial_state=state)
    return torch.autograd.grad(outputs, tensors, given or given_for(tensors))


def truth_of_training(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same by the formula in fp64."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    o, final = retention_chunkwise(wide[0], wide[1], wide[2], wide[3], initial_state=wide[4])
    return torch.autograd.grad((o, final), wide, [x.double() for x in given_for(tensors)])


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_it_is_right(form: Form) -> None:
    tensors = make()
    q, k, v, gamma, state = tensors
    found = retention(q, k, v, gamma, form=form, initial_state=state)
    assert_right(found, tensors)
    alone, nothing = retention(
        q, k, v, gamma, form=form, initial_state=state, output_final_state=False
    )
    assert nothing is None
    assert_right((alone, None), tensors)
    assert_right(retention(q, k, v, form=form), (q, k, v, None, None))


@pytest.mark.parametrize("form", ["auto", "recurrent"])
def test_one_token(form: Form) -> None:
    tensors = make(TOKEN)
    q, k, v, gamma, state = tensors
    assert_right(retention(q, k, v, gamma, form=form, initial_state=state), tensors)


def test_decays_in_every_way() -> None:
    q, k, v, gamma, state = make()
    expected = retention(q, k, v, gamma, initial_state=state)
    for given in (GAMMA, tuple(GAMMA), gamma.cpu(), gamma.double(), gamma.cpu().numpy()):
        found = retention(q, k, v, given, initial_state=state)
        assert_near(found, expected, 1e-3)
    one = retention(q, k, v, 0.75)
    assert_near(one, retention(q, k, v, [0.75] * 4), 1e-6)


def test_a_decay_on_the_gpu_is_not_asked_for_its_values() -> None:
    q, k, v, gamma, _ = make()
    retention(q, k, v, gamma)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        retention(q, k, v, gamma)
        retention(q, k, v, 2 * gamma)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(UnsupportedProblemError, match=r"got 1\.(8|79)\d* for head 0"):
        retention(q, k, v, (2 * gamma).cpu())
    with pytest.raises(UnsupportedProblemError, match="gamma must be on q's device"):
        retention(q.cpu(), k.cpu(), v.cpu(), gamma)
    with pytest.raises(UnsupportedProblemError, match="initial_state must be on q's device"):
        retention(q, k, v, initial_state=torch.zeros(2, 4, 64, 64))


@pytest.mark.parametrize("layout", gradients.LAYOUTS[:4])
def test_views_are_read_where_they_lie(layout: gradients.Layout) -> None:
    q, k, v, gamma, state = tensors = make()
    expected = retention(q, k, v, gamma, initial_state=state)
    turned = [layout(x) for x in (q, k, v)]
    found = retention(*turned, gamma, initial_state=gradients.columns_first(state))
    assert_right(found, tensors)
    if layout is gradients.transposed:
        assert found[0].stride() == turned[0].stride()
        assert gradients.same_bits(found, expected)


# --- states in place ------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [HALF, TOKEN], ids=["text", "token"])
@pytest.mark.parametrize("form", ["auto", "recurrent"])
def test_a_state_in_place(problem: Problem, form: Form) -> None:
    q, k, v, gamma, state = make(problem)
    expected = retention(q, k, v, gamma, form=form, initial_state=state)
    address, version = state.data_ptr(), state._version
    o, same = retention(q, k, v, gamma, form=form, initial_state=state, inplace_state=True)
    assert same is state
    assert state.data_ptr() == address
    assert state._version > version
    assert gradients.same_bits((o, state), expected)


def test_a_step_in_place_takes_memory_for_its_output_alone() -> None:
    q, k, v, _, state = make(TOKEN)

    def step() -> torch.Tensor:
        o: torch.Tensor = retention(
            q, k, v, form="recurrent", initial_state=state, inplace_state=True
        )[0]
        return o

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = step()
    assert torch.cuda.max_memory_allocated() - before <= -(-o.nbytes // 512) * 512


def test_in_place_is_refused_where_it_cannot_be() -> None:
    q, k, v, gamma, state = make()
    for bad, message in (
        (state.mT, "contiguous"),
        (gradients.unaligned(state), "multiple of 16 bytes"),
        (state.clone().requires_grad_(), "no gradient"),
        (None, "needs an initial_state"),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            retention(q, k, v, gamma, initial_state=bad, inplace_state=True)


# --- CUDA graphs ----------------------------------------------------------------------------------


def capture(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a function that has run before on a stream of its own."""
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


@pytest.mark.parametrize("decays", ["usual", "numbers", "tensor"])
def test_decoding_by_a_graph(decays: str) -> None:
    q, k, v, own, state = make(TOKEN)
    gamma: Any = {"usual": None, "numbers": GAMMA, "tensor": own}[decays]

    def step() -> torch.Tensor:
        o: torch.Tensor = retention(
            q, k, v, gamma, form="recurrent", initial_state=state, inplace_state=True
        )[0]
        return o

    graph, o = capture(step)
    state.normal_()
    expected = state.clone()
    for seed in range(5):
        for x, fresh in zip((q, k, v), make(TOKEN, seed=10 + seed), strict=False):
            x.copy_(fresh)
        graph.replay()
        there, expected = retention(q, k, v, gamma, form="recurrent", initial_state=expected)
        assert gradients.same_bits((o, state), (there, expected))


def test_a_training_step_by_a_graph() -> None:
    tensors = make(requires_grad=True)
    given = given_for(tensors)
    graph, found = capture(lambda: train(tensors, given=given))
    with torch.no_grad():
        for x, fresh in zip(tensors, make(seed=7), strict=True):
            x.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    assert gradients.same_bits(found, train(tensors, given=given))


def test_a_cold_call_under_capture_is_refused_and_leaves_the_capture_alone() -> None:
    q, k, v, gamma, state = warm = make()
    cold = make(COLD)
    retention(q, k, v, gamma, initial_state=state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(NotWarmError, match="outside graph capture"):
            retention(*cold[:4])
        with pytest.raises(NotWarmError, match="these decays have to be moved"):
            retention(q, k, v, [0.123, 0.5, 0.5, 0.5])
        found = retention(q, k, v, gamma, initial_state=state)
    graph.replay()
    torch.cuda.synchronize()
    assert_right(found, warm)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [HALF, replace(HALF, dtype="bf16")], ids=Problem.describe)
@pytest.mark.parametrize("form", FORMS)
def test_gradients(problem: Problem, form: Form) -> None:
    if problem.dtype == "bf16" and form != "auto":
        pytest.skip("forms are compared in fp16")
    tensors = make(problem, requires_grad=True)
    found = train(tensors, form)
    assert [x.dtype for x in found] == [x.dtype for x in tensors]
    assert_near(found, truth_of_training(tensors), 5e-3 if problem.dtype == "fp16" else 4e-2)
    assert gradients.same_bits(found, train(tensors, form))


@pytest.mark.parametrize("layout", [*gradients.LAYOUTS, gradients.one_row])
def test_gradients_of_any_layout(layout: gradients.Layout) -> None:
    q, k, v, gamma, state = tensors = make(requires_grad=True)
    o, final = retention(q, k, v, gamma, initial_state=state)
    given = layout(weights_like(o))
    found = torch.autograd.grad((o, final), tensors, (given, weights_like(final)))
    o, final = retention(q, k, v, gamma, initial_state=state)
    dense = given.contiguous()
    expected = torch.autograd.grad((o, final), tensors, (dense, weights_like(final)))
    assert gradients.same_bits(found, expected)


def test_gradients_of_narrow_inputs() -> None:
    tensors = make(requires_grad=True)
    narrow = [gradients.unaligned(x.detach()).requires_grad_() for x in tensors[:3]]
    found = train([*narrow, *tensors[3:]])
    assert_near(found, truth_of_training(tensors))


@pytest.mark.parametrize("place", range(5))
def test_only_what_requires_grad_gets_one(place: int) -> None:
    q, k, v, gamma, state = tensors = make()
    tensors[place].requires_grad_()
    o, final = retention(q, k, v, gamma, initial_state=state)
    torch.autograd.backward((o, final), (weights_like(o), weights_like(final)))
    assert [x.grad is not None for x in tensors] == [n == place for n in range(5)]
    (mine,) = (x.grad for x in tensors if x.grad is not None)
    assert_near([mine], [truth_of_training(tensors)[place]])


def test_poisoned_memory_shows_in_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients.poison(monkeypatch)
    try:
        tensors = make(requires_grad=True)
        assert_near(train(tensors), truth_of_training(tensors))
    finally:
        monkeypatch.undo()
        gradients.forget_plans()


def test_double_backward_is_the_references() -> None:
    problem = replace(HALF, seqlen_q=67, seqlen_k=67)
    tensors = make(problem, requires_grad=True)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    found = []
    for function, inputs in ((retention, tensors), (retention_chunkwise, wide)):
        q, k, v, gamma, state = inputs
        o, final = function(q, k, v, gamma, initial_state=state)
        loss = o.double().sin().sum() + final.double().sin().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        total = torch.stack([x.double().sum() for x in first]).sum()
        found.append(torch.autograd.grad(total, inputs))
    assert_near(found[0], found[1], 2e-2)


# --- streams and waiting --------------------------------------------------------------------------


def test_it_runs_on_the_current_stream() -> None:
    tensors = make()
    q, k, v, gamma, state = tensors
    retention(q, k, v, gamma, initial_state=state)
    poisoned = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES // 10)
        for x, value in zip(poisoned, tensors, strict=False):
            x.copy_(value)
        found = retention(*poisoned, gamma, initial_state=state)  # elsewhere it would read NaN
    stream.synchronize()
    assert_right(found, tensors)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
def test_a_warm_call_waits_for_nothing(requires_grad: bool) -> None:
    tensors = make(requires_grad=requires_grad)
    q, k, v, gamma, state = tensors
    given = given_for(tensors)

    def run() -> Any:
        if requires_grad:
            return train(tensors, given=given)
        return retention(q, k, v, GAMMA, initial_state=state), retention(q, k, v, gamma)

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


# --- torch's compiler and rules -------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_of_any_length(backend: str) -> None:
    torch._dynamo.utils.counters.clear()

    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gamma: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        o, final = retention(q * 2, k, v, gamma, initial_state=state)
        return o.float().square().mean() + final.square().mean()

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for length in LENGTHS:
        problem = replace(HALF, seqlen_q=length, seqlen_k=length)
        tensors = make(problem, requires_grad=True)
        losses = [function(*tensors) for function in (compiled, layer)]
        torch.testing.assert_close(*losses, rtol=1e-3, atol=0.0)
        found, expected = (torch.autograd.grad(loss, tensors) for loss in losses)
        assert_near(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_step_in_place() -> None:
    def step(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        o, _ = retention(q * 2, k, v, form="recurrent", initial_state=state, inplace_state=True)
        return o.float() + 1

    compiled = torch.compile(step, fullgraph=True)
    q, k, v, _, state = make(TOKEN)
    other = state.clone()
    for _ in range(3):
        assert_near([compiled(q, k, v, state)], [step(q, k, v, other)], 1e-5)
        assert_near([state], [other], 1e-5)


@pytest.mark.parametrize("grad", [False, True])
def test_the_ops_follow_torchs_rules(grad: bool) -> None:
    q, k, v, gamma, state = make(replace(HALF, batch=1), requires_grad=grad)
    log2 = gamma.detach().log2().requires_grad_(grad)
    torch.library.opcheck(
        retention_library.FORWARD_OP, (q, k, v, log2, None, state, None, "chunkwise", "", True)
    )
    given = [weights_like(x).requires_grad_(grad) for x in (q, state)]
    torch.library.opcheck(
        retention_library.BACKWARD_OP, (*given, q, k, v, log2, None, state, None, "", True, True)
    )
    if not grad:
        torch.library.opcheck(
            retention_library.IN_PLACE_OP, (q, k, v, None, GAMMA, state, None, "recurrent", "")
        )


# --- arrays of other libraries --------------------------------------------------------------------


def test_cupy_arrays_come_and_go() -> None:
    cupy = pytest.importorskip("cupy")
    q, k, v, gamma, state = make()
    expected = retention(q, k, v, gamma, initial_state=state)
    arrays = [cupy.from_dlpack(x) for x in (q, k, v)]
    own = cupy.from_dlpack(state.clone())
    found = retention(*arrays, cupy.from_dlpack(gamma), initial_state=own)
    assert all(isinstance(x, cupy.ndarray) for x in found)
    torch.cuda.synchronize()
    assert gradients.same_bits([torch.utils.dlpack.from_dlpack(x) for x in found], expected)
    _, same = retention(*arrays, GAMMA, initial_state=own, inplace_state=True)
    torch.cuda.synchronize()
    assert same is own
    assert_near([torch.utils.dlpack.from_dlpack(own)], [expected[1]], 1e-3)
    with pytest.raises(UnsupportedProblemError, match="one library"):
        retention(*arrays, initial_state=state)
