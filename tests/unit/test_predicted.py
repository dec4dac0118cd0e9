"""The layer of predictions: what it serves, what it refuses, and who is asked before it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import A100, H100, RTX4090, Policy, from_properties
from attention_autotuner.arch.a100 import A100_SPEC
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.cli import main
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.source_digest import source_digest
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import RecordError
from attention_autotuner.kernels.configs import knob_schema
from attention_autotuner.kernels.cost_model import rank
from attention_autotuner.kernels.scores_forward_sm80 import space
from attention_autotuner.serving import picks
from attention_autotuner.serving.picks import Layers
from attention_autotuner.tuning import why
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.lookup import Miss
from attention_autotuner.tuning.predicted import (
    COLUMNS,
    SCHEMA,
    PredictedHit,
    PredictedPicks,
    spec_digest,
)
from attention_autotuner.tuning.record_schema import (
    TuningRecord,
    space_digest,
)
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipped import ShippedRecords
from attention_autotuner.tuning.shipping import write_shipped
from tests.candidates import forward
from tests.devices import RTX3090
from tests.measured import entry

POLICY = A100()
PROBLEM = Problem(batch=8, heads_q=16, heads_kv=16, seqlen_q=2048, seqlen_k=2048)
SMALL = replace(PROBLEM, seqlen_q=1000, seqlen_k=1000)
OWN = forward(block_n=32, num_stages=2)  # not A100's default
CLASS = {
    "op": "attention", "direction": "forward", "mask": "none", "form": "auto", "causal": False,
    "dim_qk": 128, "dim_v": 128,
}  # fmt: skip
GPU = Environment(gpu_name="NVIDIA A100-SXM4-80GB", num_sms=108, time_utc="2030-01-01T00:00:00Z")


def document(*rows: list[Any], **changes: Any) -> dict[str, Any]:
    group = {
        "class": CLASS,
        "kernels": [OWN.config],
        "picks": list(rows) or [[8, 16, 16, 2048, 0, 90.0, 100.0, 95.0]],
    }
    spec = {"name": POLICY.spec.name, "num_sms": 108, "digest": spec_digest(POLICY)}
    group["knob_schemas"] = [knob_schema(OWN.kernel)] * len(changes.get("kernels", [OWN]))
    group |= {key: changes.pop(key) for key in tuple(changes) if key in group}
    return {
        "schema": SCHEMA,
        "policy": POLICY.name,
        "spec": spec,
        "columns": list(COLUMNS),
        "groups": [group],
    } | changes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "predicted").mkdir()
    return tmp_path / "predicted"


def write(folder: Path, content: dict[str, Any] | str) -> PredictedPicks:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "a100.json").write_text(text, encoding="utf-8")
    return PredictedPicks(folder)


def hit(found: PredictedHit | Miss) -> PredictedHit:
    assert isinstance(found, PredictedHit), found
    return found


def missed(found: PredictedHit | Miss) -> Miss:
    assert isinstance(found, Miss), found
    return found


# --- what serves ----------------------------------------------------------------------------------


def test_the_very_bucket_is_exact_and_keeps_what_the_model_said(folder: Path) -> None:
    found = hit(write(folder, document()).find(replace(PROBLEM, seqlen_q=2000), POLICY))
    assert (found.candidate, found.exact, found.unverified) == (OWN, True, ())
    assert (found.layer, found.estimate_us, found.median_us) == ("predicted", 90.0, None)
    assert (found.pick.default_us, found.pick.runner_up_us) == (100.0, 95.0)


def test_bf16_takes_the_choices_of_fp16(folder: Path) -> None:
    found = hit(write(folder, document()).find(replace(PROBLEM, dtype="bf16"), POLICY))
    assert found.candidate == replace(OWN, dtype="bf16")


def test_the_nearest_shape_serves_if_the_model_still_prefers_its_choice(folder: Path) -> None:
    near, far = [4, 16, 16, 4096, 0, 50.0, 60.0, None], [4, 16, 16, 8192, 1, 90.0, 99.0, None]
    asked = replace(PROBLEM, batch=5, seqlen_q=4000, seqlen_k=4000)
    ranked = [one for one, _ in rank(asked, POLICY.legal(asked), POLICY.spec)]
    better, worse = ranked[0], ranked[-1]
    assert POLICY.default(asked) not in (better, worse)
    for kernels, served in (
        ((better, worse), better),
        ((worse, better), POLICY.default(asked)),
    ):
        content = document(near, far, kernels=[one.config for one in kernels])
        found = hit(write(folder, content).find(asked, POLICY))
        assert found.pick.problem.seqlen_q == 4096
        assert (found.candidate, found.exact) == (served, False)
        assert found.is_default == (served == POLICY.default(asked))


def test_where_the_model_is_not_trusted_the_default_of_the_very_problem_serves(
    folder: Path,
) -> None:
    layer = write(folder, document([8, 16, 16, 2048, None, 100.0, 100.0, None]))
    for problem in (PROBLEM, replace(SMALL, dtype="bf16")):
        found = hit(layer.find(problem, POLICY))
        assert (found.candidate, found.pick.candidate) == (POLICY.default(problem), None)


def test_another_spec_of_the_policy_is_served_with_a_mark_unless_versions_are_strict(
    folder: Path,
) -> None:
    layer = write(folder, document())
    other = A100(replace(A100_SPEC, hbm_bytes_per_second=1.5e12))
    assert hit(layer.find(PROBLEM, other)).unverified == ("spec",)
    assert missed(layer.find(PROBLEM, other, strict=True)).field == "spec"
    assert hit(layer.find(PROBLEM, POLICY, strict=True)).unverified == ()


# --- what does not --------------------------------------------------------------------------------


def test_nothing_is_predicted_for_a_gpu_that_nobody_described(folder: Path) -> None:
    unknown = from_properties(RTX3090)
    found = missed(write(folder, document()).find(PROBLEM, unknown))
    assert (found.field, found.expected) == ("policy", "RTX3090")


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True},
        {"dim_qk": 64, "dim_v": 64},
        {"alignment_bytes": 2},
        {"direction": "backward"},
        {"seqlen_q": 16, "seqlen_k": 16},
    ],
)
def test_another_class_or_a_shape_too_far_away_has_none(
    folder: Path, changes: dict[str, Any]
) -> None:
    found = missed(write(folder, document()).find(replace(PROBLEM, **changes), POLICY))
    assert (found.field, found.found) == ("problem", "no prediction")


def test_a_partition_of_the_gpu_has_none(folder: Path) -> None:
    part = A100(replace(A100_SPEC, num_sms=56))
    found = missed(write(folder, document()).find(PROBLEM, part))
    assert (found.field, found.expected, found.found) == ("num_sms", "56", "108")


def test_choices_of_another_knob_space_are_refused(folder: Path) -> None:
    found = missed(write(folder, document(knob_schemas=["old"])).find(PROBLEM, POLICY))
    assert (found.field, found.found) == ("knob_schema", "old")


def test_a_candidate_that_is_not_legal_gives_way_to_the_next_nearest(folder: Path) -> None:
    wide = forward(block_m=256, warps_m=8, block_n=128, num_stages=3)
    rows = [8, 16, 16, 2048, 0, 90.0, 100.0, None], [8, 16, 16, 4096, None, 9.0, 9.0, None]
    content = document(rows[0], kernels=[wide.config])
    refused = missed(write(folder, content).find(PROBLEM, POLICY))
    assert refused.field == "candidate"
    assert refused.found.startswith(f"{wide.name}: ")
    content = document(*rows, kernels=[wide.config])
    found = hit(write(folder, content).find(PROBLEM, POLICY))
    assert (found.candidate, found.exact) == (POLICY.default(PROBLEM), False)


def test_a_family_that_the_policy_does_not_offer_is_refused(folder: Path) -> None:
    class Bare(A100):
        families = ()

    found = missed(write(folder, document()).find(PROBLEM, Bare()))
    assert (found.field, found.found) == ("candidate", f"{OWN.name}: its family is not run")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        document(schema=SCHEMA + 1),
        document(policy="H100"),
        document(columns=["batch"]),
        document(groups=[{}]),
        document(spec={}),
        document(picks=[[8, 16, 16, 2048, 3, 90.0, 100.0, None]]),
        document(picks=[[8, 16, 16, 2000, 0, 90.0, 100.0, None]]),
        document(picks=[[8, 16, 16, 2048, 0]]),
        document(picks=[[8, 16, 16, 2048, 0, "soon", 100.0, None]]),
        document(kernels=[OWN.config | {"dtype": "bf16"}]),
        document(kernels=[OWN.config | {"colour": 1}]),
        document(kernels=[forward(padded_dim_qk=64, padded_dim_v=64, k_slice=64).config]),
    ],
)
def test_a_damaged_file_is_a_typed_error_that_names_it(
    folder: Path, content: dict[str, Any] | str
) -> None:
    with pytest.raises(RecordError, match=r"predicted picks .*a100\.json are damaged"):
        write(folder, content).find(PROBLEM, POLICY)


def test_a_file_is_read_once(folder: Path) -> None:
    layer = write(folder, document())
    hit(layer.find(PROBLEM, POLICY))
    (folder / "a100.json").unlink()
    hit(layer.find(PROBLEM, POLICY))
    assert [pick.candidate for pick in layer.picks("A100")] == [OWN]
    assert layer.picks("H100") == ()


# --- who is asked before it -----------------------------------------------------------------------


def record(pick: Candidate) -> TuningRecord:
    digest = source_digest(render(pick))
    row = entry(pick, 99.0, environment=GPU.digest, source_digest=digest)
    return TuningRecord(
        problem=PROBLEM.bucketed(),
        measured_problem=PROBLEM,
        purpose="forward",
        arch="A100",
        space_digest=space_digest([pick]),
        pick=pick.name,
        default=pick.name,
        confirmed=True,
        entries=(row,),
        environment=GPU,
    )


@pytest.fixture
def machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> tuple[RecordStore, Path]:
    """A machine with a prediction and nothing else: its records, and the folder of shipped ones."""
    write(folder, document())
    monkeypatch.setattr(picks, "ShippedRecords", lambda: ShippedRecords(tmp_path / "tuned"))
    monkeypatch.setattr(picks, "PredictedPicks", lambda: PredictedPicks(folder))
    monkeypatch.setattr("attention_autotuner.cli.inspecting.collect", lambda: GPU)
    (tmp_path / "tuned").mkdir()
    return RecordStore(tmp_path / "cache" / "records"), tmp_path / "tuned"


def said(capsys: pytest.CaptureFixture[str], tmp_path: Path, *more: str) -> dict[str, Any]:
    arguments = ["--device-type", "A100", "--batch", "8", "--seqlen", "2048", *more]
    with settings.override(cache_dir=tmp_path / "cache", mode="cached"):
        assert main(["why", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def kept(answer: dict[str, Any]) -> list[str]:
    return [row["name"] for row in answer["explanations"] if row["verdict"] == "kept"]


def test_why_says_who_answers_and_why_nobody_before_did(
    machine: tuple[RecordStore, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    records, tuned = machine
    answer = said(capsys, tmp_path)
    assert (answer["layer"], answer["exact"], kept(answer)) == ("predicted", True, [OWN.name])
    assert answer["source"] == "predicted for A100 by the cost model, never measured"
    assert [each["layer"] for each in answer["passed"]] == ["record", "shipped"]
    assert all("no " in each["reason"] for each in answer["passed"])
    assert answer["predicted"] == {
        "by": "model", "estimate_us": 90.0, "default_us": 100.0, "runner_up_us": 95.0,
    }  # fmt: skip
    (row,) = (row for row in answer["explanations"] if row["verdict"] == "kept")
    assert row["reason"].startswith("predicted, nothing measured yet: by the cost model 11 % ")

    measured = forward(block_n=64, num_stages=2)
    write_shipped(tuned, "NVIDIA A100-SXM4-80GB", [record(measured)])
    answer = said(capsys, tmp_path)
    assert (answer["layer"], kept(answer)) == ("shipped", [measured.name])
    assert [each["layer"] for each in answer["passed"]] == ["record"]
    assert answer["predicted"] is None

    mine = forward(block_n=64, num_stages=1)
    records.put(record(mine))
    answer = said(capsys, tmp_path)
    assert (answer["layer"], answer["passed"], kept(answer)) == ("record", [], [mine.name])

    with settings.override(mode="off", cache_dir=tmp_path / "cache"):
        assert main(["why", "--device-type", "A100", "--batch", "8", "--seqlen", "2048"]) == 0
    assert "default of A100: mode is off" in capsys.readouterr().out


def test_why_for_people_names_the_layers_in_turn(
    machine: tuple[RecordStore, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with settings.override(cache_dir=tmp_path / "cache", mode="cached"):
        assert main(["why", "--device-type", "A100", "--seqlen", "512", "--dim-qk", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "default of A100"
    assert [line.partition(":")[0] for line in lines[1:4]] == [
        "not by record",
        "not by shipped",
        "not by predicted",
    ]


def test_damaged_predictions_leave_the_default_and_a_warning(
    machine: tuple[RecordStore, Path],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    (folder / "a100.json").write_text("{", encoding="utf-8")
    with settings.override(cache_dir=tmp_path / "cache", mode="cached") as current:
        pick, found = Layers(current).choose(PROBLEM, POLICY, GPU)
    assert (pick.layer, pick.candidate, found) == ("default", POLICY.default(PROBLEM), None)
    assert "a100.json are damaged" in pick.passed[-1].reason
    (warning,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert warning.getMessage().startswith("no prediction is served: the predicted picks")


def test_a_default_that_the_model_may_not_replace_is_explained(folder: Path) -> None:
    layer = write(folder, document([8, 16, 16, 2048, None, 100.0, 100.0, None]))
    rows = why.explain(PROBLEM, POLICY, predicted=hit(layer.find(PROBLEM, POLICY)))
    assert rows[0].name == POLICY.default(PROBLEM).name
    assert rows[0].reason.startswith("the policy's default: the cost model knows of no gain")


def test_a_prediction_that_is_not_offered_any_more_is_shown_as_what_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = A100()
    fewer = replace(space.ForwardSpace(), block_n=(64,))
    monkeypatch.setitem(space.SPACES, policy.spec.name, fewer)
    found = hit(write(folder, document()).find(PROBLEM, policy))
    assert found.candidate == OWN
    assert OWN not in policy.legal(PROBLEM)
    (kept,) = (row for row in why.explain(PROBLEM, policy, None, found) if row.verdict == "kept")
    assert kept.name == OWN.name
    assert kept.rank is None
    assert kept.reason.startswith("predicted, nothing measured yet")


# --- the files of the package ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", [A100(), RTX4090(), H100(), H100(H200_SPEC)], ids=repr)
def test_the_package_predicts_for_gpus_that_it_describes(policy: Policy) -> None:
    found = hit(PredictedPicks().find(PROBLEM, policy))
    assert found.exact
    assert found.unverified == (("spec",) if policy.spec is H200_SPEC else ())
