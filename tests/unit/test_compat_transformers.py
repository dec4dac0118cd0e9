"""Attention of transformers by this package, on the CPU: every form of mask against eager attention."""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from transformers import (
    AttentionMaskInterface,
    AutoModel,
    BartConfig,
    BartModel,
    CompileConfig,
    ModernBertConfig,
    StaticCache,
)

from attention_autotuner.compat import transformers as compat
from attention_autotuner.errors import UnsupportedProblemError
from examples.transformers_attention import MODELS, compare, make_batch, make_model

EAGER, OURS = "eager", compat.NAME
BF16 = torch.bfloat16
TOKENS, LEFT = make_batch(3, 24)
HOLES = LEFT.clone()
HOLES[0, 9] = 0
MASKS = {"full": None, "left": LEFT, "right": LEFT.flip(-1), "holes": HOLES}
PACKED = torch.cat([torch.arange(n) for n in (5, 18, 1, 24, 24)]).view(3, 24)
ENDS = torch.tensor([0, 5, 23, 24, 48, 72])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, tuple[int, ...]] | None]:
    """Dtypes and shapes of the masks that transformers is given from here on."""
    shapes: list[Any] = []

    def noted(**options: Any) -> compat.Mask:
        mask = compat.make_mask(**options)
        shapes.append(None if mask is None else (mask.dtype, tuple(mask.shape)))
        return mask

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, OURS, noted)
    return shapes


def results_of(model: Any, seen: torch.Tensor | None, **options: Any) -> dict[str, torch.Tensor]:
    """Logits or states of the tokens that are seen, and the gradients of all parameters."""
    model.zero_grad()
    out = model(TOKENS, use_cache=False, **options)
    x = (out.logits if "logits" in out else out.last_hidden_state).float()
    x = x if seen is None else x * seen[..., None]
    (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    named = model.named_parameters()
    return {"output": x.detach()} | {
        name: p.grad.float() for name, p in named if p.grad is not None
    }


def assert_agree(model: Any, seen: torch.Tensor | None, **options: Any) -> None:
    """Output and gradients are no further from those of eager fp32 than twice those of eager bf16."""
    peer, reference = copy.deepcopy(model), copy.deepcopy(model).float()
    for other in (peer, reference):
        other.set_attn_implementation(EAGER)
    results = [results_of(x, seen, **options) for x in (model, peer, reference)]
    for name, x in results[2].items():
        ours, theirs = ((y[name] - x).norm() / x.norm() for y in results[:2])
        assert ours <= 2 * theirs + 2e-3, f"{name}: {ours:.2e}, eager {theirs:.2e}"


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager(name: str, padding: str, forms: list[Any]) -> None:
    mask = MASKS[padding]
    assert_agree(make_model(name, OURS, BF16), mask, attention_mask=mask)
    packed = (torch.int32, (1, 1, 2, 3 * 3 + 1))
    expected = {"full": None, "holes": (torch.bool, (3, 1, 24, 24))}.get(padding, packed)
    assert forms
    assert set(forms) == {expected}


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("said", ["positions", "lengths", "mask"])
def test_packed_sequences_do_not_see_each_other(name: str, said: str, forms: list[Any]) -> None:
    model = make_model(name, OURS, BF16)
    options: dict[str, Any] = {"position_ids": PACKED}
    expected = results_of(model, None, **options)
    assert set(forms) == {(torch.int32, (1, 1, 2, 6))}
    if said == "positions":
        assert_agree(model, None, **options)
        return
    if said == "lengths":
        options |= {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}
        options |= {"max_length_q": 24, "max_length_k": 24, "attention_mask": torch.ones(3, 24)}
    else:
        options["attention_mask"] = compat.packed_mask(ENDS)
    torch.testing.assert_close(results_of(model, None, **options), expected)


def test_masks_are_exported_of_any_number_of_sequences() -> None:
    class Packed(torch.nn.Module):
        def forward(self, ends: torch.Tensor) -> torch.Tensor:
            return compat.packed_mask(ends)

    shapes = ({0: torch.export.Dim("sequences", min=2, max=100)},)
    exported = torch.export.export(Packed(), (torch.arange(6),), dynamic_shapes=shapes)
    assert exported.module()(torch.arange(9)).shape == (1, 1, 2, 9)


def test_rows_of_masks_begin_where_replayed_calls_read() -> None:
    for length in range(2, 10):
        mask = compat.packed_mask(torch.arange(length), torch.arange(length) * 2)
        assert mask.shape == (1, 1, 2, length)
        assert mask[0, 0].tolist() == [[*range(length)], [*range(0, 2 * length, 2)]]
        assert all(row.data_ptr() % 16 == 0 and row.is_contiguous() for row in mask[0, 0])


@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_chosen_as_by_eager(name: str, forms: list[Any]) -> None:
    errors = compare(name, TOKENS, LEFT, steps=1, count=12)
    for cache in ("dynamic", "static"):
        ours, theirs = errors[f"logits, {cache} cache"]
        assert ours <= 2 * theirs + 2e-3
    assert all(form is None or form[0] == torch.int32 for form in forms)
    assert (torch.int32, (1, 2, 1, 3)) in forms


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_chunks_of_a_prompt_fill_a_static_cache(name: str, padding: str) -> None:
    model, whole = make_model(name, OURS, BF16), MASKS[padding]
    assert whole is not None
    with torch.no_grad():
        expected = model(TOKENS, attention_mask=whole).logits
        cache = StaticCache(config=model.config, max_cache_len=32)
        for a, z in ((0, 13), (13, 14), (14, 24)):
            mask, tokens = whole[:, :z], TOKENS[:, a:z]
            positions = (whole.cumsum(-1) - 1).clamp(min=0)[:, a:z]
            out = model(tokens, attention_mask=mask, past_key_values=cache, position_ids=positions)
    seen = whole[:, 14:].bool()
    logits, expected = out.logits[seen].float(), expected[:, 14:][seen].float()
    assert (logits - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_is_neither_read_nor_computed(padding: str) -> None:
    seen = MASKS[padding]
    assert seen is not None
    sizes: dict[str, Any] = {"batch_size": 3, "q_length": 24, "kv_length": 24}
    mask = compat.make_mask(attention_mask=seen.bool(), **sizes)
    q, k, v = torch.randn(3, 3, 2, 24, 16, dtype=BF16)
    hidden = seen[:, None, :, None] == 0
    q, k, v = (x.masked_fill(hidden, torch.nan).requires_grad_() for x in (q, k, v))
    o, _ = compat.attention(torch.nn.Module(), q, k, v, mask)
    o.sum().backward()
    for x in (o.transpose(1, 2), q.grad, k.grad, v.grad):
        assert x is not None
        assert not x.masked_select(hidden).any()
        assert x.masked_select(~hidden).any()
        assert x.isfinite().all()


@pytest.mark.parametrize("padding", MASKS)
def test_encoders_with_windows_see_both_sides(padding: str) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "pad_token_id": 0}
    layers = {"num_hidden_layers": 3, "num_attention_heads": 4, "local_attention": 8}
    torch.manual_seed(0)
    config = ModernBertConfig(**sizes, **layers, global_attn_every_n_layers=2)
    model = AutoModel.from_config(config, attn_implementation=OURS, dtype=BF16).eval()
    mask = MASKS[padding]
    model.forward = lambda *tokens, use_cache, **options: type(model).forward(
        model, *tokens, **options
    )
    assert_agree(model, mask, attention_mask=mask)


@pytest.mark.parametrize("padding", ["full", "right", "holes"])
def test_decoders_see_their_encoder(padding: str, forms: list[Any]) -> None:
    layers = {"encoder_layers": 1, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"vocab_size": 256, "d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    torch.manual_seed(0)
    config = BartConfig(**sizes, **heads, **layers, attn_implementation=OURS, dropout=0.0)
    model = BartModel(config).to(BF16).eval()
    options = {"attention_mask": MASKS[padding], "decoder_input_ids": TOKENS[:, :7]}
    assert_agree(model, None, **options)
    expected = model(TOKENS, **options).last_hidden_state
    with torch.no_grad():
        output = model(TOKENS, **options).last_hidden_state
    torch.testing.assert_close(output, expected.detach(), rtol=0.02, atol=0.02)
    assert ((torch.int32, (1, 2, 1, 3)) in forms) == (padding == "right")


def test_the_callers_own_masks_say_all() -> None:
    model = make_model("mistral", OURS, BF16)
    mask = torch.ones(3, 1, 24, 24, dtype=torch.bool).tril() & LEFT[:, None, None].bool()
    added = torch.zeros(mask.shape, dtype=BF16).masked_fill(~mask, torch.finfo(BF16).min)
    assert_agree(model, LEFT, attention_mask=added)
    expected = results_of(model, LEFT, attention_mask=added)
    torch.testing.assert_close(results_of(model, LEFT, attention_mask=mask), expected)


def test_head_dims_of_any_size_and_autocast() -> None:
    q = torch.randn(2, 4, 8, 20)
    k, v = torch.randn(2, 2, 2, 8, 20)
    with torch.autocast("cpu", BF16):
        o, none = compat.attention(torch.nn.Module(), q, k, v, None, scaling=0.3)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "scale": 0.3}
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    assert none is None
    assert o.dtype == BF16
    torch.testing.assert_close(o.float().transpose(1, 2), expected, rtol=0.02, atol=0.02)


def test_without_modules_is_causal_a_keyword_decides() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 16, dtype=BF16)
    o, _ = compat.attention(torch.nn.Module(), q, k, v, None, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(o.transpose(1, 2), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, r"dropout must be 0, got 0\.1"),
        ({"position_bias": torch.zeros(1)}, r"position_bias must be None, got Tensor \[1\]"),
        ({"block_indices": torch.zeros(1)}, "block_indices must be None"),
        ({"output_attentions": True}, "output_attentions must be False"),
        ({"attention_mask": LEFT}, r"must have 4 dimensions, got \(3, 24\)"),
        ({"attention_mask": LEFT.to_sparse()}, "attention_mask must be a dense strided tensor"),
        ({"cu_seq_lens_q": ENDS.to_sparse()}, "cu_seq_lens_q must be a dense strided tensor"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_served_is_refused(options: dict[str, Any], message: str) -> None:
    q = torch.zeros(3, 4, 24, 16, dtype=BF16)
    options = {"attention_mask": None} | options
    with pytest.raises(UnsupportedProblemError, match=message):
        compat.attention(torch.nn.Module(), q, q, q, **options)


def test_tensors_without_values_give_one() -> None:
    q = torch.empty(3, 4, 24, 16, dtype=BF16, device="meta")
    o, _ = compat.attention(torch.nn.Module(), q, q, q, None)
    assert (o.shape, o.device.type, o.dtype) == ((3, 24, 4, 16), "meta", BF16)


def test_a_transformers_with_other_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", lambda cache_position: None)
    monkeypatch.delitem(sys.modules, compat.__name__)
    with pytest.raises(ImportError, match=r"masks take q_length \(5\.17 does\), got 5\."):
        runpy.run_module(compat.__name__)


def test_fp32_outside_autocast_is_refused() -> None:
    with pytest.raises(UnsupportedProblemError, match="float32"):
        make_model("llama", OURS, torch.float32)(TOKENS)


def test_gradients_go_through_a_padded_cache() -> None:
    model = make_model("llama", OURS, BF16)
    eager = copy.deepcopy(model).float()
    eager.set_attn_implementation(EAGER)
    seen = []
    for either in (model, eager):
        with torch.no_grad():
            cache = either(TOKENS[:, :20], attention_mask=LEFT[:, :20]).past_key_values
        out = either(TOKENS[:, 20:], attention_mask=LEFT, past_key_values=cache)
        out.logits.float().square().sum().backward()
        seen.append({name: p.grad.float() for name, p in either.named_parameters()})
    for name, x in seen[1].items():
        assert (seen[0][name] - x).norm() <= 0.03 * x.norm(), name


def of_mask(mask: compat.Mask) -> Callable[..., Any]:
    return lambda model: model(TOKENS, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize(
    ("fullgraph", "name", "mask"),
    [
        (True, "llama", compat.packed_mask(torch.arange(0, 73, 24))),
        (True, "gemma", compat.packed_mask(ENDS)),
        (False, "mistral", LEFT),
    ],
    ids=["full rows", "packed", "padding, with graph breaks"],
)
def test_models_compile(fullgraph: bool, name: str, mask: compat.Mask) -> None:
    torch._dynamo.reset()
    model = make_model(name, OURS, BF16)
    call = of_mask(mask)
    expected = call(model)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    logits = call(compiled)
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)
    logits.sum().backward()
    assert model.get_parameter("model.layers.0.self_attn.q_proj.weight").grad.norm() > 0


def test_steps_of_a_static_cache_compile_whole() -> None:
    torch._dynamo.reset()
    model = make_model("mistral", OURS, BF16)
    compiling = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compiling._compile_all_devices = True
    options = {"do_sample": False, "max_new_tokens": 8, "cache_implementation": "static"}
    expected = model.generate(TOKENS, attention_mask=LEFT, **options)
    torch._dynamo.utils.counters.clear()
    tokens = model.generate(TOKENS, attention_mask=LEFT, compile_config=compiling, **options)
    assert torch.equal(tokens, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
