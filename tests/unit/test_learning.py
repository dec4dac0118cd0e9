"""Learning from the committed searches: better than it alone on problems left out, in plain JSON."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import arch, settings
from attention_autotuner.arch import RTX4090
from attention_autotuner.arch.measured_specs import read
from attention_autotuner.arch.resolution import policy_with
from attention_autotuner.cli import main
from attention_autotuner.codegen.files import read_text
from attention_autotuner.core.memo import TABLES
from attention_autotuner.errors import MissingPackageError, RecordError
from attention_autotuner.kernels.residual import LARGEST, Residual, scope_of
from attention_autotuner.tuning import learning
from attention_autotuner.tuning.model_card import Card, Search, cards
from attention_autotuner.tuning.ranking import LEARNED_DOUBT, learned, order, ranked, user_path
from attention_autotuner.tuning.shipping import evidence

RESULTS = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200"
FILES = sorted(RESULTS.glob("*.jsonl.xz"))


@pytest.fixture(scope="module")
def measured() -> list[Search]:
    policy = policy_with(read(Path(arch.__file__).with_name("measured") / "nvidia-h200.json"))
    records = [record for path in FILES for record in evidence(path).values()]
    return [Search.of(record, policy) for record in records]


@pytest.fixture(scope="module")
def analytic(measured: list[Search]) -> Card:
    """The card of the model alone."""
    return cards(measured)[0]


@pytest.fixture(scope="module")
def few(measured: list[Search]) -> list[Search]:
    """Some attention problems: enough to learn from in a second."""
    return [s for s in measured if s.problem.op == "attention" and s.problem.dim_qk == 64]


@pytest.fixture
def cache(tmp_path: Path) -> Any:
    with settings.override(cache_dir=tmp_path):
        yield tmp_path


def constant(search: Search, **fields: Any) -> Residual:
    """A residual that makes one block of keys slower than all others."""
    scopes = tuple({scope_of(search.problem, candidate) for candidate in search.estimates})
    tree = (0, 100.0, 0.0, 0.5)
    values: dict[str, Any] = {"names": ("knobs.block_n",), "trees": (tree,), "base": 0.0}
    return Residual(**{"arch": "H100", "scopes": scopes, "origin": {}, **values, **fields})


def test_the_analytic_model_keeps_its_bars_on_all_that_was_measured(analytic: Card) -> None:
    card = analytic
    assert card.problems >= 100
    assert card.rms <= 0.15
    assert card.regret[1] <= 1.05
    assert card.regret[5] <= 1.015
    assert card.regret[10] <= 1.007
    # Causal problems of 512 tokens at d128, in both dtypes: their default is what their searches chose.
    assert card.behind <= 2
    assert card.correlation > 0.7
    losses = " | ".join(f"{card.regret[n] - 1:.2%}" for n in (1, 5))
    page = (RESULTS.parents[2] / "docs" / "cli.md").read_text("utf-8")
    assert f"| {card.problems} | {losses} | " in " ".join(page.split())


def test_the_bars_hold_on_exhaustive_searches_with_what_the_others_taught(
    measured: list[Search],
) -> None:
    pytest.importorskip("sklearn")
    policy = measured[0].policy
    records = evidence(RESULTS / "searches.jsonl.xz").values()
    exhaustive = [Search.of(record, policy) for record in records]
    groups = {search.group for search in exhaustive}
    residual = learning.fit([s for s in measured if s.group not in groups])
    card = cards(exhaustive, [residual] * len(exhaustive))[0]
    assert card.problems >= 10
    assert card.rms <= 0.15
    assert card.regret[1] <= 1.05
    assert card.regret[5] <= 1.015
    assert card.regret[10] <= 1.007
    assert card.behind == 0


def test_what_is_learned_does_better_on_problems_left_out(
    few: list[Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(learning, "FOLDS", 4)
    (analytic, *_), (after, *_) = learning.compared(few)
    assert learning.helps(analytic, after)
    assert after.rms < 0.9 * analytic.rms
    assert after.regret[1] < analytic.regret[1]
    assert after.worst < 1.1


def test_a_residual_that_does_worse_is_not_kept(analytic: Card) -> None:
    card = replace(analytic, first=1.0)
    assert learning.helps(card, card)
    for worse in (
        replace(card, rms=card.rms + 0.01),
        replace(card, first=1.001),
        replace(card, regret={**card.regret, 5: card.regret[5] + 0.001}),
    ):
        assert not learning.helps(card, worse)


def test_the_shipped_residual_is_of_the_committed_searches(
    measured: list[Search], analytic: Card
) -> None:
    residual = learned(measured[0].policy)
    assert residual is not None
    assert residual.origin["gpu_names"] == ["NVIDIA H200"]
    assert residual.origin["problems"] == len(measured)
    after = cards(measured, [residual] * len(measured))[0]
    assert after.rms < 0.75 * analytic.rms
    held_out = residual.origin["learned"]
    assert held_out["rms"] <= 0.15
    for picks, bar in (("1", 1.05), ("5", 1.015), ("10", 1.007)):
        assert held_out["regret"][picks] <= bar


def test_trees_are_the_same_each_time_and_read_back(few: list[Search]) -> None:
    pytest.importorskip("sklearn")
    residual = learning.fit(few)
    assert Residual.from_json(json.loads(json.dumps(residual.to_json()))) == residual
    assert residual == learning.fit(few)
    errors = [cards(few, [residual] * len(few))[0].rms for residual in (None, residual)]
    assert errors[1] < 0.9 * errors[0]


def test_a_correction_is_bounded_and_of_known_kernels_alone(measured: list[Search]) -> None:
    search = measured[0]
    candidate, estimate = next(iter(search.estimates.items()))
    for base, factor in ((0.1, 1.1052), (9.0, 2.0138), (-9.0, 0.4966)):
        residual = constant(search, base=base, trees=())
        assert residual.correction(search.problem, candidate, estimate) == pytest.approx(
            factor, abs=1e-4
        )
    assert LARGEST == 0.7
    assert constant(search, base=1.0, scopes=()).correction(
        search.problem, candidate, estimate
    ) == pytest.approx(1.0)


def test_the_order_is_corrected_and_estimates_are_not(measured: list[Search]) -> None:
    search = next(
        s
        for s in measured
        if s.problem.op == "attention"
        and s.problem.dim_qk == 128
        and s.problem.direction == "forward"
        and s.problem.seqlen_q == 16384
    )
    pairs = list(search.estimates.items())
    plain = order(search.problem, search.policy, pairs, None)
    slower = order(search.problem, search.policy, pairs, constant(search))
    assert sorted(pairs, key=str) == sorted(slower, key=str)
    assert [c.knobs.block_n for c, _ in plain] != [c.knobs.block_n for c, _ in slower]
    assert slower[0][0].knobs.block_n <= 100


def test_the_default_comes_first_unless_another_is_clearly_faster(measured: list[Search]) -> None:
    search = measured[0]
    default = search.policy.default(search.problem)
    other = next(candidate for candidate in search.estimates if candidate != default)
    estimate = search.estimates[other]
    for gain, first in ((0.9 * LEARNED_DOUBT, default), (1.1 * LEARNED_DOUBT, other)):
        pairs = [(other, estimate), (default, replace(estimate, us=(1 + gain) * estimate.us))]
        assert (
            order(search.problem, search.policy, pairs, constant(search, trees=()))[0][0] == first
        )
        assert order(search.problem, search.policy, pairs, None)[0][0] == default


def test_the_users_own_residual_comes_before_the_shipped_one(
    measured: list[Search], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search = measured[0]
    policy, mine = search.policy, constant(search)
    path = user_path(policy.name)
    path.parent.mkdir()
    path.write_text(json.dumps(mine.to_json()))
    assert learned(policy) == mine
    assert learned(RTX4090()) is None
    assert {c for c, _ in ranked(search.problem, policy)} == set(policy.legal(search.problem))
    damaged: list[Any] = ["", "{}", json.dumps(mine.to_json() | {"arch": "A100"})]
    damaged += [json.dumps(mine.to_json() | {"trees": t}) for t in ([[9, 1.0, 0.0, 0.0]], [[0]], 7)]
    for text in damaged:
        path.write_text(text)
        caplog.clear()
        TABLES["models.learned"].clear()
        assert learned(policy) is None
        assert "is not used" in caplog.text


def test_learning_wants_enough_of_one_architecture(
    measured: list[Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(RecordError, match="got 0 times of no architecture"):
        learning.fit([])
    mixed = [measured[0], replace(measured[1], policy=RTX4090())]
    with pytest.raises(RecordError, match="got 0 times of H100, RTX4090"):
        learning.fit(mixed)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(MissingPackageError, match=r"attention-autotuner\[tune\]"):
        learning.fit(measured)


def test_the_commands_print_cards_and_write_what_helps(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(learning, "FOLDS", 2)
    lines = read_text(RESULTS / "records.jsonl.xz").splitlines()
    path = str(cache / "searches.jsonl")
    Path(path).write_text(
        "\n".join(line for line in lines if re.search(r'"direction": ?"forward"', line))
    )
    assert main(["model", "fit", path, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kept"]
    assert Path(said["path"]) == user_path("H100")
    assert Residual.from_json(json.loads(user_path("H100").read_text())).arch == "H100"
    assert set(said["learned"]) == set(Card.__dataclass_fields__)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    assert main(["report", "--model-card", path]) == 0
    printed = capsys.readouterr().out
    assert "attention-autotuner[tune]" in printed
    assert "H100 retnet forward" in printed
    for words, reason in (
        (["model", "fit"], "there are no searches"),
        (["model", "fit", "nowhere.gz"], "there is no file nowhere.gz"),
    ):
        assert main(words) == 1
        assert reason in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report"])
