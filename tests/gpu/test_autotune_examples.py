"""Functions tuned on a GPU: Triton kernels beside Triton's own autotune, and a collective function of one rank."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from attention_autotuner import autotune, settings
from attention_autotuner.tuning.functions import Tunable

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("example", "function", "arguments"),
    [
        ("vector_add", "add", "vectors"),
        ("reduction", "row_sums", "matrix"),
        ("matmul", "matmul", "matrices"),
    ],
)
def test_the_pick_is_that_of_triton_or_as_fast_and_the_wrong_one_is_rejected(
    example: str, function: str, arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from examples.autotune.comparison import run_comparison

    module = importlib.import_module(f"examples.autotune.{example}")
    tunable, of = getattr(module, function), getattr(module, arguments)
    with settings.override(cache_dir=tmp_path):
        assert run_comparison(example, tunable, of, module.picked_by_triton) == 0
    printed = capsys.readouterr().out
    with capsys.disabled():
        sys.stdout.write("\n" + printed)
    assert printed.count("rejected: wrong") == 1


def multiplied(x: torch.Tensor, *, pieces: int) -> torch.Tensor:
    return torch.cat([part * 2 for part in x.chunk(pieces)])


def test_the_time_of_the_gpu_decides_and_its_faults_are_outcomes(tmp_path: Path) -> None:
    x = torch.randn(1 << 24, device="cuda")
    with settings.override(cache_dir=tmp_path):
        tunable = Tunable(multiplied, {"pieces": [64, 1]}, budget_seconds=5.0)
        result = tunable.tune(x)
        assert result.pick == {"pieces": 1}
        assert result.gain is not None
        assert result.gain > 0.1
        assert faulty.tune(x).timings[-1].outcome.kind == "crashed"
        assert faulty(x).equal(x * 2)  # and this process still has its GPU


@autotune({"index": [0, 1 << 40]}, budget_seconds=1.0)
def faulty(x: torch.Tensor, *, index: int) -> torch.Tensor:
    at = torch.full((1,), index, device=x.device)
    return x * 2 + x[at] * 0 if index else x * 2
