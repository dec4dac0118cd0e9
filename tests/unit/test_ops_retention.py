"""retention_func on CPU tensors: results, gradients, states, decays in every way, and the torch.library contract."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch

from attention_autotuner import retention_func
from attention_autotuner.api.retention import torch_op as retention_library
from attention_autotuner.api.shared import gammas
from attention_autotuner.arch import A100
from attention_autotuner.core import memo
from attention_autotuner.core.problem import Form
from attention_autotuner.errors import UnsupportedProblemError
from attention_autotuner.reference import (
    check,
    default_log2_gamma,
    retention_chunkwise,
    retention_low,
    retention_recurrent,
)
from attention_autotuner.serving import runtime

retention: Callable[..., Any] = retention_func  # as an untyped caller sees it
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
GAMMA = [0.9, 0.5, 0.99, 1.0]
FORMS = get_args(Form)


def make(length: int = 7, *, dtype: torch.dtype = torch.float16, grad: bool = False) -> Five:
    """q, k, v, gamma and a state."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=dtype)
        for shape in ((2, 4, length, 16), (2, 2, length, 16), (2, 2, length, 24))
    )
    state = torch.randn((2, 4, 16, 24), generator=generator)
    tensors = (q, k, v, torch.tensor(GAMMA), state)
    for x in tensors:
        x.requires_grad_(grad)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_results(form: Form, dtype: torch.dtype) -> None:
    q, k, v, gamma, state = make(dtype=dtype)
    o, final = retention(q, k, v, gamma, form=form, initial_state=state)
    references = retention_recurrent(q, k, v, gamma, initial_state=state)
    lows = retention_low(q, k, v, gamma, initial_state=state)
    assert (o.dtype, final.dtype) == (dtype, torch.float32)
    for mine, true_value, low in zip((o, final), references, lows, strict=True):
        comparison = check(mine, true_value, low)
        assert comparison, comparison.reason
    without, nothing = retention(
        q, k, v, gamma, form=form, initial_state=state, output_final_state=False
    )
    assert nothing is None
    assert torch.equal(without, o)


def test_a_form_is_computed_by_its_own_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for form, function in dict(retention_library.REFERENCE).items():

        def note(*args: Any, form: str = form, function: Any = function, **options: Any) -> Any:
            asked.append(form)
            return function(*args, **options)

        monkeypatch.setitem(retention_library.REFERENCE, form, note)
    for form in FORMS:
        retention(*make()[:3], form=form)
    assert asked == list(FORMS)


@pytest.mark.parametrize("at", [1, 4, 6])
def test_a_sequence_can_be_cut_anywhere(at: int) -> None:
    q, k, v, gamma, state = make()
    whole, end = retention(q, k, v, gamma, initial_state=state)
    pieces = []
    for tokens, form in ((slice(at), "parallel"), (slice(at, None), "recurrent")):
        read = (x[:, :, tokens] for x in (q, k, v))
        o, state = retention(*read, gamma, form=form, initial_state=state)
        pieces.append(o)
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(state, end)


# --- decays -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gamma",
    [
        GAMMA,
        tuple(GAMMA),
        torch.tensor(GAMMA, dtype=torch.float64),
        np.array(GAMMA),
        [np.float32(0.9), np.float64(0.5), 0.99, 1],
    ],
    ids=["list", "tuple", "tensor", "array", "numbers of all kinds"],
)
def test_decays_in_every_way(gamma: Any) -> None:
    q, k, v, _, _ = make()
    expected = retention(q, k, v, torch.tensor(GAMMA))
    for mine, other in zip(retention(q, k, v, gamma), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


def test_one_decay_for_all_heads_and_the_usual_ones() -> None:
    q, k, v, _, _ = make()
    for single, many in (
        (0.75, [0.75] * 4),
        (1, [1.0] * 4),
        (None, [1 - 2.0**-n for n in range(5, 9)]),
    ):
        a, b = retention(q, k, v, single), retention(q, k, v, many)
        assert torch.equal(a[0], b[0])
        torch.testing.assert_close(a[1], b[1])


def test_logarithms_are_exact_next_to_one() -> None:
    usual = default_log2_gamma(40)
    results = gammas.exact_log2([1 - 2.0 ** (-5 - h) for h in range(40)], 40)
    torch.testing.assert_close(results, usual, rtol=1e-15, atol=0.0)
    assert float(results[39]) < 0
    assert torch.equal(gammas.exact_log2(None, 40), usual)
    small = gammas.exact_log2([1e-300, 0.25, 0.5], 3)
    assert small.tolist() == [math.log2(1e-300), -2.0, -1.0]


def test_numbers_are_moved_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = memo.TABLES["decays"]
    kept.clear()
    cpu = torch.device("cpu")
    first = gammas.on_device((0.5, 0.75), 2, cpu)
    assert first.dtype == torch.float32
    assert gammas.on_device((0.5, 0.75), 2, cpu) is first
    assert gammas.on_device(None, 2, cpu) is not gammas.on_device(None, 3, cpu)
    monkeypatch.setattr(kept, "bound", 4)
    for n in range(10):
        gammas.on_device((0.5 + n / 100,), 1, cpu)
    assert len(kept) <= 4


BAD_GAMMAS: list[tuple[Any, str]] = [
    ([0.9, 0.5, 1.5, 1.0], r"gamma must lie in \(0, 1\], got 1.5 for head 2"),
    ([0.9, 0.0, 0.5, 1.0], r"gamma must lie in \(0, 1\], got 0.0 for head 1"),
    ([0.9, -0.5, 0.5, 1.0], r"gamma must lie in \(0, 1\], got -0.5 for head 1"),
    ([math.nan, 0.5, 0.5, 1.0], r"gamma must lie in \(0, 1\], got nan for head 0"),
    (2.0, r"gamma must lie in \(0, 1\], got 2.0 for head 0"),
    (torch.tensor([0.5, 0.5, 0.5, 1.5]), r"gamma must lie in \(0, 1\], got 1.5 for head 3"),
    (torch.tensor([0.5, 0.5, 0.5, 2]).requires_grad_(), "got 2.0 for head 3"),
    ([0.9], "one value for each of 4 heads of q, got 1"),
    (torch.ones(3), r"gamma must be floats \[4\], .* got torch.float32 \[3\]"),
    (torch.ones(1, 4), r"gamma must be floats \[4\], .* got torch.float32 \[1, 4\]"),
    (torch.ones(4, dtype=torch.int64), r"gamma must be floats \[4\], .* got torch.int64"),
    (torch.ones(4, device="meta"), "gamma must be on q's device cpu or on the CPU, got meta"),
    ("0.9", "gamma must be None, a number, .* got str"),
    (True, "gamma must be None, a number, .* got bool"),
    ([0.9, None, 0.5, 1.0], "gamma must be None, a number, .* got NoneType for head 1"),
    ([[0.9]] * 4, "gamma must be None, a number, .* got list for head 0"),
]


@pytest.mark.parametrize(("gamma", "message"), BAD_GAMMAS)
def test_bad_decays(gamma: Any, message: str) -> None:
    q, k, v, _, _ = make()
    with pytest.raises(UnsupportedProblemError, match=message):
        retention(q, k, v, gamma)


# --- bad arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "rolling"}, "form must be one of .*, got 'rolling'"),
        ({"form": None}, "form must be one of .*, got None"),
        ({"form": ["auto"]}, "form must be one of"),
        ({"output_final_state": 1}, "output_final_state must be True or False, got 1"),
        ({"inplace_state": None}, "inplace_state must be True or False, got None"),
        ({"inplace_state": True}, "inplace_state=True needs an initial_state, got None"),
        ({"initial_state": torch.zeros(2, 2, 16, 24)}, r"got \[2, 2, 16, 24\]"),
        ({"initial_state": torch.zeros(2, 4, 16, 24).half()}, "float32, got torch.float16"),
        ({"initial_state": torch.zeros(2, 4, 16, 24).double()}, "float32, got torch.float64"),
        (
            {"initial_state": torch.zeros(2, 4, 16, 24, device="meta")},
            "on q's device cpu, got meta",
        ),
        ({"initial_state": [[0.0]]}, "arrays of one library, got Tensor, Tensor, Tensor, list"),
        (
            {"initial_state": torch.zeros(2, 4, 24, 16).mT, "inplace_state": True},
            r"contiguous to be updated in place, got strides \(1536, 384, 1, 16\)",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    q, k, v, _, _ = make()
    with pytest.raises(UnsupportedProblemError, match=message):
        retention(q, k, v, **options)


def test_bad_tensors() -> None:
    q, k, v, gamma, _ = make()
    for bad, message in (
        ((q[:, :, :5], k, v), "retention takes as many queries as keys, got 5 and 7"),
        ((q.float(), k, v), "q must be float16 or bfloat16, got torch.float32"),
        ((q[0], k, v), "q must have 4 dimensions"),
        ((q.mT.contiguous().mT, k, v), "q must have unit stride in its last dim, got 7"),
        ((q, k.to("meta"), v), "q, k and v must be on one device, got cpu, meta and cpu"),
        ((q, k.to_sparse(), v), "k must be a dense strided tensor"),
        ((q, k, None), "arrays of one library"),
    ):
        for decays in (None, gamma, 0.5, GAMMA):
            with pytest.raises(UnsupportedProblemError, match=message):
                retention(*bad, decays)


def test_forward_mode_is_refused_rather_than_dropped() -> None:
    from torch.autograd import forward_ad

    q, k, v, gamma, state = make()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(state, torch.ones_like(state))
        with pytest.raises(UnsupportedProblemError, match="retention has no forward-mode"):
            retention(q, k, v, initial_state=dual)
        dual = forward_ad.make_dual(gamma, torch.ones_like(gamma))
        with pytest.raises(UnsupportedProblemError, match="retention has no forward-mode"):
            retention(q, k, v, dual)


# --- states in place --------------------------------------------------------------------------------


def test_a_state_in_place_is_the_state_that_is_returned() -> None:
    q, k, v, gamma, state = make()
    expected_o, expected = retention(q, k, v, gamma, initial_state=state)
    version = state._version
    o, same = retention(q, k, v, gamma, initial_state=state, inplace_state=True)
    assert same is state
    assert state._version > version
    assert torch.equal(o, expected_o)
    assert torch.equal(state, expected)
    _, nothing = retention(
        q, k, v, gamma, initial_state=state, inplace_state=True, output_final_state=False
    )
    assert nothing is None
    assert not torch.equal(state, expected)


def test_a_state_that_a_gradient_needs_is_missed() -> None:
    q, k, v, gamma, state = make()
    before = state.clone()
    o, _ = retention(q.clone().requires_grad_(), k, v, gamma, initial_state=before)
    with torch.no_grad():
        retention(q, k, v, gamma, initial_state=before, inplace_state=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(o.sum())


@pytest.mark.parametrize("place", range(5))
def test_in_place_has_no_gradient(place: int) -> None:
    q, k, v, gamma, state = tensors = make()
    tensors[place].requires_grad_()
    with pytest.raises(UnsupportedProblemError, match="inplace_state=True has no gradient"):
        retention(q, k, v, gamma, initial_state=state, inplace_state=True)
    with torch.no_grad():
        retention(q, k, v, gamma, initial_state=state, inplace_state=True)


def test_in_place_in_inference_mode() -> None:
    with torch.inference_mode():
        q, k, v, gamma, state = make()
        expected = retention(q, k, v, gamma, initial_state=state)[1]
        assert retention(q, k, v, gamma, initial_state=state, inplace_state=True)[1] is state
        assert torch.equal(state, expected)


# --- gradients --------------------------------------------------------------------------------------


def loss_of(through: str, o: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    factors = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).reshape(o.shape)
    loss = (o.double() * factors).sum()
    if state is None or through == "o":
        return loss
    carried = state.double().sin().sum()
    return carried if through == "state" else loss + carried


@pytest.mark.parametrize("through", ["o", "state", "both"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: Form, through: str) -> None:
    tensors = make(grad=True)
    precise = [x.detach().double().requires_grad_() for x in tensors]
    cases: Any = ((retention, tensors, {"form": form}), (retention_recurrent, precise, {}))
    results, true_value = (
        torch.autograd.grad(
            loss_of(through, *function(q, k, v, gamma, initial_state=state, **options)),
            (q, k, v, gamma, state),
            materialize_grads=True,
        )
        for function, (q, k, v, gamma, state), options in cases
    )
    for mine, exact, x in zip(results, true_value, tensors, strict=True):
        assert mine.dtype == x.dtype
        torch.testing.assert_close(mine.double(), exact, rtol=2e-3, atol=4e-3)


def test_only_what_requires_grad_gets_one() -> None:
    for place in range(5):
        q, k, v, gamma, state = tensors = make()
        tensors[place].requires_grad_()
        o, final = retention(q, k, v, gamma, initial_state=state)
        torch.autograd.backward(o.sum() + final.sum())
        assert [x.grad is not None for x in tensors] == [n == place for n in range(5)]
    q, k, v, _, _ = make(grad=True)
    with torch.no_grad():
        assert not retention(q, k, v)[0].requires_grad


def test_gradients_of_all_orders_are_those_of_the_formula() -> None:
    tensors = make(5, grad=True)
    precise = [x.detach().double().requires_grad_() for x in tensors]
    generator = torch.Generator().manual_seed(3)
    factors = [torch.randn(x.shape, generator=generator, dtype=torch.float64) / 10 for x in tensors]
    results = []
    cases: Any = ((retention, tensors), (retention_recurrent, precise))
    for function, inputs in cases:
        q, k, v, gamma, state = inputs
        loss = loss_of("both", *function(q, k, v, gamma, initial_state=state))
        values = []
        for order in range(3):
            grads = torch.autograd.grad(loss, inputs, create_graph=order < 2)
            pieces = [(g.double() * w).sum() for g, w in zip(grads, factors, strict=True)]
            loss = torch.stack(pieces).sum()
            values += [g.detach().double() for g in grads]
        results.append(values)
    for mine, true_value in zip(*results, strict=True):
        assert float((mine - true_value).norm() / true_value.norm()) < 4e-3


# --- the rest of the world --------------------------------------------------------------------------


def test_arrays_come_back_as_arrays_of_their_library() -> None:
    q, k, v, _, state = make()
    expected = retention(q, k, v, GAMMA, initial_state=state)
    arrays = [x.numpy() for x in (q, k, v)]
    separate = state.numpy().copy()
    results = retention(*arrays, np.array(GAMMA), initial_state=separate)
    for mine, theirs in zip(results, expected, strict=True):
        assert isinstance(mine, np.ndarray)
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-3, atol=1e-3)
    _, same = retention(*arrays, GAMMA, initial_state=separate, inplace_state=True)
    assert same is separate
    np.testing.assert_allclose(separate, expected[1].numpy(), rtol=1e-5, atol=1e-5)
    with pytest.raises(UnsupportedProblemError, match="ndarray, ndarray, ndarray, Tensor"):
        retention(*arrays, initial_state=state)


@pytest.mark.parametrize(("batch", "heads"), [(0, 4), (2, 0), (0, 0)])
def test_empty_batch_or_heads_give_empty_outputs(batch: int, heads: int) -> None:
    q, k, v, _, state = (x[:batch, :heads] if x.dim() > 1 else x for x in make())
    gamma = torch.full((heads,), 0.5)
    inputs = [x.requires_grad_() for x in (q.detach(), k.detach()[:, :heads], v.detach(), gamma)]
    o, final = retention(inputs[0], inputs[1], inputs[2], gamma, initial_state=state)
    assert (o.shape, final.shape) == ((batch, heads, 7, 24), (batch, heads, 16, 24))
    grads = torch.autograd.grad(o.sum() + final.sum(), inputs)
    assert [g.shape for g in grads] == [x.shape for x in inputs]


def test_one_notice_for_cpu_tensors(caplog: pytest.LogCaptureFixture) -> None:
    runtime.forget("notices")
    with caplog.at_level(logging.WARNING, logger="attention_autotuner"):
        for _ in range(3):
            retention(*make()[:3])
    assert [r.message for r in caplog.records if "reference" in r.message] == [
        "tensors on the CPU: retention is computed by the PyTorch reference, not by a kernel"
    ]


def test_architectures_and_layouts() -> None:
    q, k, v, _, _ = make()
    expected, _ = retention(q, k, v)
    for device_type in ("A100", A100):
        assert torch.equal(retention(q, k, v, None, device_type)[0], expected)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    o, _ = retention(turned, k, v)
    assert o.stride() == torch.empty(2, 7, 4, 24).transpose(1, 2).stride()
    assert torch.equal(o, expected)


def test_meta_tensors_give_shapes() -> None:
    q, k, v, _, state = (x.to("meta") for x in make())
    o, final = retention(q, k, v, GAMMA, initial_state=state)
    assert (o.shape, final.shape) == ((2, 4, 7, 24), (2, 4, 16, 24))
    assert o.device.type == final.device.type == "meta"


@pytest.mark.parametrize(
    ("decays", "grad", "initial"),
    [
        ("tensor", True, True),
        ("numbers", True, False),
        ("usual", False, True),
        ("tensor", False, False),
    ],
)
def test_opcheck(decays: str, grad: bool, initial: bool) -> None:
    q, k, v, gamma, state = make(grad=grad)
    log2 = gamma.detach().log2().requires_grad_(grad) if decays == "tensor" else None
    read = (q, k, v, log2, GAMMA if decays == "numbers" else None)
    start = state if initial else None
    torch.library.opcheck(
        retention_library.FORWARD_OP, (*read, start, None, "chunkwise", "", initial)
    )
    grad_o = torch.randn(2, 4, 7, 24).half().requires_grad_(grad)
    grad_state = torch.randn(2, 4, 16, 24).requires_grad_(grad) if initial else None
    wanted = (initial, log2 is not None)
    torch.library.opcheck(
        retention_library.BACKWARD_OP, (grad_o, grad_state, *read, start, 0.5, "", *wanted)
    )
    if not grad:
        torch.library.opcheck(
            retention_library.IN_PLACE_OP, (*read, state.clone(), None, "recurrent", "A100")
        )


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("decays", ["tensor", "numbers", "one", "usual"])
def test_compile(decays: str) -> None:
    torch._dynamo.utils.counters.clear()

    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gamma: Any, state: torch.Tensor
    ) -> torch.Tensor:
        o, final = retention(q * 2, k, v, gamma, initial_state=state)
        return o.float().sum() + final.square().sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 9, 21):
        q, k, v, gamma, state = tensors = make(length, grad=True)
        arguments: Any = {"tensor": gamma, "numbers": GAMMA, "one": 0.5, "usual": None}[decays]
        wanted = tensors if decays == "tensor" else (q, k, v, state)
        results, expected = compiled(q, k, v, arguments, state), layer(q, k, v, arguments, state)
        torch.testing.assert_close(results, expected)
        for mine, theirs in zip(
            torch.autograd.grad(results, wanted), torch.autograd.grad(expected, wanted), strict=True
        ):
            torch.testing.assert_close(mine, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_in_place(backend: str) -> None:
    def step(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        o, _ = retention(q * 2, k, v, form="recurrent", initial_state=state, inplace_state=True)
        return o + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    q, k, v, _, state = make(1)
    other = state.clone()
    for _ in range(3):
        torch.testing.assert_close(compiled(q, k, v, state), step(q, k, v, other))
        torch.testing.assert_close(state, other)
    with pytest.raises(Exception, match="inplace_state=True has no gradient"):
        compiled(q.clone().requires_grad_(), k, v, state)


def test_a_chunk_of_the_reference_stands_for_auto() -> None:
    q, k, v, gamma, state = make(130)
    o, final = retention(q, k, v, gamma, initial_state=state)
    expected, end = retention_chunkwise(q, k, v, gamma.double(), initial_state=state)
    assert torch.equal(o, expected.half())
    assert torch.equal(final, end)
