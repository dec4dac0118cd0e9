"""The examples, started as by a user, for a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import train_gpt

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [[], ["--deterministic"]], ids=["default", "deterministic"])
def test_a_gpt_trains_as_with_sdpa(options: list[str], tmp_path: Path) -> None:
    arguments = ["--steps", "20", "--batch", "8", "--seqlen", "512", "--out", str(tmp_path)]
    assert train_gpt.main([*arguments, *options]) == 0
    report = json.loads((tmp_path / "train_gpt.json").read_text(encoding="utf-8"))
    assert report["device"].startswith("cuda")
    assert report["environment"]["gpu_name"]
    assert report["same_bits"] is (True if options else None)
    for run in report["runs"].values():
        assert run["losses"][-1] < run["losses"][0] - 1.0
        assert run["peak_bytes"] > 0
        assert run["step_ms"] > 0.0


def test_compiled_models_of_several_seeds_are_measured_by_bars(tmp_path: Path) -> None:
    arguments = ["--steps", "20", "--batch", "8", "--seqlen", "512", "--layers", "2", "--compile"]
    chosen = ["--references", "flash", "cudnn", "--seeds", "0", "1", "--out", str(tmp_path)]
    status = train_gpt.main([*arguments, *chosen])
    report = json.loads((tmp_path / "train_gpt.json").read_text(encoding="utf-8"))
    assert all(training["ok"] for training in report["trainings"])
    # Steps this short say nothing about the time of ours.
    assert status == (
        0 if report["bars"]["all"]["gap_ok"] and report["bars"]["all"]["time_ok"] else 1
    )
    for training in report["trainings"]:
        assert len(training["runs"]) == 3
        for run in training["runs"].values():
            assert run["losses"][-1] < run["losses"][0] - 1.0
