"""The example for Hugging Face transformers, on the CPU; needs transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from transformers import AttentionInterface

from attention_autotuner.compat import transformers as compat
from examples import transformers_attention as example

ARGUMENTS = ["--device", "cpu", "--steps", "2", "--batch", "2", "--seqlen", "24"]
ARGUMENTS += ["--new-tokens", "4"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_script_agrees_with_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(ARGUMENTS) == 0
    assert "agrees with transformers' own attention" in capsys.readouterr().out


def test_the_script_fails_when_it_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*arguments: Any, scaling: float, **options: Any) -> tuple[torch.Tensor, None]:
        options["scaling"] = 4.0 * scaling
        return compat.attention(*arguments, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, compat.NAME, wrong)
    assert example.main(ARGUMENTS) == 1
    printed = capsys.readouterr().out
    assert "too far from the reference: llama: logits, static cache" in printed
    assert "too far from the reference: gpt_oss: gradient of" in printed
