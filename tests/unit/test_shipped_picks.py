"""The picks that come with the package must be of the kernels that come with it."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.codegen.render import kernel_digest, render
from attention_autotuner.kernels import legality
from attention_autotuner.tuning.record_schema import TuningRecord

FILES = sorted(
    path.name
    for path in files("attention_autotuner.tuned").iterdir()
    if path.name.endswith(".json")
)


def test_the_h200_has_picks() -> None:
    assert "nvidia-h200.json" in FILES


@pytest.mark.parametrize("name", FILES)
def test_shipped_picks_are_legal_and_of_the_present_kernels(name: str) -> None:
    document = json.loads((files("attention_autotuner.tuned") / name).read_text(encoding="utf-8"))
    records = [TuningRecord.from_json(record) for record in document["records"]]
    assert records
    for record in records:
        pick = record.picked
        assert kernel_digest(render(pick.candidate)) == pick.kernel_digest, (
            f"{record.problem.describe()}: the kernels changed since this pick was timed; run "
            f"`python -m benchmarks.attention_{record.problem.direction} run --ship "
            "python/attention_autotuner/tuned`"
        )
        assert legality.check(pick.candidate, resolve(record.arch).spec) is None
