"""retention_func on a GPU: forms, in-place states, decoding and training by CUDA graphs, gradients, warm calls."""

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
from tests.numerics.kernel_pool import KernelPool

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
DTYPES = (HALF, replace(HALF, dtype="bf16"))
LIMITS = {"fp16": 5e-3, "bf16": 4e-2}  # of the distance of whole gradients
FORMS: tuple[Form, ...] = get_args(Form)
LENGTHS = (130, 67, 256)


def directions(problem: Problem) -> tuple[Problem, Problem]:
    """A problem and its backward problem."""
    return problem, replace(problem, direction="backward", form="auto")


# Problems whose default kernels these tests run.
PROBLEMS = (
    *(replace(HALF, form=form) for form in FORMS),
    *(replace(TOKEN, form=form) for form in ("auto", "recurrent")),
    *directions(replace(HALF, dtype="bf16")),
    *directions(replace(DTYPES[1], alignment_bytes=2)),
    *(p for n in LENGTHS for p in directions(replace(HALF, seqlen_q=n, seqlen_k=n))),
)
COLD = replace(HALF, dim_qk=40, dim_v=40)  # of a class that no other test calls
GAMMA = [0.9, 0.5, 0.99, 1.0]
LONG_CYCLES = 2_000_000_000  # a second on any present GPU
retention: Callable[..., Any] = retention_func  # as an untyped caller sees it


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    torch.compiler.reset()
    gc.collect()  # a CUDA graph of an earlier test that is freed during a capture would end the capture
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


def assert_right(outputs: tuple[torch.Tensor, torch.Tensor | None], tensors: Any) -> None:
    inputs: Any = [None if x is None else x.detach() for x in tensors]
    q, k, v, gamma, state = inputs
    refs = retention_chunkwise(q, k, v, gamma, initial_state=state)
    lows = retention_low(q, k, v, gamma, initial_state=state)
    problem = replace(HALF, seqlen_q=q.shape[2], seqlen_k=q.shape[2])
    for name, out, ref, low in zip(("o", "final_state"), outputs, refs, lows, strict=True):
        if out is not None:
            comparison = check(out.detach(), ref, low, Bands.of(problem, name, ref.dim()))
            assert comparison.ok, comparison.reason


def assert_near(computed: Any, expected: Any, limit: float = 5e-3) -> None:
    """Bound the relative distance of whole tensors; the numerics tests check single elements."""
    for mine, reference in zip(computed, expected, strict=True):
        distance = (mine.double() - reference.double()).norm() / reference.double().norm()
        assert float(distance) < limit


def random_like(x: torch.Tensor, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(x.shape, generator=generator, device="cuda", dtype=x.dtype)


def random_grads(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Random gradients of o, which has q's shape, and of the final state."""
    return [random_like(tensors[0].detach()), random_like(tensors[4].detach())]


def train(
    tensors: list[torch.Tensor], form: Form = "auto", grads: list[torch.Tensor] | None = None
) -> tuple[torch.Tensor, ...]:
    """Gradients of all inputs through both outputs."""
    q, k, v, gamma, state = tensors
    outputs = retention(q, k, v, gamma, form=form, initial_state=state)
    return torch.autograd.grad(outputs, tensors, grads or random_grads(tensors))


def reference_gradients(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The gradients of :func:`train` by the formula in fp64."""
    inputs_fp64 = [x.detach().double().requires_grad_() for x in tensors]
    q, k, v, gamma, state = inputs_fp64
    o, final = retention_chunkwise(q, k, v, gamma, initial_state=state)
    return torch.autograd.grad((o, final), inputs_fp64, [x.double() for x in random_grads(tensors)])


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_results_match_the_reference(form: Form) -> None:
    tensors = make()
    q, k, v, gamma, state = tensors
    outputs = retention(q, k, v, gamma, form=form, initial_state=state)
    assert_right(outputs, tensors)
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


def test_decays_of_every_type() -> None:
    q, k, v, gamma, state = make()
    expected = retention(q, k, v, gamma, initial_state=state)
    for decays in (GAMMA, tuple(GAMMA), gamma.cpu(), gamma.double(), gamma.cpu().numpy()):
        outputs = retention(q, k, v, decays, initial_state=state)
        assert_near(outputs, expected, 1e-3)
    assert_near(retention(q, k, v, 0.75), retention(q, k, v, [0.75] * 4), 1e-6)


def test_values_of_a_decay_on_the_gpu_are_not_read() -> None:
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
def test_views_are_read_without_a_copy(layout: gradients.Layout) -> None:
    q, k, v, gamma, state = tensors = make()
    expected = retention(q, k, v, gamma, initial_state=state)
    turned = [layout(x) for x in (q, k, v)]
    outputs = retention(*turned, gamma, initial_state=gradients.columns_first(state))
    assert_right(outputs, tensors)
    if layout is gradients.transposed:
        assert outputs[0].stride() == turned[0].stride()
        assert gradients.same_bits(outputs, expected)


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


def test_a_step_in_place_allocates_only_its_output() -> None:
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


def test_unsuitable_in_place_states_are_refused() -> None:
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


@pytest.mark.parametrize("decays", ["usual", "numbers", "tensor"])
def test_decoding_by_a_graph(decays: str) -> None:
    q, k, v, decay_tensor, state = make(TOKEN)
    gamma: Any = {"usual": None, "numbers": GAMMA, "tensor": decay_tensor}[decays]

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
    grads = random_grads(tensors)
    graph, captured = capture(lambda: train(tensors, grads=grads))
    with torch.no_grad():
        for x, fresh in zip(tensors, make(seed=7), strict=True):
            x.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    assert gradients.same_bits(captured, train(tensors, grads=grads))


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
        outputs = retention(q, k, v, gamma, initial_state=state)
    graph.replay()
    torch.cuda.synchronize()
    assert_right(outputs, warm)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", DTYPES, ids=Problem.describe)
@pytest.mark.parametrize("form", FORMS)
def test_gradients(problem: Problem, form: Form) -> None:
    if problem.dtype == "bf16" and form != "auto":
        pytest.skip("forms are compared in fp16")
    tensors = make(problem, requires_grad=True)
    computed = train(tensors, form)
    assert [x.dtype for x in computed] == [x.dtype for x in tensors]
    assert_near(computed, reference_gradients(tensors), LIMITS[problem.dtype])
    assert gradients.same_bits(computed, train(tensors, form))


@pytest.mark.parametrize("layout", [*gradients.LAYOUTS, gradients.one_row])
def test_gradients_of_any_layout(layout: gradients.Layout) -> None:
    q, k, v, gamma, state = tensors = make(requires_grad=True)
    o, final = retention(q, k, v, gamma, initial_state=state)
    grad_o = layout(random_like(o))
    computed = torch.autograd.grad((o, final), tensors, (grad_o, random_like(final)))
    o, final = retention(q, k, v, gamma, initial_state=state)
    dense = grad_o.contiguous()
    expected = torch.autograd.grad((o, final), tensors, (dense, random_like(final)))
    assert gradients.same_bits(computed, expected)


def test_gradients_of_narrow_inputs() -> None:
    problem = DTYPES[1]  # numerics have fp16
    tensors = make(problem, requires_grad=True)
    narrow = [gradients.unaligned(x.detach()).requires_grad_() for x in tensors[:3]]
    computed = train([*narrow, *tensors[3:]])
    assert_near(computed, reference_gradients(tensors), LIMITS[problem.dtype])


@pytest.mark.parametrize("place", range(5))
def test_only_tensors_that_require_grad_get_a_gradient(place: int) -> None:
    q, k, v, gamma, state = tensors = make()
    tensors[place].requires_grad_()
    o, final = retention(q, k, v, gamma, initial_state=state)
    torch.autograd.backward((o, final), (random_like(o), random_like(final)))
    assert [x.grad is not None for x in tensors] == [n == place for n in range(5)]
    (mine,) = (x.grad for x in tensors if x.grad is not None)
    assert_near([mine], [reference_gradients(tensors)[place]])


def test_poisoned_memory_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients.poison(monkeypatch)
    try:
        tensors = make(requires_grad=True)
        assert_near(train(tensors), reference_gradients(tensors))
    finally:
        monkeypatch.undo()
        gradients.forget_plans()


def test_double_backward_matches_the_reference() -> None:
    problem = replace(HALF, seqlen_q=67, seqlen_k=67)
    tensors = make(problem, requires_grad=True)
    inputs_fp64 = [x.detach().double().requires_grad_() for x in tensors]
    computed = []
    for function, inputs in ((retention, tensors), (retention_chunkwise, inputs_fp64)):
        q, k, v, gamma, state = inputs
        o, final = function(q, k, v, gamma, initial_state=state)
        loss = o.double().sin().sum() + final.double().sin().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        total = torch.stack([x.double().sum() for x in first]).sum()
        computed.append(torch.autograd.grad(total, inputs))
    assert_near(computed[0], computed[1], 2e-2)


# --- streams and waiting --------------------------------------------------------------------------


def test_the_kernel_runs_on_the_current_stream() -> None:
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
        # On another stream the kernel would read NaN.
        outputs = retention(*poisoned, gamma, initial_state=state)
    stream.synchronize()
    assert_right(outputs, tensors)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
def test_a_warm_call_waits_for_nothing(requires_grad: bool) -> None:
    tensors = make(requires_grad=requires_grad)
    q, k, v, gamma, state = tensors
    grads = random_grads(tensors)

    def run() -> Any:
        if requires_grad:
            return train(tensors, grads=grads)
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
        computed, expected = (torch.autograd.grad(loss, tensors) for loss in losses)
        assert_near(computed, expected)
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
    grads = [random_like(x).requires_grad_(grad) for x in (q, state)]
    torch.library.opcheck(
        retention_library.BACKWARD_OP, (*grads, q, k, v, log2, None, state, None, "", True, True)
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
    state_array = cupy.from_dlpack(state.clone())
    outputs = retention(*arrays, cupy.from_dlpack(gamma), initial_state=state_array)
    assert all(isinstance(x, cupy.ndarray) for x in outputs)
    torch.cuda.synchronize()
    assert gradients.same_bits([torch.utils.dlpack.from_dlpack(x) for x in outputs], expected)
    _, same = retention(*arrays, GAMMA, initial_state=state_array, inplace_state=True)
    torch.cuda.synchronize()
    assert same is state_array
    assert_near([torch.utils.dlpack.from_dlpack(state_array)], [expected[1]], 1e-3)
    with pytest.raises(UnsupportedProblemError, match="one library"):
        retention(*arrays, initial_state=state)
