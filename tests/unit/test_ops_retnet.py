"""retnet_attn_func on CPU tensors: results, gradients, masks and decays, bad input, and the torch.library contract."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import attention_autotuner
from attention_autotuner import Decay, RetNetAttnFunc, retnet_attn_func
from attention_autotuner.api.retnet import torch_op as retnet_library
from attention_autotuner.api.shared.torch_library import twin_of
from attention_autotuner.arch import H100
from attention_autotuner.errors import UnsupportedArchitectureError, UnsupportedProblemError
from attention_autotuner.reference import (
    check,
    decay_mask,
    retnet_attention,
    retnet_attention_low,
)
from attention_autotuner.serving import runtime

retnet: Callable[..., Any] = retnet_attn_func  # as an untyped caller sees it
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
GAMMA = [0.9, 0.5, 0.99, 1.0]
RULES: list[dict[str, Any]] = [
    {},
    {"causal": True, "scale": -0.5},
    {"normalize": False, "scale": 2},
    {"r_clamp_max": 3.0},
    {"r_grad": True},
    {"r_grad": True, "r_clamp_max": 2, "causal": True},
]


def make(
    rows: int = 7,
    keys: int = 5,
    *,
    batch: int = 2,
    heads: int = 4,
    dtype: torch.dtype = torch.float16,
    grad: bool = False,
) -> Four:
    """q, k, v and a mask."""
    generator = torch.Generator().manual_seed(rows + keys)
    q, k, v, mask = (
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad)
        for shape in (
            (batch, 4, rows, 16),
            (batch, 2, keys, 16),
            (batch, 2, keys, 24),
            (heads, rows, keys),
        )
    )
    return q, k, v, mask


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 4])
def test_results(rules: dict[str, Any], dtype: torch.dtype, heads: int) -> None:
    tensors = make(dtype=dtype, heads=heads)
    o, r = retnet(*tensors, return_r=True, **rules)
    references, lows = retnet_attention(*tensors, **rules), retnet_attention_low(*tensors, **rules)
    assert (o.dtype, r.dtype) == (dtype, torch.float32)
    for mine, true_value, low in zip((o, r), references, lows, strict=True):
        comparison = check(mine, true_value, low)
        assert comparison, comparison.reason
    assert torch.equal(retnet(*tensors, **rules), o)


@pytest.mark.parametrize("rows", [1, 5, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_a_decay_is_its_mask(rows: int, causal: bool) -> None:
    q, k, v, _ = make(rows)
    separate = torch.tensor(GAMMA)
    ways: list[tuple[Any, torch.Tensor | None]] = [
        (None, None),
        (0.75, torch.full((4,), 0.75)),
        (GAMMA, separate),
        (separate, separate),
        (separate.numpy(), separate),
    ]
    for gamma, values in ways:
        mask = decay_mask(values, 4, rows, 5, q.device)
        expected, expected_r = retnet_attention(q, k, v, mask, causal=True)
        o, r = retnet(q, k, v, Decay(gamma), causal=causal, return_r=True)
        torch.testing.assert_close(o, expected.half(), rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(r, expected_r, rtol=1e-4, atol=1e-4)
    assert torch.equal(retnet(q, k, v, Decay()), retnet(q, k, v, Decay(None)))


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("heads", [1, 4])
def test_gradients(rules: dict[str, Any], heads: int) -> None:
    tensors = make(grad=True, heads=heads)
    precise = [x.detach().double().requires_grad_() for x in tensors]
    o, r = retnet(*tensors, return_r=True, **rules)
    assert not r.requires_grad
    exact, _ = retnet_attention(precise[0], precise[1], precise[2], precise[3], **rules)
    factors = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).reshape(o.shape)
    results = torch.autograd.grad((o.double() * factors).sum(), tensors)
    references = torch.autograd.grad((exact * factors).sum(), precise)
    for mine, true_value, x in zip(results, references, tensors, strict=True):
        assert (mine.dtype, mine.shape) == (x.dtype, x.shape)
        assert float((mine.double() - true_value).norm() / true_value.norm()) < 1e-3


def test_only_what_requires_grad_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention_autotuner.api.retnet import autograd as retnet_autograd

    asked: list[bool] = []
    backward = retnet_library.BACKWARD_OP

    def look(*arguments: Any) -> Any:
        asked.append(arguments[-2])
        return backward(*arguments)

    monkeypatch.setattr(retnet_autograd, "BACKWARD_OP", look)
    for place in range(4):
        tensors = make()
        tensors[place].requires_grad_()
        torch.autograd.backward(retnet(*tensors).sum())
        assert [x.grad is not None for x in tensors] == [n == place for n in range(4)]
    assert asked == [False, False, False, True]
    with torch.no_grad():
        assert not retnet(*make(grad=True)).requires_grad


@pytest.mark.parametrize("r_grad", [False, True])
def test_gradients_of_all_orders_are_those_of_the_formula(r_grad: bool) -> None:
    tensors = make(grad=True)
    precise = [x.detach().double().requires_grad_() for x in tensors]
    generator = torch.Generator().manual_seed(3)
    factors = [torch.randn(x.shape, generator=generator, dtype=torch.float64) / 10 for x in tensors]
    results = []
    for function, inputs in ((retnet, tensors), (retnet_attention, precise)):
        o = function(*inputs, r_grad=r_grad)
        loss = (o if isinstance(o, torch.Tensor) else o[0]).double().sin().sum()
        values = []
        for order in range(3):
            grads = torch.autograd.grad(loss, inputs, create_graph=order < 2)
            pieces = [(g.double() * w).sum() for g, w in zip(grads, factors, strict=True)]
            loss = torch.stack(pieces).sum()
            values += [g.detach().double() for g in grads]
        results.append(values)
    for mine, true_value in zip(*results, strict=True):
        assert float((mine - true_value).norm() / true_value.norm()) < 4e-3


def test_the_decays_gamma_has_no_gradient() -> None:
    q, k, v, _ = make(grad=True)
    gamma = torch.tensor(GAMMA, requires_grad=True)
    with pytest.raises(UnsupportedProblemError, match=r"gamma of a Decay has no gradient .* got"):
        retnet(q, k, v, Decay(gamma))
    with torch.no_grad():
        expected = retnet(q, k, v, Decay(gamma))
    assert torch.equal(retnet(q, k, v, Decay(gamma.detach())), expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(4, 7, 6).half(), "mask must be [4 or 1, 7, 5], got [4, 7, 6]"),
        (torch.zeros(2, 7, 5).half(), "mask must be [4 or 1, 7, 5], got [2, 7, 5]"),
        (torch.zeros(7, 5).half(), "mask must be [4 or 1, 7, 5], got [7, 5]"),
        (torch.zeros(2, 4, 7, 5).half(), "mask must be [4 or 1, 7, 5], got [2, 4, 7, 5]"),
        (torch.zeros(4, 7, 5), "mask must have q's dtype torch.float16, got torch.float32"),
        (torch.zeros(4, 7, 5, dtype=torch.bool), "torch.float16, got torch.bool"),
        (torch.zeros(4, 7, 5, device="meta").half(), "mask must be on q's device cpu, got meta"),
        (torch.zeros(4, 5, 7).half().mT, "mask must have unit stride in its last dim, got 7"),
        (torch.zeros(4, 7, 5).half().to_sparse(), "mask must be a dense strided tensor"),
        (None, "mask must be a tensor or a Decay, got None"),
        (0.9, "mask must be a tensor or a Decay, got 0.9"),
        (Decay([0.9, 0.5]), "gamma must have one value for each of 4 heads of q, got 2"),
        (Decay([0.9, 0.5, 0.1, 1.1]), "gamma must lie in (0, 1], got 1.1 for head 3"),
        (Decay(torch.tensor([0.9, 0.5, 0.0, 1])), "gamma must lie in (0, 1], got 0.0 for head 2"),
        (Decay("slow"), "gamma must be None, a number, a sequence of numbers or a tensor, got str"),
    ],
)
def test_bad_masks(mask: Any, message: str) -> None:
    q, k, v, _ = make()
    with pytest.raises(UnsupportedProblemError) as caught:
        retnet(q, k, v, mask)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": None}, "scale must be a float, got NoneType"),
        ({"scale": "1"}, "scale must be a float, got str"),
        ({"scale": True}, "scale must be a float, got bool"),
        ({"scale": math.nan}, "scale must be finite in fp32, got nan"),
        ({"scale": 1e39}, "scale must be finite in fp32, got 1e\\+39"),
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"normalize": None}, "normalize must be True or False, got None"),
        ({"r_grad": "yes"}, "r_grad must be True or False, got 'yes'"),
        ({"return_r": 0}, "return_r must be True or False, got 0"),
        ({"r_clamp_max": 0.5}, "r_clamp_max must be at least 1, got 0.5"),
        ({"r_clamp_max": math.nan}, "r_clamp_max must be at least 1, got nan"),
        ({"r_clamp_max": "2"}, "r_clamp_max must be a float or None, got str"),
        ({"normalize": False, "r_grad": True}, "normalize=False leaves no r .* r_grad=True"),
        ({"normalize": False, "r_clamp_max": 2.0}, "normalize=False leaves no r .*=2.0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedProblemError, match=message):
        retnet(*make(), **options)


def test_bad_tensors_and_devices() -> None:
    q, k, v, mask = make()
    for bad, message in (
        ((q.float(), k, v, mask), "q must be float16 or bfloat16, got torch.float32"),
        ((q[0], k, v, mask), "q must have 4 dimensions"),
        ((q, k, v[:, :1], mask), "k and v must have the same heads, got 2 and 1"),
        ((q, k, "v", mask), "arrays of one library"),
    ):
        for factors in (bad[3], Decay(), Decay(0.5), Decay(torch.tensor(GAMMA))):
            with pytest.raises(UnsupportedProblemError, match=message):
                retnet(*bad[:3], factors)
    with pytest.raises(UnsupportedArchitectureError, match="unknown"):
        retnet(q, k, v, mask, "V9000")
    for device_type in ("A100", "H200", H100):
        retnet(q, k, v, mask, device_type)


def test_forward_mode_is_refused_rather_than_dropped() -> None:
    from torch.autograd import forward_ad

    q, k, v, mask = make()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(mask, torch.ones_like(mask))
        with pytest.raises(UnsupportedProblemError, match="retnet has no forward-mode derivative"):
            retnet(q, k, v, dual)


@pytest.mark.parametrize(("batch", "heads"), [(0, 4), (2, 0), (0, 0)])
def test_empty_batch_or_heads_give_empty_outputs(batch: int, heads: int) -> None:
    q, k, v, _ = make()
    inputs = [x[:batch, :heads].detach().requires_grad_() for x in (q, k, v)]
    mask = torch.ones(1, 7, 5).half().requires_grad_()
    o, r = retnet(*inputs, mask, return_r=True)
    assert (o.shape, r.shape) == ((batch, heads, 7, 24), (batch, heads, 7))
    grads = torch.autograd.grad(o.sum(), [*inputs, mask])
    assert [g.shape for g in grads] == [x.shape for x in (*inputs, mask)]
    assert not grads[3].any()


def test_arrays_come_back_as_arrays_of_their_library() -> None:
    tensors = make()
    arrays = [x.numpy() for x in tensors]
    o, r = retnet(*arrays, return_r=True, scale=0.5)
    expected, expected_r = retnet(*tensors, return_r=True, scale=0.5)
    assert isinstance(o, np.ndarray)
    assert np.array_equal(o, expected.numpy())
    assert np.array_equal(r, expected_r.numpy())
    decayed = retnet(*arrays[:3], Decay(np.array(GAMMA)))
    assert np.array_equal(decayed, retnet(*tensors[:3], Decay(GAMMA)).numpy())


def test_one_notice_for_cpu_tensors(caplog: pytest.LogCaptureFixture) -> None:
    runtime.forget("notices")
    with caplog.at_level(logging.WARNING, logger="attention_autotuner"):
        for _ in range(3):
            retnet(*make())
    assert [r.message for r in caplog.records if "reference" in r.message] == [
        "tensors on the CPU: retnet is computed by the PyTorch reference, not by a kernel"
    ]


def test_the_alias_and_the_public_names() -> None:
    assert RetNetAttnFunc is retnet_attn_func
    assert {"Decay", "RetNetAttnFunc", "retention_func", "retnet_attn_func"} <= set(
        dir(attention_autotuner)
    )
    assert repr(Decay(0.5)) == "Decay(0.5)"


def test_meta_tensors_give_shapes() -> None:
    q, k, v, mask = (x.to("meta") for x in make())
    for factors in (mask, Decay(), Decay(GAMMA), Decay(torch.ones(4, device="meta"))):
        o, r = retnet(q, k, v, factors, return_r=True)
        assert (o.shape, r.shape) == ((2, 4, 7, 24), (2, 4, 7))


WEIGHTS = ["mask", "tensor", "numbers", "usual"]


@pytest.mark.parametrize(
    ("factors", "grad", "rules"),
    [
        ("mask", True, (0.5, True, True, None, False)),
        ("mask", False, (1.0, False, False, None, False)),
        ("tensor", True, (1.0, False, True, 2.0, True)),
        ("numbers", True, (1.0, False, True, None, False)),
        ("usual", False, (1.0, False, True, 2.0, True)),
    ],
)
def test_opcheck(factors: str, grad: bool, rules: tuple[Any, ...]) -> None:
    # A batch of symbolic size makes each trace of a second derivative six times as long; one of them has it.
    q, k, v, mask = make(grad=grad, batch=2 if factors == "mask" or not grad else 1)
    passed = {
        "mask": (mask, None, None),
        "tensor": (None, torch.tensor(GAMMA).log2(), None),
        "numbers": (None, None, GAMMA),
        "usual": (None, None, None),
    }[factors]
    arguments = (q, k, v, *passed)
    torch.library.opcheck(retnet_library.FORWARD_OP, (*arguments, *rules, "", True, False))
    o, r = retnet_library.FORWARD_OP(*arguments, *rules, "", True, False)
    grad_o = torch.randn(o.shape).half().requires_grad_(grad)
    kept = (o.detach() if rules[4] else None, r if rules[2] else None)
    torch.library.opcheck(
        retnet_library.BACKWARD_OP,
        (grad_o, *arguments, *kept, *rules, "A100", factors == "mask", True),
    )


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("factors", WEIGHTS)
def test_compile(factors: str) -> None:
    torch._dynamo.utils.counters.clear()

    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, gamma: torch.Tensor
    ) -> torch.Tensor:
        used: Any = {
            "mask": mask,
            "tensor": Decay(gamma),
            "numbers": Decay(GAMMA),
            "usual": Decay(),
        }[factors]
        o, r = retnet(q * 2, k, v, used, causal=True, r_grad=True, return_r=True)
        return o.float().square().sum() + r.sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, keys in ((5, 8), (9, 11), (21, 30)):
        tensors = make(rows, keys, grad=True)
        gamma = torch.tensor(GAMMA)
        results, expected = compiled(*tensors, gamma), layer(*tensors, gamma)
        torch.testing.assert_close(results, expected)
        wanted = tensors if factors == "mask" else tensors[:3]
        for mine, theirs in zip(
            torch.autograd.grad(results, wanted), torch.autograd.grad(expected, wanted), strict=True
        ):
            torch.testing.assert_close(mine, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_gradients_follow_torchs_setting_at_the_call() -> None:
    asked = []

    class Look(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is twin_of(retnet_library.BACKWARD_OP):
                asked.append(args[-1])
            return func(*args, **(kwargs or {}))

    before = torch.are_deterministic_algorithms_enabled()
    try:
        for setting in (False, True):
            torch.use_deterministic_algorithms(setting)
            o = retnet(*make(grad=True))
            torch.use_deterministic_algorithms(False)
            with Look():
                torch.autograd.backward(o.sum())
    finally:
        torch.use_deterministic_algorithms(before)
    assert asked == [False, True]
