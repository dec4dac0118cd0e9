"""A kernel family is one folder in Python, one among the headers and a line in KERNELS: a toy is no more than that.

Everything is asked of the package as it is: nothing in it is edited or patched but for the registration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import A100, H100, RTX4090, Policy
from attention_autotuner.cli import main
from attention_autotuner.codegen.artifact import Artifact, BuildTarget, artifact_digest
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import include_closure, render
from attention_autotuner.codegen.source_digest import source_digest
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.outcome import BuildFailed, Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import configs, cost_model, legality
from attention_autotuner.kernels.registry import KERNELS, kernel_of
from attention_autotuner.serving.loader import load
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.record_schema import TuningRecord, space_digest
from attention_autotuner.tuning.why import explain
from tests.candidates import candidates_of_every_service
from tests.record_entries import entry
from tests.toy_family.naive_sm80.knobs import NaiveKnobs
from tests.toy_family.naive_sm80.rules import NAIVE_PREDICATES
from tests.toy_family.placing import TOY, toy_family

pytestmark = pytest.mark.build

PROBLEM = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=256, seqlen_k=512, dim_qk=56, dim_v=40)
COMMAND = ["--batch", "2", "--heads", "4", "--heads-kv", "2", "--seqlen", "256"]
COMMAND += ["--seqlen-k", "512", "--dim-qk", "56", "--dim-v", "40", "--json"]
CANDIDATE = Candidate.of(PROBLEM, NaiveKnobs(warps=4, exponential="approximate"))
TOO_MANY_WARPS = replace(CANDIDATE, knobs=NaiveKnobs(warps=9))
TOO_WIDE = replace(CANDIDATE, padded_dim_qk=80)
POLICIES: tuple[Policy, ...] = (A100(), RTX4090(), H100())
TARGET = BuildTarget(arch="80")
SHIPPED = 183  # picks at least


@dataclass(frozen=True)
class Present:
    """The identities that records and the store hold kernels to.

    Attributes:
        kernels: of candidates of all kernels but the toy, by name: the kernel, its knob schema and both digests.
        verified: what ``records verify --shipped`` says, its status first.
    """

    kernels: dict[str, tuple[str, ...]]
    verified: tuple[int, dict[str, Any]]


def present() -> Present:
    """All that, as it is now."""
    toolchain = find_toolchain()
    kernels: dict[str, tuple[str, ...]] = {}
    for selected in candidates_of_every_service():
        if selected.kernel == TOY.name:
            continue
        kernel = render(selected)
        digests = (source_digest(kernel), artifact_digest(kernel, TARGET, toolchain))
        kernels[selected.name] = (
            selected.kernel,
            configs.schema_of.__wrapped__(type(selected.knobs)),
            *digests,
        )
    with redirect_stdout(StringIO()) as out:
        status = main(["records", "verify", "--shipped", "--json"])
    return Present(kernels=kernels, verified=(status, json.loads(out.getvalue())))


@pytest.fixture(scope="module")
def before() -> Present:
    """The kernels and records without the toy."""
    assert TOY.name not in KERNELS
    return present()


@pytest.fixture(scope="module")
def toy(before: Present, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The toy in its place."""
    with toy_family(tmp_path_factory.mktemp("toy")) as sources:
        yield sources


@pytest.fixture(scope="module")
def built(toy: Path, new_store: Callable[[Path], Store]) -> list[Artifact | Outcome]:
    """The toy, and two that its rules refuse, compiled."""
    kernels = [render(selected) for selected in (CANDIDATE, TOO_MANY_WARPS, TOO_WIDE)]
    return build(kernels, TARGET, toolchain=find_toolchain(), store=new_store(toy.parent / "store"))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_policies_offer_it_beside_the_others(toy: Path, policy: Policy) -> None:
    offered = policy.candidates(PROBLEM)
    mine = [
        selected
        for selected in offered
        if isinstance(selected, Candidate) and selected.kernel == TOY.name
    ]
    assert CANDIDATE in mine
    assert len(mine) == 4
    refused = [selected for selected in offered if isinstance(selected, Rejection)]
    violations = [selected for selected in refused if selected.config["kernel"] == TOY.name]
    assert [selected.predicate for selected in violations] == ["naive_warps_range"] * 2
    offered_wide = policy.candidates(replace(PROBLEM, dim_qk=128))
    assert not [
        selected
        for selected in offered_wide
        if isinstance(selected, Candidate) and selected.kernel == TOY.name
    ]
    assert kernel_of(policy.default(PROBLEM)) is not TOY


def test_its_rules_are_asked_and_named(toy: Path) -> None:
    assert legality.check(CANDIDATE, A100().spec) is None
    refusals = [legality.check_kernel(selected) for selected in (TOO_MANY_WARPS, TOO_WIDE)]
    assert [selected and selected.predicate for selected in refusals] == list(NAIVE_PREDICATES)
    assert refusals[0] is not None
    assert refusals[0].reason == "warps must be in 1..8, got 9"


def test_it_renders_through_the_one_template(toy: Path) -> None:
    text = render(CANDIDATE).text
    assert f"#include <attention_autotuner/{TOY.name}/entry.cuh>" in text
    assert "kExponential = attention_autotuner::Exponential::kApproximate;" in text
    assert "ATTENTION_AUTOTUNER_EXPORT_ENTRY(attention_autotuner::NaiveEntry<Config>)" in text
    folders = {path.split("/")[1] for path in include_closure(text)}
    assert not folders & set(KERNELS) - {TOY.name}


def test_it_builds_and_says_what_it_is(built: list[Artifact | Outcome]) -> None:
    artifact = built[0]
    assert isinstance(artifact, Artifact), artifact
    assert not artifact.report.spill_store_bytes
    info = load(artifact).info
    assert info.name == CANDIDATE.name
    assert (info.padded_dim_qk, info.padded_dim_v) == (
        CANDIDATE.padded_dim_qk,
        CANDIDATE.padded_dim_v,
    )
    assert (info.block_m, info.block_n, info.num_threads) == (4, 32, CANDIDATE.knobs.num_threads)
    (needs,) = (selected.needs for selected in TOY.passes(CANDIDATE))
    assert info.dynamic_smem_bytes == needs.smem_bytes == 0
    refined = cost_model.refine(PROBLEM, CANDIDATE, A100().spec, artifact.report)
    assert refined.us > 0


def test_every_rule_has_its_static_assert(built: list[Artifact | Outcome]) -> None:
    for rule, failed in zip(NAIVE_PREDICATES, built[1:], strict=True):
        assert isinstance(failed, BuildFailed), failed
        assert f'static assertion failed with "{rule}"' in Path(failed.log).read_text()


def test_it_is_ranked_and_explained(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = A100()
    ranked = cost_model.rank(PROBLEM, policy.legal(PROBLEM), policy.spec)
    place = [selected for selected, _ in ranked].index(CANDIDATE) + 1
    assert len({selected.kernel for selected, _ in ranked}) == 2
    (row,) = (row for row in explain(PROBLEM, policy) if row.name == CANDIDATE.name)
    assert (row.fate, row.rank) == ("untried", place)
    said = answer(capsys, "why", "--device-type", "A100", *COMMAND)
    (printed,) = (
        selected for selected in said["explanations"] if selected["name"] == CANDIDATE.name
    )
    assert printed == asdict(row)
    assert f"ranked {place} by the cost model" in row.reason


def test_the_command_lists_it(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(capsys, "candidates", "--device-type", "A100", *COMMAND)
    (listed,) = (selected for selected in said["candidates"] if selected["name"] == CANDIDATE.name)
    assert listed["family"] == "sm80"
    assert listed["smem_bytes"] == 0
    assert configs.candidate_from_config(listed["config"]) == CANDIDATE
    refused = [
        selected for selected in said["rejections"] if selected["config"]["kernel"] == TOY.name
    ]
    assert [selected["reason"] for selected in refused] == ["warps must be in 1..8, got 16"] * 2
    assert main(["candidates", "--device-type", "A100", "--limit", "9999", *COMMAND[:-1]]) == 0
    table = capsys.readouterr().out
    assert "naive_warps_range" in table
    assert "approximate" in table


def test_its_records_are_read_back(toy: Path) -> None:
    default = A100().default(PROBLEM)
    record = TuningRecord(
        problem=PROBLEM.bucketed(),
        measured_problem=PROBLEM,
        purpose="forward",
        arch="A100",
        space_digest=space_digest([CANDIDATE, default]),
        pick=CANDIDATE.name,
        default=default.name,
        confirmed=True,
        entries=(entry(CANDIDATE, 100.0), entry(default, 110.0)),
        environment=Environment(),
    )
    written = json.loads(json.dumps(record.to_json()))
    assert TuningRecord.from_json(written) == record
    assert record.entries[0].knob_schema == configs.knob_schema(TOY.name)
    assert configs.encode(CANDIDATE.knobs) == {"kernel": TOY.name, "knobs": asdict(CANDIDATE.knobs)}


def test_no_other_kernel_is_disturbed(toy: Path, before: Present) -> None:
    assert {kernel for kernel, *_ in before.kernels.values()} == set(KERNELS) - {TOY.name}
    assert present() == before
    status, said = before.verified
    assert said["total"] >= SHIPPED
    assert status == (0 if said["valid"] == said["total"] else 1)
