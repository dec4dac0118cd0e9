"""Files of picks that come with the package: concurrent writes."""

from __future__ import annotations

import threading
from importlib.resources import files
from pathlib import Path

import filelock
import pytest

from attention_autotuner.errors import StoreError
from attention_autotuner.tuning import locking
from attention_autotuner.tuning.shipping import ship, shipped, write_shipped

GPU = "NVIDIA H200"
FIRST, SECOND = shipped(Path(str(files("attention_autotuner.tuned"))), GPU)[:2]


def test_a_writer_waits_for_another_and_keeps_its_picks(tmp_path: Path) -> None:
    late = threading.Thread(target=ship, args=(tmp_path, GPU, [SECOND]))
    with filelock.FileLock(tmp_path / "nvidia-h200.lock"):
        late.start()
        late.join(0.2)
        assert late.is_alive()
        write_shipped(tmp_path, GPU, [FIRST])
    late.join(10.0)
    assert not late.is_alive()
    problems = {record.problem for record in shipped(tmp_path, GPU)}
    assert problems == {FIRST.problem, SECOND.problem}


def test_a_file_locked_for_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locking, "LOCK_TIMEOUT_SECONDS", 0.05)
    held = filelock.FileLock(tmp_path / "nvidia-h200.lock")
    with held, pytest.raises(StoreError, match=r"another process holds .*nvidia-h200\.lock"):
        ship(tmp_path, GPU, [FIRST])
    assert not (tmp_path / "nvidia-h200.jsonl").exists()
