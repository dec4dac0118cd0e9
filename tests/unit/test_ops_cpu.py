"""flash_attn_func on CPU tensors: results, layouts, gradients, DLPack, and the torch.library contract."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from attention_autotuner import flash_attn_func
from attention_autotuner.api.attention import torch_op as library
from attention_autotuner.api.shared import checks
from attention_autotuner.arch import A100, H100
from attention_autotuner.reference import attention_low, attention_naive, check
from attention_autotuner.serving import runtime

MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "causal_alignment": "top_left"},
]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make(
    b: int = 2,
    hq: int = 4,
    hkv: int = 2,
    sq: int = 7,
    sk: int = 5,
    dqk: int = 16,
    dv: int = 24,
    *,
    dtype: torch.dtype = torch.float16,
    grad: bool = False,
) -> Three:
    torch.manual_seed(b + hq + sq + sk)
    q, k, v = (
        torch.randn(shape, dtype=dtype, requires_grad=grad)
        for shape in ((b, hq, sq, dqk), (b, hkv, sk, dqk), (b, hkv, sk, dv))
    )
    return q, k, v


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, -0.5, 0.0, 2])
def test_results(mask: dict[str, Any], dtype: torch.dtype, scale: float | None) -> None:
    q, k, v = make(dtype=dtype)
    o, lse = flash_attn_func(q, k, v, softmax_scale=scale, return_lse=True, **mask)
    ref = attention_naive(q, k, v, softmax_scale=scale, **mask)
    low = attention_low(q, k, v, softmax_scale=scale, **mask)
    assert o.dtype == dtype
    assert lse.dtype == torch.float32
    for out, exact, rounded in zip((o, lse), ref, low, strict=True):
        comparison = check(out, exact, rounded)
        assert comparison, comparison.reason
    alone = flash_attn_func(q, k, v, softmax_scale=scale, **mask)
    assert torch.equal(alone, o)


def test_architectures_by_name_class_and_instance() -> None:
    q, k, v = make()
    expected = flash_attn_func(q, k, v)
    for device_type in ("A100", "rtx 4090", "H200", A100, H100()):
        assert torch.equal(flash_attn_func(q, k, v, device_type), expected)


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0), (2, 1, 0), (1, 0, 2)]
)
def test_outputs_take_the_layout_of_q(order: tuple[int, int, int]) -> None:
    q, k, v = make(3, 4, 2, 5, 6)
    back = [order.index(axis) for axis in range(3)]
    moved = q.permute(*order, 3).contiguous().permute(*back, 3)
    assert torch.equal(moved, q)
    o = flash_attn_func(moved, k, v)
    assert o.permute(*order, 3).is_contiguous()
    assert torch.equal(o, flash_attn_func(q, k, v))


def test_output_layout_ignores_broadcast_and_single_dimensions() -> None:
    assert checks.output_strides((2, 4, 5, 16), (0, 80, 16, 1), 8) == (160, 40, 8, 1)
    assert checks.output_strides((1, 4, 5, 16), (999, 16, 64, 1), 16) == (320, 16, 64, 1)
    assert checks.output_strides((3, 1, 5, 16), (80, 7, 16, 1), 24) == (120, 360, 24, 1)
    assert checks.output_strides((2, 4, 5, 16), (0, 0, 0, 1), 8) == (160, 40, 8, 1)


def test_strided_and_broadcast_inputs() -> None:
    q, k, v = make(2, 4, 4, 6, 6, 16, 16)
    packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=2)
    first, second, third = (x.transpose(1, 2) for x in packed.unbind(2))
    assert not first.is_contiguous()
    torch.testing.assert_close(
        flash_attn_func(first, second, third), flash_attn_func(q, k, v), rtol=0, atol=0
    )
    single = k[:, :1].expand(-1, 4, -1, -1)
    torch.testing.assert_close(
        flash_attn_func(q, single, v), flash_attn_func(q, single.contiguous(), v), rtol=0, atol=0
    )


@pytest.mark.parametrize(("batch", "heads"), [(0, 2), (2, 0), (0, 0)])
def test_empty_batch_or_heads_give_empty_outputs(batch: int, heads: int) -> None:
    q, k, v = make(batch, heads * 2, heads, grad=True)
    o, lse = flash_attn_func(q, k, v, return_lse=True)
    assert o.shape == (batch, heads * 2, 7, 24)
    assert lse.shape == (batch, heads * 2, 7)
    grads = torch.autograd.grad(o.sum() + lse.sum(), (q, k, v))
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("through", ["o", "lse", "both"])
def test_gradients(mask: dict[str, Any], through: str) -> None:
    q, k, v = make(grad=True)
    precise = [x.detach().double().requires_grad_() for x in (q, k, v)]

    def loss(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        o, lse = pair
        o = o.double() * torch.linspace(-1, 1, o.numel()).reshape(o.shape)
        lse = lse.double().masked_fill(lse == -torch.inf, 0.0).cos()
        return {"o": o.sum(), "lse": lse.sum(), "both": o.sum() + lse.sum()}[through]

    options = {"softmax_scale": 0.3, **mask}
    results = torch.autograd.grad(
        loss(flash_attn_func(q, k, v, return_lse=True, **options)),
        (q, k, v),
        materialize_grads=True,
    )
    expected = torch.autograd.grad(
        loss(attention_naive(*precise, dtype=torch.float64, **options)),
        precise,
        materialize_grads=True,
    )
    for mine, exact in zip(results, expected, strict=True):
        assert mine.dtype == torch.float16
        torch.testing.assert_close(mine.double(), exact, rtol=2e-3, atol=2e-3)


def test_only_what_requires_grad_gets_one() -> None:
    q, k, v = make()
    k.requires_grad_()
    torch.autograd.backward(flash_attn_func(q, k, v).sum())
    assert k.grad is not None
    assert q.grad is None
    with torch.no_grad():
        assert not flash_attn_func(q, k, v).requires_grad


def test_arrays_come_back_as_arrays_of_their_library() -> None:
    q, k, v = make(3, 4, 2)
    a, b, c = (x.numpy() for x in (q, k, v))
    o = flash_attn_func(a, b, c)
    assert isinstance(o, np.ndarray)
    assert o.dtype == np.float16
    expected, expected_lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    o, lse = flash_attn_func(a, b, c, causal=True, return_lse=True)
    assert np.array_equal(o, expected.numpy())
    assert np.array_equal(lse, expected_lse.numpy())


class Foreign:
    """An array of a library that knows DLPack and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_an_array_of_a_library_that_takes_none_back_is_refused() -> None:
    from attention_autotuner.errors import UnsupportedProblemError

    q, k, v = map(Foreign, make())
    with pytest.raises(UnsupportedProblemError, match="has no from_dlpack"):
        flash_attn_func(q, k, v)


def test_one_notice_for_cpu_tensors(caplog: pytest.LogCaptureFixture) -> None:
    runtime.forget("notices")
    with caplog.at_level(logging.WARNING, logger="attention_autotuner"):
        for _ in range(3):
            flash_attn_func(*make())
    assert [r.message for r in caplog.records if "reference" in r.message] == [
        "tensors on the CPU: attention is computed by the PyTorch reference, not by a kernel"
    ]


SAMPLES: list[tuple[Any, ...]] = [
    (None, False, False, "", False, False),
    (0.3, True, False, "A100", True, True),
    (-1.0, True, True, "", True, False),
]


# Every pair of values is in one of the samples.
@pytest.mark.parametrize(
    ("grad", "transposed", "arguments"),
    [
        (grad, (number % 2 == 0) == grad, x)
        for grad in (False, True)
        for number, x in enumerate(SAMPLES)
    ],
)
def test_opcheck(grad: bool, transposed: bool, arguments: tuple[Any, ...]) -> None:
    tensors = [x.detach() for x in make(2, 4, 2, 6, 9)]
    if transposed:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for x in tensors:
        x.requires_grad_(grad)
    torch.library.opcheck(library.FORWARD_OP, (*tensors, *arguments))


def test_opcheck_with_key_bounds() -> None:
    ends = torch.tensor([4, 9], dtype=torch.int32)
    tensors = [x.detach() for x in make(2, 4, 2, 6, 9)]
    for bounds in ((ends, ends // 3), (ends, None), (None, ends // 3)):
        arguments = (*tensors, None, True, False, "", True, False, *bounds)
        torch.library.opcheck(library.FORWARD_OP, arguments)


@pytest.mark.parametrize(
    ("grad", "transposed", "passed"),
    [
        (False, False, "o"),
        (True, True, "o"),
        (False, True, "lse"),
        (True, False, "lse"),
        (False, False, "both"),
        (True, True, "both"),
    ],
)
def test_opcheck_backward(grad: bool, transposed: bool, passed: str) -> None:
    # A batch of symbolic size takes most of the time of tracing second derivatives; one of them has it.
    q, k, v = make(1 if grad and passed != "o" else 2, 4, 2, 6, 9)
    if transposed:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    o, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    grad_o = None if passed == "lse" else torch.randn(o.shape).half().requires_grad_(grad)
    grad_lse = None if passed == "o" else torch.randn(lse.shape).requires_grad_(grad)
    for x in (q, k, v):
        x.requires_grad_(grad)
    torch.library.opcheck(
        library.BACKWARD_OP,
        (grad_o, grad_lse, q, k, v, o, lse, None, True, False, "", True),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device_type", [None, "A100"])
def test_compile(backend: str, dynamic: bool, device_type: str | None) -> None:
    torch.compiler.reset()
    options: dict[str, Any] = {"causal": True, "softmax_scale": 0.2, "return_lse": True}

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o, lse = flash_attn_func(q * 2, k, v, device_type, **options)
        total: torch.Tensor = o.float().sum(-1) + lse.nan_to_num(neginf=0.0)
        return total

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for sq, sk in ((7, 5), (9, 12), (33, 8)):
        inputs = make(sq=sq, sk=sk, grad=True)
        results, expected = compiled(*inputs), layer(*inputs)
        torch.testing.assert_close(results, expected)
        for mine, theirs in zip(
            torch.autograd.grad(results.sum(), inputs),
            torch.autograd.grad(expected.sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs)


def test_compile_recompiles_no_further_for_new_lengths() -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend=counter, dynamic=True)
    for length in (5, 8, 13, 21, 34):
        compiled(*make(sq=length, sk=length + 3))
    assert counter.frame_count == 1


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            o: torch.Tensor = flash_attn_func(q, k, v, "H100", causal=True)
            return o

    inputs = make()
    program = torch.export.export(Layer(), inputs)
    torch.testing.assert_close(program.module()(*inputs), Layer()(*inputs))


def test_meta_tensors_give_shapes_and_layout() -> None:
    q, k, v = (x.to("meta") for x in make())
    o, lse = flash_attn_func(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, return_lse=True)
    assert o.device.type == "meta"
    assert o.shape == (2, 4, 7, 24)
    assert o.transpose(0, 1).is_contiguous()
    assert lse.shape == (2, 4, 7)


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, attention_autotuner as a\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert {'flash_attn_func', 'tune', 'errors', 'settings'} <= set(dir(a))\n"
        "assert issubclass(a.errors.NotWarmError, RuntimeError)\n"
        "assert 'torch' not in sys.modules\n"
        "a.tune, a.settings\n"
        "assert 'torch' not in sys.modules\n"
        "a.flash_attn_func\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import attention_autotuner

    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = attention_autotuner.no_such_thing
