"""The drop-in for Hugging Face transformers, on the CPU; needs transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from transformers import BertConfig, BertModel, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from attention_autotuner.errors import UnsupportedProblemError
from examples import transformers_attention as example

TOKENS = torch.arange(48).reshape(2, 24)
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _registered() -> None:
    example.register()


def llama(implementation: str = example.NAME, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = example.tiny_llama()
    for name, value in changes.items():
        setattr(config, name, value)
    model = LlamaForCausalLM._from_config(
        config, attn_implementation=implementation, dtype=torch.bfloat16
    )
    return model.eval()


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)


def test_the_script_agrees_with_sdpa(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--device", "cpu", "--steps", "3", "--batch", "2", "--seqlen", "48"]) == 0
    assert "agrees with sdpa" in capsys.readouterr().out


def test_the_script_fails_when_it_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = example.attention

    def wrong(*arguments: Any, scaling: float, **options: Any) -> tuple[torch.Tensor, None]:
        options["scaling"] = 4.0 * scaling
        return right(*arguments, **options)

    monkeypatch.setattr(example, "attention", wrong)
    assert example.main(["--device", "cpu", "--steps", "2", "--batch", "2", "--seqlen", "48"]) == 1
    assert "gradient of model.layers.0.self_attn.q_proj.weight: error" in capsys.readouterr().out


def test_logits_are_those_of_sdpa_with_and_without_a_cache() -> None:
    ours, expected = llama(), llama("sdpa")(TOKENS).logits
    assert_close(ours(TOKENS).logits, expected)
    assert_close(ours(TOKENS, attention_mask=torch.ones_like(TOKENS)).logits, expected)
    start = ours(TOKENS[:, :10], use_cache=True)
    middle = ours(TOKENS[:, 10:20], past_key_values=start.past_key_values, use_cache=True)
    assert_close(middle.logits, expected[:, 10:20])
    last = ours(TOKENS[:, 20:21], past_key_values=middle.past_key_values, use_cache=True)
    assert_close(last.logits, expected[:, 20:21])


def test_the_scale_is_passed_on() -> None:
    scaled, plain, expected = llama(), llama(), llama("sdpa")
    for model in (scaled, expected):
        for layer in model.model.layers:
            layer.self_attn.scaling = 2.0
    assert_close(scaled(TOKENS).logits, expected(TOKENS).logits)
    assert not torch.allclose(scaled(TOKENS).logits, plain(TOKENS).logits, rtol=0.02, atol=0.02)


def test_encoders_see_all_keys() -> None:
    models = []
    for implementation in (example.NAME, "sdpa"):
        torch.manual_seed(0)
        config = BertConfig(**SMALL)
        models.append(
            BertModel._from_config(config, attn_implementation=implementation, dtype=torch.bfloat16)
        )
    ours, expected = (model.eval()(TOKENS).last_hidden_state for model in models)
    torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.05)


def test_padding_is_refused() -> None:
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    with pytest.raises(UnsupportedProblemError, match="padding is not supported"):
        llama()(TOKENS, attention_mask=mask)


def test_a_ready_made_mask_is_refused() -> None:
    mask = torch.ones(2, 1, 24, 24, dtype=torch.bool)
    with pytest.raises(UnsupportedProblemError, match=r"attention_mask of shape \(2, 1, 24, 24\)"):
        llama()(TOKENS, attention_mask=mask)


def test_packed_sequences_are_refused() -> None:
    positions = torch.cat((torch.arange(12), torch.arange(12)))[None].expand(2, -1)
    with pytest.raises(UnsupportedProblemError, match="packed sequences"):
        llama()(TOKENS, position_ids=positions, use_cache=False)


def test_a_static_cache_is_refused() -> None:
    with pytest.raises(UnsupportedProblemError, match="must end at the last key"):
        llama().generate(TOKENS, max_new_tokens=4, cache_implementation="static")


def test_dropout_is_refused_in_training_only() -> None:
    model = llama(attention_dropout=0.1)
    assert_close(model(TOKENS).logits, llama("sdpa")(TOKENS).logits)
    with pytest.raises(UnsupportedProblemError, match=r"dropout must be 0, got 0\.1"):
        model.train()(TOKENS)


def test_a_sliding_window_is_refused() -> None:
    config = MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8)
    model = MistralForCausalLM._from_config(
        config, attn_implementation=example.NAME, dtype=torch.bfloat16
    )
    with pytest.raises(UnsupportedProblemError, match="no windows"):
        model(TOKENS)


@pytest.mark.parametrize(
    ("name", "value"), [("sliding_window", 8), ("softcap", 30.0), ("s_aux", torch.zeros(4))]
)
def test_what_a_layer_asks_beyond_plain_attention_is_refused(name: str, value: Any) -> None:
    q = torch.randn(1, 4, 8, 16, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblemError, match=f"{name} is not supported"):
        example.attention(torch.nn.Module(), q, q, q, None, **{name: value})


def test_fp32_outside_autocast_is_refused() -> None:
    with pytest.raises(UnsupportedProblemError, match="float32"):
        llama().float()(TOKENS)


def test_it_compiles_without_a_graph_break_once_packing_is_ruled_out() -> None:
    example.register(check_packing=False)
    torch._dynamo.reset()
    compiled: Any = torch.compile(llama(), backend="aot_eager", fullgraph=True)
    expected = llama("sdpa")(TOKENS, labels=TOKENS)
    outputs = compiled(TOKENS, labels=TOKENS, use_cache=False)
    assert_close(outputs.logits, expected.logits)
    outputs.loss.backward()
