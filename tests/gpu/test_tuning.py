"""Tuning and the next call: the call runs the measured pick, and nothing is measured twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_autotuner import flash_attn_func, settings, tune
from attention_autotuner.arch import detect
from attention_autotuner.cli import main
from attention_autotuner.core.outcome import Ok
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnknownCandidateError
from attention_autotuner.reference import Bands, attention, attention_low, check
from attention_autotuner.serving import dispatch, picks
from attention_autotuner.tuning.progress import Event
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipped import ShippedRecords

pytestmark = [pytest.mark.gpu, pytest.mark.tune]

PROBLEM = Problem(
    batch=2, heads_q=8, heads_kv=4, seqlen_q=1000, seqlen_k=1000, dim_qk=64, dim_v=64, causal=True
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Serve only the picks that these tests tune."""
    monkeypatch.setattr(picks, "ShippedRecords", lambda: ShippedRecords(tmp_path / "tuned"))
    with settings.override(cache_dir=tmp_path, mode="cached", effort="quick", budget_seconds=100.0):
        yield


def test_the_next_dispatch_serves_the_tuned_pick() -> None:
    policy = detect()
    before = dispatch.lookup(PROBLEM, policy)
    assert before.layer == "default"
    assert "no record" in before.reason

    result = tune(PROBLEM, top_k=1, confirm=False)
    assert result.status == "measured"
    assert all(row.timing is not None and row.timing.samples >= 2 for row in result.rows)
    stored = RecordStore(settings.current().cache_dir / "records").records()
    assert [record.pick for _, record in stored] == [result.pick.name]

    after = dispatch.lookup(PROBLEM, policy)
    assert (after.layer, after.candidate, after.exact) == ("record", result.pick, True)
    near = dispatch.lookup(replace(PROBLEM, seqlen_q=2000, seqlen_k=2000), policy)
    assert (near.layer, near.candidate, near.exact) == ("record", result.pick, False)

    q, k, v = (
        torch.randn(2, heads, 1000, 64, dtype=torch.float16, device="cuda") for heads in (8, 4, 4)
    )
    o = flash_attn_func(q, k, v, causal=True)
    ref, low = attention(q, k, v, causal=True)[0], attention_low(q, k, v, causal=True)[0]
    bands = Bands.of(replace(PROBLEM, seqlen_q=1000, seqlen_k=1000), "o", o.dim())
    assert check(o, ref, low, bands).reason == ""
    kernel = dispatch.kernel_for(PROBLEM, policy, device=0, must_be_warm=True)
    assert kernel.info.name == result.pick.name

    for config in (result.default.name, result.pick.config):
        pinned = flash_attn_func(q, k, v, causal=True, config=config)
        assert check(pinned, ref, low, bands).reason == ""
    with pytest.raises(UnknownCandidateError, match="near it"):
        flash_attn_func(q, k, v, causal=True, config=f"{result.pick.name}0")

    phases: list[Event] = []
    again = tune(PROBLEM, top_k=1, confirm=False, listener=phases.append)
    assert (again.status, again.pick) == ("recorded", result.pick)
    assert {event.phase for event in phases} == {"rank"}


def test_what_is_tuned_has_a_proof_and_what_has_none_gets_one() -> None:
    result = tune(PROBLEM, top_k=1, confirm=False)
    assert result.record is not None
    proof = result.record.picked.proof
    assert proof is not None
    assert proof.gpu_name == torch.cuda.get_device_name()
    assert set(proof.ratios) == {"o", "lse"}
    assert proof.largest <= 1.0
    assert any("with scores that grow" in done for done in proof.checks)
    store = RecordStore(settings.current().cache_dir / "records")
    bare = [replace(entry, outcome=Ok()) for entry in result.record.entries]
    store.put(replace(result.record, entries=tuple(bare)))
    assert main(["records", "prove", "--all"]) == 0
    ((_, record),) = store.records()
    assert all(entry.proof is not None for entry in record.entries if entry.measurement)
    with settings.override(strict_proof=True):
        assert dispatch.lookup(PROBLEM, detect()).layer == "record"
