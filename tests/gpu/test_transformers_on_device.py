"""Models of transformers on a GPU: padded training, generation with both caches, and compiled steps."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from attention_autotuner.compat.transformers import NAME
from examples import transformers_attention as example

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", example.MODELS)
def test_models_agree_with_transformers_own_attention(name: str) -> None:
    tokens, mask = (x.cuda() for x in example.make_batch(3, 48))
    errors = example.compare(name, tokens, mask, steps=2, count=8)
    bars = {what: example.FACTOR * peer + example.FLOOR for what, (_, peer) in errors.items()}
    assert {what: x for what, (x, _) in errors.items() if not x <= bars[what]} == {}


def test_steps_of_a_static_cache_are_captured() -> None:
    tokens, mask = (x.cuda() for x in example.make_batch(3, 48))
    model = example.make_model("mistral", NAME, torch.bfloat16).cuda()
    options = {"do_sample": False, "max_new_tokens": 8, "cache_implementation": "static"}
    expected = model.generate(tokens, attention_mask=mask, disable_compile=True, **options)
    torch._dynamo.utils.counters.clear()
    assert torch.equal(model.generate(tokens, attention_mask=mask, **options), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
