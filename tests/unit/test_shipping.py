"""Files of picks that come with the package: concurrent writes."""

from __future__ import annotations

import gzip
import lzma
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from attention_autotuner.core.leases import Lease
from attention_autotuner.errors import RecordError, StoreError
from attention_autotuner.tuning import locking
from attention_autotuner.tuning.shipping import evidence, ship, shipped

GPU = "NVIDIA H200"
FIRST, SECOND = shipped(Path(str(files("attention_autotuner.tuned"))), GPU)[:2]


def test_a_writer_waits_for_another_and_keeps_its_picks(tmp_path: Path) -> None:
    late = threading.Thread(target=ship, args=(tmp_path, GPU, [SECOND]))
    with Lease(tmp_path / "nvidia-h200.lease").wait():
        late.start()
        late.join(0.2)
        assert late.is_alive()
        other = ship(tmp_path / "other", GPU, [FIRST]).parent
        shutil.copytree(
            other, tmp_path, dirs_exist_ok=True, ignore=lambda *_: ["nvidia-h200.lease"]
        )
    late.join(10.0)
    assert not late.is_alive()
    problems = {record.problem for record in shipped(tmp_path, GPU)}
    assert problems == {FIRST.problem, SECOND.problem}


def test_evidence_of_a_pick_that_was_measured_again_is_kept(tmp_path: Path) -> None:
    proofs = tmp_path / "records.jsonl"
    ship(tmp_path, GPU, [FIRST, SECOND], proofs)
    before = proofs.read_text()
    again = replace(FIRST, environment=replace(FIRST.environment, driver="999.0"))
    ship(tmp_path, GPU, [again], proofs)
    text = proofs.read_text()
    assert text.startswith(before)
    assert len(evidence(proofs)) == 3
    assert {record.problem for record in shipped(tmp_path, GPU)} == {FIRST.problem, SECOND.problem}


def test_a_file_locked_for_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locking, "LOCK_TIMEOUT_SECONDS", 0.05)
    held = Lease(tmp_path / "nvidia-h200.lease").wait()
    with held, pytest.raises(StoreError, match=r"another process holds .*nvidia-h200\.lease"):
        ship(tmp_path, GPU, [FIRST])
    assert not (tmp_path / "nvidia-h200.jsonl").exists()


@pytest.mark.parametrize(("ending", "unpack"), [("gz", gzip.decompress), ("xz", lzma.decompress)])
def test_packed_evidence_holds_the_same_lines_and_names_its_damage(
    tmp_path: Path, ending: str, unpack: Callable[[bytes], bytes]
) -> None:
    packed, plain = tmp_path / f"packed.jsonl.{ending}", tmp_path / "plain.jsonl"
    for path in (packed, plain):
        ship(tmp_path, GPU, [FIRST], path)
    assert evidence(packed) == evidence(plain) != {}
    assert unpack(packed.read_bytes()) == plain.read_bytes()
    before = packed.read_bytes()
    ship(tmp_path, GPU, [], packed)
    assert packed.read_bytes() == before  # not even a date in it changes
    packed.write_bytes(before[:-20])
    with pytest.raises(RecordError, match=rf"packed.jsonl.{ending} is damaged"):
        evidence(packed)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
