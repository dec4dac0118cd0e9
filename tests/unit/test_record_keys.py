"""The key of a record, retention's with mask and form, and what its entries are held to: one kernel."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.identity import values_of
from attention_autotuner.core.outcome import Ok
from attention_autotuner.core.problem import Form, Problem
from attention_autotuner.kernels.configs import knob_schema
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.lookup import Hit, Query, distance
from attention_autotuner.tuning.record_schema import SCHEMA, TuningRecord
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipping import shipped
from attention_autotuner.tuning.step import problems_of_step
from attention_autotuner.tuning.validity import Miss, PresentKernels
from tests.old_configs import before_kernels_had_names

RETNET = Problem(op="retnet", mask="explicit", causal=True)
RETENTION = Problem(op="retention", causal=True)


def test_the_schemas_of_kernels_are_those_of_the_picks_that_are_shipped() -> None:
    answer = {
        (entry.candidate.kernel, entry.knob_schema)
        for record in shipped(Path(str(files("attention_autotuner.tuned"))), "NVIDIA H200")
        for entry in record.entries
    }
    assert answer >= {
        ("attention_forward_sm90", knob_schema("attention_forward_sm90")),
        ("attention_backward_sm90", knob_schema("attention_backward_sm90")),
        ("scores_backward_sm90", knob_schema("scores_backward_sm90")),
    }
    assert knob_schema("scores_forward_sm80") == "0f1763f73559a52e"
    assert knob_schema("attention_forward_sm90") == "5d00798018f453a6"
    assert knob_schema("attention_backward_sm90") == "f6d3cbf9b4b52c65"
    assert knob_schema("scores_backward_sm80") == "cb0dee26737c064a"


def test_schemas_of_kernels_differ() -> None:
    assert len({knob_schema(name) for name in KERNELS}) == len(KERNELS) == 10


def test_an_entry_from_before_masks_is_attentions() -> None:
    candidate = resolve("A100").default(Problem())
    said = TuningRecord.from_json(old_form(candidate)).picked
    assert (said.candidate, said.kernel_digest) == (candidate, "exact")


def old_form(candidate: Candidate, op: str = "attention") -> dict[str, Any]:
    """A record of schema 2, as it was written before masks."""
    problem = {"op": op, "direction": candidate.direction, "causal": op == "retention"}
    config = before_kernels_had_names(candidate.config)
    del config["mask"]
    timing = {
        "candidate_name": candidate.name, "median_us": 9.0, "spread_us": 0.1, "samples": 3,
        "ratio_to_best": 1.0, "environment": "e",
    }  # fmt: skip
    entry = {
        "candidate": config, "kernel_digest": "exact", "outcome": Ok().to_json(), "measurement": timing,
        "estimate_us": 8.0,
    }  # fmt: skip
    return {
        "schema": 2, "problem": problem, "measured_problem": problem, "purpose": candidate.direction, "arch": "A100",
        "space_schema": "of the whole operation", "space_digest": "s", "pick": candidate.name,
        "default": candidate.name, "confirmed": True, "environment": {}, "environments": {}, "entries": [entry],
    }  # fmt: skip


def test_a_record_of_the_second_schema_serves_while_its_bytes_are_the_same(tmp_path: Path) -> None:
    store, problem = RecordStore(tmp_path), Problem()
    path = store.path(problem.bucketed(), "A100", "gpu")
    path.parent.mkdir(parents=True)
    candidate = resolve("A100").default(problem)
    old = old_form(candidate) | {"environment": {"gpu_name": "gpu", "num_sms": 108}}
    old |= {"problem": values_of(problem.bucketed()), "measured_problem": values_of(problem)}
    gone = {"op": "retnet", "direction": "forward", "family": "sm90", "knobs": {"num_stages": 2}}
    old["entries"].append({**old["entries"][0], "candidate": gone})
    path.write_text(json.dumps(old))
    gpu = Environment(gpu_name="gpu", num_sms=108)

    def ask(exact: str) -> Hit | Miss:
        kernels = PresentKernels(source=lambda _: "now", exact=lambda _: exact)
        return store.find(Query(problem=problem, arch="A100", environment=gpu, kernels=kernels))

    served = ask("exact")
    assert isinstance(served, Hit)
    assert (served.candidate, served.median_us) == (candidate, 9.0)
    assert ask("edited") == Miss(field="kernel_digest", expected="edited", recorded="exact")
    assert json.loads(path.read_text()) == old
    record = served.record
    store.put(
        replace(record, entries=(replace(record.picked, source_digest="now", kernel_digest=None),))
    )
    assert isinstance(ask("edited"), Hit)
    assert json.loads(path.read_text())["schema"] == SCHEMA


@pytest.mark.parametrize("form", ["parallel", "chunkwise", "recurrent"])
def test_old_configs_of_retention_are_read_as_the_kernel_they_were_of(form: Form) -> None:
    problem = replace(RETENTION, form=form)
    candidate = resolve("A100").default(problem)
    said = TuningRecord.from_json(old_form(candidate, "retention")).picked
    assert said.candidate == candidate
    assert said.candidate.form == form


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (RETNET, replace(RETNET, mask="decay")),
        (RETENTION, replace(RETENTION, form="chunkwise")),
        (replace(RETENTION, form="recurrent"), replace(RETENTION, form="chunkwise")),
    ],
)
def test_masks_and_forms_have_records_of_their_own(first: Problem, second: Problem) -> None:
    store = RecordStore(Path("/records"))
    assert store.path(first, "H100", "gpu") != store.path(second, "H100", "gpu")
    assert distance(first, second) is None
    assert distance(first, first) == 0.0


def test_a_step_of_a_form_has_a_backward_without_one() -> None:
    forward, backward = problems_of_step(replace(RETENTION, form="parallel"))
    assert (forward.form, backward.form) == ("parallel", "auto")
