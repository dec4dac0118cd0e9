"""The command that verifies all shipped picks, with a pipeline that builds and runs nothing."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from attention_autotuner.core.outcome import BuildFailed, Ok, Outcome, Wrong
from benchmarks import verify_picks
from tests.fake_benchmark import FakePipeline

GPU = "NVIDIA H200"
FOLDER = Path(str(files("attention_autotuner.tuned")))


def test_every_shipped_pick_is_built_once_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline, output = FakePipeline(), tmp_path / "verified.json"
    assert verify_picks.main(["--gpu", GPU, "--output", str(output)], pipeline) == 0
    picks = verify_picks.picks_of(FOLDER, GPU)
    assert len(picks) == len(pipeline.verified)
    (batch,) = pipeline.batches
    assert len(batch) == len({candidate for _, candidate in picks}) < len(picks)
    written = json.loads(output.read_text(encoding="utf-8"))["picks"]
    assert {pick["outcome"] for pick in written} == {"ok"}
    assert f"{len(picks)} of {len(picks)} picks are right" in capsys.readouterr().out


def test_failures_are_listed_with_their_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picks = verify_picks.picks_of(FOLDER, GPU)
    unbuildable, wrong = picks[0][1].name, picks[-1][1].name

    def build_outcome(name: str) -> Outcome | None:
        return BuildFailed(reason="no room") if name == unbuildable else None

    def outcome_of(name: str) -> Outcome:
        return Wrong(reason="dk: head 3") if wrong in name else Ok()

    pipeline = FakePipeline(build_outcome=build_outcome, check=outcome_of)
    output = tmp_path / "verified.json"
    assert verify_picks.main(["--gpu", GPU, "--output", str(output)], pipeline) == 1
    printed = capsys.readouterr().out
    assert "no room" in printed
    assert "dk: head 3" in printed
    kinds = {pick["outcome"] for pick in json.loads(output.read_text(encoding="utf-8"))["picks"]}
    assert len(kinds) == 3
