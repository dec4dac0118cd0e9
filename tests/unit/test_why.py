from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import A100, H100, resolve
from attention_autotuner.cli import main
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.cost_model import rank
from attention_autotuner.serving.dispatch import lookup
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.record_schema import (
    TuningRecord,
    space_digest,
)
from attention_autotuner.tuning.why import ORDER, Explanation, explain
from tests.candidates import forward
from tests.record_entries import entry

PROBLEM = Problem(batch=2, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_k=1024, dim_qk=256)
POLICY = A100()
RANKED = [candidate for candidate, _ in rank(PROBLEM, POLICY.legal(PROBLEM), POLICY.spec)]
DEFAULT = POLICY.default(PROBLEM)
WINNER, LOSER, FAILED = [candidate for candidate in RANKED if candidate != DEFAULT][:3]


def record(pick: Candidate, *, confirmed: bool = True) -> TuningRecord:
    return TuningRecord(
        problem=PROBLEM.bucketed(),
        measured_problem=PROBLEM,
        purpose=PROBLEM.direction,
        arch=POLICY.name,
        space_digest=space_digest(RANKED),
        pick=pick.name,
        default=DEFAULT.name,
        confirmed=confirmed,
        entries=(
            entry(WINNER, 100.0),
            entry(DEFAULT, 104.0),
            entry(LOSER, 125.0),
            entry(FAILED, None, BuildFailed(reason="ptxas said no", log="/tmp/log")),
        ),
        environment=Environment(),
    )


def by_name(rows: list[Explanation]) -> dict[str, Explanation]:
    return {row.name: row for row in rows if row.name}


def test_every_point_of_the_space_is_explained_once() -> None:
    rows = explain(PROBLEM, POLICY, record(WINNER))
    assert len(rows) == len(POLICY.candidates(PROBLEM))
    assert len(by_name(rows)) == len(RANKED)
    order = [ORDER.index(row.fate) for row in rows]
    assert order == sorted(order)
    assert all(row.reason for row in rows)
    json.dumps([asdict(row) for row in rows], allow_nan=False)


def test_each_fate_names_its_reason() -> None:
    rows = by_name(explain(PROBLEM, POLICY, record(WINNER)))
    assert rows[WINNER.name].fate == "kept"
    assert "median 100.0 us of 30 rounds" in rows[WINNER.name].reason
    assert "confirmed by a second process" in rows[WINNER.name].reason
    assert rows[DEFAULT.name].fate == "lost"
    assert rows[DEFAULT.name].reason.startswith("4.0 % slower than the best")
    assert rows[LOSER.name].ratio_to_best == 1.25
    assert rows[FAILED.name].fate == "failed"
    assert rows[FAILED.name].reason == "build_failed: ptxas said no (log: /tmp/log)"
    untried = rows[RANKED[-1].name]
    assert untried.fate == "untried"
    assert f"ranked {len(RANKED)} by the cost model" in untried.reason
    assert f"limited by {untried.limiter}" in untried.reason


def test_rejections_name_their_predicate() -> None:
    rejected = [row for row in explain(PROBLEM, POLICY) if row.fate == "rejected"]
    assert rejected
    assert any("smem" in row.reason for row in rejected)
    assert all(row.config and row.estimate_us is None for row in rejected)


def test_a_kept_default_and_an_unconfirmed_pick_say_so() -> None:
    kept = by_name(explain(PROBLEM, POLICY, record(DEFAULT)))[DEFAULT.name]
    assert kept.fate == "kept"
    assert "nothing beat it by 1 %" in kept.reason
    doubtful = by_name(explain(PROBLEM, POLICY, record(WINNER, confirmed=False)))[WINNER.name]
    assert "not confirmed" in doubtful.reason


def test_without_a_record_the_default_serves_and_the_rest_is_untried() -> None:
    rows = by_name(explain(PROBLEM, POLICY))
    assert rows[DEFAULT.name].fate == "kept"
    assert "nothing measured yet" in rows[DEFAULT.name].reason
    assert {row.fate for name, row in rows.items() if name != DEFAULT.name} == {"untried"}


def test_a_default_of_rounded_lengths_that_is_not_offered_at_others_is_kept() -> None:
    problem = Problem(
        batch=16, heads_q=20, heads_kv=5, seqlen_q=63, seqlen_k=63, dim_qk=32, dim_v=32
    )
    policy = H100()
    rows = explain(problem, policy)
    (kept,) = (row for row in rows if row.fate == "kept")
    assert kept.name == policy.default(problem.rounded()).name


@pytest.mark.parametrize(("name", "queries", "dim"), [("A100", 1, 64), ("H200", 1, 128)])
def test_commands_know_the_default_that_a_call_takes(
    capsys: pytest.CaptureFixture[str], name: str, queries: int, dim: int
) -> None:
    policy = resolve(name)
    problem = Problem(
        batch=1, heads_q=32, heads_kv=8, seqlen_q=queries, seqlen_k=8192, dim_qk=dim, dim_v=dim
    )
    with settings.override(mode="off"):
        served = lookup(problem, policy).candidate
    assert served != policy.default(problem)  # of these lengths, which few queries share
    assert served in policy.served(problem)
    flags = [f"--seqlen={queries}", "--seqlen-k=8192", f"--dim-qk={dim}", "--batch=1"]
    flags += ["--heads=32", "--heads-kv=8", f"--device-type={name}", "--json"]
    assert main(["tune", *flags, "--effort", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["default"] == served.name
    assert main(["render", *flags, "--candidate", served.name]) == 0


def test_measured_candidates_that_are_no_longer_offered_are_shown() -> None:
    stranger = forward(WINNER, num_stages=4)
    assert stranger not in RANKED
    known = record(WINNER)
    with_stranger = TuningRecord(
        **{
            **{name: getattr(known, name) for name in known.__dataclass_fields__},
            "entries": (*known.entries, entry(stranger, 140.0)),
        }
    )
    row = by_name(explain(PROBLEM, POLICY, with_stranger))[stranger.name]
    assert row.fate == "lost"
    assert row.rank is None


@pytest.mark.parametrize("policy", [A100(), H100()])
def test_the_model_ranks_from_one_without_gaps(policy: A100 | H100) -> None:
    ranks = sorted(row.rank for row in explain(PROBLEM, policy) if row.rank is not None)
    assert ranks == list(range(1, len(policy.legal(PROBLEM)) + 1))
