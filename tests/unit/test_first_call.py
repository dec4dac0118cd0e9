"""The benchmark of a first call without a compiler: the environment of its process, and the pass criterion."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.errors import BuildError
from benchmarks import first_call

RIGHT: dict[str, Any] = {
    "forward": 0.25,
    "backward": 0.5,
    "ok": True,
    "why": "",
    "finite": True,
}
PROGRAM = """
import json, os, sys
kept = {name: os.environ.get(name) for name in ("CUDA_HOME", "ATTENTION_AUTOTUNER_CACHE_DIR", "OWN")}
print("something before")
print(json.dumps({"arguments": sys.argv[1:], **kept}))
"""


def test_the_process_has_no_compiler_and_a_private_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_call, "PROGRAM", PROGRAM)
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert first_call.first_call(tmp_path, (1, 2, 3), OWN="value") == {
        "arguments": ["1", "2", "3"],
        "CUDA_HOME": None,
        "ATTENTION_AUTOTUNER_CACHE_DIR": str(tmp_path),
        "OWN": "value",
    }


def test_a_process_that_fails_raises_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_call, "PROGRAM", "import sys; sys.exit('no such GPU')")
    with pytest.raises(BuildError, match=r"ended with 1: no such GPU"):
        first_call.first_call(tmp_path, (1, 2, 3))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BuildError, match="the export of kernels ended with 1"):
        first_call.export(tmp_path / "bundle")


@pytest.mark.parametrize(
    "changes", [{"backward": 1.01}, {"ok": False, "why": "it differs"}, {"finite": False}]
)
def test_one_slow_or_wrong_process_fails_the_report(changes: dict[str, Any]) -> None:
    document = first_call.report([RIGHT, RIGHT, RIGHT], {"gpu_name": "X"})
    assert document["passed"] is True
    assert document["median_seconds"] == {"forward": 0.25, "backward": 0.5}
    document = first_call.report([RIGHT, RIGHT, RIGHT | changes], {"gpu_name": "X"})
    assert document["passed"] is False
    assert document["median_seconds"] == {"forward": 0.25, "backward": 0.5}
    assert document["seconds"]["backward"][2] == {**RIGHT, **changes}["backward"]
