"""fla's functions of retention under their names, on the CPU, against the formula in fp64."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention_autotuner import compat
from attention_autotuner.compat import fla
from attention_autotuner.errors import UnsupportedArgumentError
from tests.compat_formulas import check_gradients, close, make


def retain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float = 0.25, state: Any = None
) -> Any:
    """o and the state, token by token in fp64."""
    heads, gamma = q.shape[2], 1 - 2.0 ** (-5 - torch.arange(q.shape[2], dtype=torch.float64))
    state = torch.zeros(q.shape[0], heads, q.shape[3], v.shape[3]) if state is None else state
    state, outputs = state.double(), []
    for q_t, k_t, v_t in zip(*(x.double().unbind(1) for x in (q, k, v)), strict=True):
        state = gamma[:, None, None] * state + k_t[..., None] * v_t[..., None, :]
        outputs.append(scale * torch.einsum("bhd,bhdv->bhv", q_t, state))
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("form", ["chunk", "fused_chunk", "fused_recurrent", "parallel"])
@pytest.mark.parametrize("seqlen", [1, 7, 33])
def test_retention(form: str, seqlen: int) -> None:
    function: Callable[..., Any] = getattr(fla, f"{form}_retention")
    three = make((2, seqlen, 4, 16), (2, seqlen, 4, 16), (2, seqlen, 4, 24))
    o, nothing = function(*three)
    assert nothing is None
    check_gradients(o, retain(*three)[0], three)
    close(function(*three, 0.125)[0], retain(*three, scale=0.125)[0])


@pytest.mark.parametrize("function", [fla.chunk_retention, fla.fused_recurrent_retention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_of_retention(function: Callable[..., Any], dtype: torch.dtype) -> None:
    three = make((2, 7, 4, 16), (2, 7, 4, 16), (2, 7, 4, 24))
    (before,) = make((2, 4, 16, 24), dtype=dtype)
    o, after = function(*three, None, before, True)
    exact, exact_after = retain(*three, state=before)
    assert after.dtype == torch.float32
    close(after, exact_after)
    check_gradients(o, exact, [*three, before])
    first, between = function(*(x[:, :3] for x in three), None, before, True)
    second, _ = function(*(x[:, 3:] for x in three), initial_state=between)
    close(torch.cat([first, second], dim=1), exact)


@pytest.mark.parametrize("form", ["chunk", "fused_chunk", "fused_recurrent", "parallel"])
def test_packed_sequences(form: str) -> None:
    function: Callable[..., Any] = getattr(fla, f"{form}_retention")
    three = make((1, 14, 4, 16), (1, 14, 4, 16), (1, 14, 4, 24))
    (before,) = make((3, 4, 16, 24), dtype=torch.float32)
    carries = form != "parallel"
    states = {"initial_state": before, "output_final_state": True} if carries else {}
    o, after = function(*three, cu_seqlens=torch.tensor([0, 6, 6, 14]), **states)
    rows = [slice(0, 6), slice(6, 6), slice(6, 14)]
    for b, part in enumerate(rows):
        if part.stop > part.start:
            state = before[b : b + 1] if carries else None
            exact, exact_after = retain(*(x[:, part] for x in three), state=state)
            close(o[:, part], exact)
            if carries:
                close(after[b : b + 1], exact_after)


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (fla.chunk_retention, "head_first", True),
        (fla.fused_recurrent_retention, "reverse", True),
        (fla.fused_recurrent_retention, "transpose_state_layout", True),
        (fla.parallel_retention, "output_attentions", True),
        (fla.parallel_retention, "head_first", True),
    ],
)
def test_retention_refuses(function: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(UnsupportedArgumentError, match=f"{name}: .* got (True|Tensor)"):
        function(*make(*[(1, 5, 4, 16)] * 3), **{name: value})


def test_heads_before_tokens_are_to_be_transposed() -> None:
    q, k, v = make(*[(1, 5, 4, 16)] * 3)
    with pytest.raises(UnsupportedArgumentError, match="transpose q, k, v and o") as caught:
        fla.chunk_retention(q, k, v, head_first=True)
    assert "layout" not in str(caught.value)


def test_arguments_of_retention_are_the_packages_in_its_order() -> None:
    def options(function: Callable[..., Any]) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters
        assert list(parameters)[:3] == ["q", "k", "v"]
        return {name: p.default for name, p in list(parameters.items())[3:]}

    states = {"scale": None, "initial_state": None, "output_final_state": False}
    lengths = {"cu_seqlens": None, "head_first": False}
    recurrent = {"reverse": False, "cu_seqlens": None, "transpose_state_layout": False}
    parallel = {"scale": None, "output_attentions": False}
    for function, expected in (
        (fla.chunk_retention, states | lengths),
        (fla.fused_recurrent_retention, states | recurrent),
        (fla.parallel_retention, parallel | lengths),
    ):
        assert list(options(function).items()) == list(expected.items())


def test_code_written_against_fla_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.retention", compat.fla)
    names: dict[str, Any] = {}
    exec("from fla.ops.retention import chunk_retention, fused_recurrent_retention", names)
    assert names["chunk_retention"] is fla.chunk_retention
