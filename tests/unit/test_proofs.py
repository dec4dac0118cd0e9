"""Proofs: what verification has shown, in records, shipped lines, bundles and answers, and records without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import settings
from attention_autotuner.arch import H100
from attention_autotuner.cli import main, proving
from attention_autotuner.codegen.bundle import Bundle, BundledPick
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.source_digest import source_digest
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Ok, Outcome, Proof, Wrong, outcome_from_json
from attention_autotuner.core.problem import Problem
from attention_autotuner.serving import loader
from attention_autotuner.serving.exports import choose_picks
from attention_autotuner.serving.picks import CacheHierarchy
from attention_autotuner.tuning import tune
from attention_autotuner.tuning.bundled import bundled_pick
from attention_autotuner.tuning.lookup import Hit, Query
from attention_autotuner.tuning.record_schema import CandidateEntry, TuningRecord, space_digest
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipped import read_shipped
from attention_autotuner.tuning.shipping import ship, shipped
from attention_autotuner.tuning.validity import Miss
from attention_autotuner.tuning.verify import verifier_digest
from tests.fake_pipeline import GPU, FakePipeline
from tests.launchers import verify
from tests.record_entries import PROOF, PROVEN, entry

PROBLEM = Problem(batch=2, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_k=1024)
POLICY = H100()
DEFAULT = POLICY.default(PROBLEM)
PICK = next(candidate for candidate in POLICY.legal(PROBLEM) if candidate != DEFAULT)
HERE = replace(GPU, compute_capability="9.0")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    """The user's records, in a cache of their own."""
    with settings.override(cache_dir=tmp_path / "cache"):
        yield RecordStore(tmp_path / "cache" / "records")


def timed(candidate: Candidate, us: float, proof: Proof | None, source: str = "") -> CandidateEntry:
    digest = source or source_digest(render(candidate))
    outcome = Ok(proof=proof)
    return entry(candidate, us, outcome, environment=HERE.digest, source_digest=digest)


def record(
    proof: Proof | None = None, *, problem: Problem = PROBLEM, source: str = ""
) -> TuningRecord:
    return TuningRecord(
        problem=problem.bucketed(),
        measured_problem=problem,
        purpose="forward",
        arch="H100",
        space_digest=space_digest([PICK]),
        pick=PICK.name,
        default=DEFAULT.name,
        confirmed=True,
        entries=(timed(PICK, 100.0, proof, source), timed(DEFAULT, 110.0, proof)),
        environment=HERE,
        environments={HERE.digest: HERE},
    )


# --- from the verifier to records -------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_verification_says_what_it_has_shown(fake_kernel: Callable[..., Path]) -> None:
    problem = Problem(batch=1, heads_q=2, heads_kv=1, seqlen_q=33, seqlen_k=45, dim_qk=16, dim_v=24)
    kernel = loader.load(fake_kernel("-DBLOCK_M=16", "-DBLOCK_N=16"))
    outcome = verify(problem, kernel, deterministic=True, device=torch.device("cpu"))
    assert isinstance(outcome, Ok)
    proof = outcome.proof
    assert proof is not None
    assert (proof.gpu_name, proof.repeats, proof.same_bits) == ("cpu", 2, True)
    assert proof.checks[0] == f"{problem.describe()}, seed 0"
    assert proof.checks[1].endswith(", with scores that grow along the keys, seed 1")
    assert len(proof.checks) == len(set(proof.checks)) >= 4
    assert set(proof.ratios) == {"o", "lse"}
    assert 0.0 < proof.largest <= 1.0
    assert proof.verifier == verifier_digest("attention") != verifier_digest("retention")
    crossed = outcome_from_json(json.loads(json.dumps(outcome.to_json())))
    assert isinstance(crossed, Ok)
    assert crossed.proof == proof
    assert crossed == Ok()


def test_a_search_keeps_the_proofs_of_what_it_timed(store: RecordStore) -> None:
    pipeline = FakePipeline()
    result = tune(PROBLEM, POLICY, records=store, pipeline=pipeline, top_k=3)
    assert result.record is not None
    assert [item.proof for item in result.record.entries] == [PROOF] * 4
    again = tune(PROBLEM, POLICY, records=store, pipeline=pipeline, top_k=3)
    assert again.status == "recorded"
    said = again.to_json()["candidates"][0]
    assert said["outcome"]["proof"]["ratios"] == {"o": 0.31, "lse": 0.02}
    assert said["tied"]
    assert said["ratio_low"] <= 1.0 <= said["ratio_high"]
    assert again.record is not None
    assert set(again.record.ties) == {item.candidate.name for item in again.record.entries}


def test_lines_of_one_kernel_share_a_proof(tmp_path: Path) -> None:
    problems = (PROBLEM, replace(PROBLEM, causal=True), replace(PROBLEM, batch=4))
    records = [record(PROOF, problem=problem) for problem in problems[:2]]
    path = ship(tmp_path, "NVIDIA H200", [*records, record(problem=problems[2])])
    header, *lines = map(json.loads, path.read_text().splitlines())
    (name,) = header["proofs"]
    assert sorted(str(line["pick"].get("proof")) for line in lines) == ["None", name, name]
    hit = {item.problem: item.picked.proof for item in shipped(tmp_path, "NVIDIA H200")}
    expected = (PROOF, PROOF, None)
    assert hit == {p.bucketed(): proof for p, proof in zip(problems, expected, strict=True)}
    path.write_text(path.read_text().replace(name, "nothing", 1))
    with pytest.raises(Exception, match="damaged"):
        read_shipped(path)


def test_a_damaged_proof_is_a_damaged_record(store: RecordStore) -> None:
    store.put(record(PROOF))
    (path,) = store.root.glob("*/*/*.json")
    document = json.loads(path.read_text())
    document["entries"][0]["outcome"]["proof"]["ratios"] = 3
    path.write_text(json.dumps(document))
    assert isinstance(store.find(query()), Miss)
    assert not path.exists()


# --- what is served -------------------------------------------------------------------------------


def query(*, proven: bool = False) -> Query:
    return Query(problem=PROBLEM, arch="H100", environment=HERE, proven=proven)


def test_where_proofs_are_required_a_pick_without_one_is_a_miss(store: RecordStore) -> None:
    store.put(record())
    hit = store.find(query())
    assert isinstance(hit, Hit)
    assert hit.proof is None
    missed = store.find(query(proven=True))
    assert isinstance(missed, Miss)
    assert missed.field == "proof"
    assert "records prove" in missed.describe()
    for strict, layer in ((False, "record"), (True, "default")):
        with settings.override(strict_proof=strict) as in_force:
            pick, _ = CacheHierarchy(in_force).choose(PROBLEM.bucketed(), POLICY, HERE)
        assert pick.layer == layer
    store.put(record(PROOF))
    by_default = CacheHierarchy(settings.current())
    pick, chosen = by_default.choose(PROBLEM.bucketed(), POLICY, HERE)
    assert pick.layer == "record"
    assert chosen is not None
    assert chosen.proof == PROOF
    (bundled, _) = choose_picks([PROBLEM], POLICY, by_default, HERE)
    assert bundled.proof == PROOF
    assert bundled.to_json(0)["proof"]["checks"] == PROOF.checks


def test_where_proofs_are_required_a_search_measures_again(store: RecordStore) -> None:
    pipeline = FakePipeline(verify_outcome=lambda name: Ok())
    for strict, expected in ((False, "measured"), (False, "recorded"), (True, "measured")):
        with settings.override(strict_proof=strict):
            result = tune(PROBLEM, POLICY, records=store, pipeline=pipeline, top_k=1)
        assert result.status == expected


def test_where_proofs_are_required_a_bundle_lends_no_pick_without_one() -> None:
    picks = [
        BundledPick(problem=PROBLEM.bucketed(), candidate=candidate, layer=layer, proof=proof)
        for candidate, layer, proof in ((PICK, "record", None), (DEFAULT, "default", None))
    ]
    bundle = Bundle(root=Path(), arch="H100", package_version="1", kernels=(), picks=tuple(picks))
    assert bundled_pick(bundle, PROBLEM) == picks[0]
    assert bundled_pick(bundle, PROBLEM, proven=True) == picks[1]
    proven = replace(picks[0], proof=PROOF)
    assert bundled_pick(replace(bundle, picks=(proven,)), PROBLEM, proven=True) == proven


def test_why_and_show_say_which_proof_there_is(store: RecordStore, capsys: Capture) -> None:
    asked = ["--device-type", "H100", "--batch", "2", "--heads", "8", "--seqlen", "1024"]
    for proof, strict, words in (
        (None, True, "not by record: recorded with proof none, now required"),
        (None, False, "proof: none"),
        (PROOF, True, "proof: 2 checks of 2 launches on NVIDIA"),
    ):
        store.put(record(proof))
        with settings.override(strict_proof=strict):
            assert main(["why", *asked, "--limit", "2"]) == 0
        assert words in capsys.readouterr().out
    assert main(["why", *asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["proof"]["ratios"] == {"o": 0.31, "lse": 0.02}
    assert said["explanations"][0]["proof"] == said["proof"]
    assert main(["records", "show", "*"]) == 0
    assert "0.31 of 2" in capsys.readouterr().out


# --- proofs for what was recorded before ----------------------------------------------------------


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    """The machine of ``records prove``, on which the default is wrong."""

    def outcome(name: str) -> Outcome:
        return Wrong(reason="o: too large") if name == DEFAULT.name else PROVEN

    made = FakePipeline(environment=HERE, verify_outcome=outcome)
    monkeypatch.setattr(proving, "local_pipeline", lambda: made)
    return made


def prove(capsys: Capture, *arguments: str, status: int) -> Any:
    assert main(["records", "prove", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_each_kernel_is_verified_once_for_all_its_records(
    store: RecordStore, pipeline: FakePipeline, capsys: Capture
) -> None:
    for problem in (PROBLEM, replace(PROBLEM, batch=4)):
        store.put(record(problem=problem))
    store.put(record(problem=replace(PROBLEM, causal=True), source="of another day"))
    said = prove(capsys, status=1)
    assert said["states"] == {"proven": 2, "failed": 3, "changed": 1}
    assert said["written"] == 2
    assert sorted(pipeline.verified) == sorted([PICK.name, DEFAULT.name])
    assert said["kernels"][DEFAULT.name]["reason"] == "o: too large"
    hit = {item.problem.causal: item.picked.proof for _, item in store.records()}
    assert hit == {False: PROOF, True: None}
    pipeline.verify_outcome = lambda name: PROVEN
    pipeline.verified.clear()
    assert prove(capsys, "*d128", status=0)["states"] == {"kept": 2, "proven": 2}
    assert pipeline.verified == [DEFAULT.name]
    assert prove(capsys, "*d128", "--again", status=0)["states"] == {"proven": 4}


def test_a_file_of_picks_gets_proofs_and_keeps_the_rest(
    store: RecordStore, pipeline: FakePipeline, tmp_path: Path, capsys: Capture
) -> None:
    path = ship(tmp_path, "NVIDIA H200", [record()])
    (before,) = read_shipped(path).lines
    assert prove(capsys, "--file", str(path), status=1)["written"] == 1
    (after,) = read_shipped(path).lines
    assert after["pick"].pop("proof")["verifier"] == PROOF.verifier
    assert after == before


def test_nothing_is_proven_on_another_gpu_or_without_one(
    store: RecordStore, pipeline: FakePipeline, capsys: Capture
) -> None:
    store.put(record())
    pipeline.environment = replace(HERE, compute_capability="8.0")
    said = prove(capsys, status=0)
    assert (said["states"], said["kernels"]) == ({"elsewhere": 2}, {})
    assert "NVIDIA H100" in said["entries"][0]["reason"]
    pipeline.gpu = False
    assert main(["records", "prove"]) == 1
    assert "proofs need a GPU" in capsys.readouterr().err
