"""The example scripts on machines that lack something: one line, and the status that they promise."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest
import torch

from examples import train_gpt, train_retnet

SCRIPTS = (train_gpt, train_retnet)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_without_a_gpu_it_says_so(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "cannot run: torch sees no GPU on this machine\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_no_steps_are_refused(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main(["--steps", "0"])
    assert stopped.value.code == 2
    assert "argument --steps: must be at least 1, got 0" in capsys.readouterr().err


def test_without_transformers_its_example_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "examples.transformers_attention", raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("examples.transformers_attention", run_name="__main__")
    assert stopped.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "transformers_attention: loading PyTorch and transformers"
    assert second.startswith("cannot run: it needs transformers (pip install transformers): ")


@pytest.mark.parametrize("example", ["vector_add", "reduction", "matmul"])
def test_triton_examples_say_what_is_missing(
    example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, f"examples.autotune.{example}", raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"examples.autotune.{example}", run_name="__main__")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"{example}: cannot run: it needs Triton")
