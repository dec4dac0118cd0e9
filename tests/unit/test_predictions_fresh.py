"""The predicted picks of the package are those that would be made now, and the rule behind them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import A100, H100
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed
from attention_autotuner.core.problem import DType, Problem
from attention_autotuner.kernels import legality
from attention_autotuner.kernels.cost_model import refine
from attention_autotuner.tuning.predicted import DTYPES, PredictedHit, PredictedPicks
from benchmarks import evidence, predict, prediction, prediction_report
from benchmarks.evidence import LOGS, MARGIN, SAMPLES, SEARCHES, Trial, verdict
from benchmarks.prediction import (
    KERNELS,
    NEAR,
    Contest,
    Family,
    defaults_only,
    families,
    twin,
    verdict_of,
)

RUN = f"run `{predict.COMMAND}`"
POLICIES = sorted(prediction.POLICIES)


@pytest.fixture(scope="module")
def trials() -> tuple[Trial, ...]:
    return evidence.all_trials()


# --- the files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_the_files_are_as_they_would_be_made_now(name: str, trials: Sequence[Trial]) -> None:
    found = predict.stale(prediction.POLICIES[name](), trials)
    assert not found, f"{RUN}: " + "; ".join(found)


def test_the_page_has_the_figures_of_the_committed_results(trials: Sequence[Trial]) -> None:
    text = predict.PAGE.read_text(encoding="utf-8")
    assert prediction_report.page(text, trials) == text, RUN


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POLICIES)
def test_every_common_problem_has_a_prediction_that_is_legal(name: str, dtype: DType) -> None:
    policy, layer = prediction.POLICIES[name](), PredictedPicks()
    served: dict[Candidate, None] = {}
    for family in families():
        for shape in family.shapes:
            problem = replace(shape, dtype=dtype)
            found = layer.find(problem, policy)
            assert isinstance(found, PredictedHit), f"{problem.describe()}: {found}"
            assert (found.exact, found.unverified) == (True, ())
            assert found.candidate == Candidate.of(problem, found.candidate.knobs)
            served.setdefault(found.candidate)
            pick = found.pick
            if pick.candidate is None:
                assert pick.estimate_us == pick.default_us
            else:
                assert pick.default_us >= pick.estimate_us * (1 + MARGIN) * 0.99  # as rounded
    assert all(legality.check(one, policy.spec) is None for one in served)


@pytest.mark.parametrize("name", POLICIES)
def test_what_the_model_may_not_replace_it_did_not(name: str, trials: Sequence[Trial]) -> None:
    document = json.loads((predict.FOLDER / f"{name.lower()}.json").read_text(encoding="utf-8"))
    for group in document["groups"]:
        op, direction = group["class"]["op"], group["class"]["direction"]
        found = verdict_of(prediction.POLICIES[name](), op, direction, trials)
        assert group["trusted"] == found.trusted
        if not found.trusted:
            assert not group["kernels"]
            assert all(row[document["columns"].index("kernel")] is None for row in group["picks"])


# --- who may choose -------------------------------------------------------------------------------


def test_the_rule_does_not_lose_to_the_defaults_where_it_is_trusted(
    trials: Sequence[Trial],
) -> None:
    for name in POLICIES:
        for op, direction in prediction_report.KINDS:
            found = verdict_of(prediction.POLICIES[name](), op, direction, trials)
            if found.trusted:
                assert found.served < found.default


def trial(gain: float, own: float, default: float, **changes: object) -> Trial:
    values: dict[str, object] = {
        "source": LOGS,
        "policy": "A100",
        "problem": Problem(),
        "predicted_gain": gain,
        "own": own,
        "default": default,
    }
    return Trial(**values | changes)  # type: ignore[arg-type]  # as named


def test_a_default_stays_below_the_margin() -> None:
    assert trial(1 + MARGIN, 1.0, 1.2).served == 1.0
    assert trial(1 + MARGIN - 0.001, 1.0, 1.2).served == 1.2


def test_own_trials_must_show_a_gain_and_borrowed_ones_no_loss() -> None:
    slight = [trial(1.2, 1.0, 1.005)]
    assert not verdict(slight, "A100", "attention", "forward").trusted
    borrowed = verdict(slight, "H100", "attention", "forward")
    assert (borrowed.trusted, borrowed.borrowed) == (True, True)
    assert not verdict([trial(1.2, 1.0, 1.0)], "H100", "attention", "forward").trusted
    assert verdict([trial(1.2, 1.0, 1.02)], "A100", "attention", "forward").trusted
    none = verdict(slight, "A100", "attention", "backward")
    assert (none.trials, none.trusted) == ((), False)


def test_exhaustive_measurements_count_before_records() -> None:
    full, kept = trial(1.2, 1.1, 1.0, source=SAMPLES), trial(1.2, 1.0, 1.3, source=SEARCHES)
    assert verdict([kept, full], "A100", "attention", "forward").trials == (full,)
    assert verdict([kept], "A100", "attention", "forward").trusted


def test_a_choice_that_a_record_does_not_hold_never_counts_as_a_gain(
    trials: Sequence[Trial],
) -> None:
    searched = [t for t in trials if t.source == SEARCHES]
    assert len(searched) >= 40
    assert all(t.own >= 1.0 and t.default >= 1.0 for t in searched)
    assert any(t.own == t.default > 1.0 for t in searched)


def test_kept_searches_outlive_the_records_that_shipped(tmp_path: Path) -> None:
    path, records = tmp_path / "searches.json", tmp_path / "records.jsonl"
    lines = evidence.RECORDS.read_text(encoding="utf-8").splitlines()
    shipped: list[dict[str, Any]] = list(map(json.loads, lines))
    plain = [r for r in shipped if len(r["entries"]) > 1 and not r["problem"]["deterministic"]]
    strict = [r for r in shipped if r["problem"]["deterministic"]][:1]

    def kept(*documents: dict[str, Any]) -> list[dict[str, Any]]:
        records.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
        evidence.keep(records, path)
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["searches"]
        return found

    assert len(kept(plain[0], *strict)) == 1
    assert len(kept(plain[1])) == 2
    text = path.read_text(encoding="utf-8")
    kept(plain[1], {**plain[2], "entries": [{"candidate": {}}]})  # the latter cannot be read
    assert path.read_text(encoding="utf-8") == text
    later = json.loads(json.dumps(plain[1]))
    for entry in later["entries"]:
        entry["measurement"]["ratio_to_best"] = 1.5
    again = kept(later)
    assert len(again) == 2
    (row,) = (row for row in again if row["problem"] == plain[1]["problem"])
    assert set(row["ratios"].values()) == {1.5}
    assert row["default"] == plain[1]["default"]


def test_trials_of_another_family_do_not_count() -> None:
    other = [trial(1.2, 1.0, 1.1, family="sm90")]
    assert verdict(other, "A100", "attention", "forward").trials == ()
    assert verdict([trial(1.2, 1.0, 1.1)], "A100", "attention", "forward").trusted


# --- how kernels are chosen -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Report:
    name: str = ""
    registers: int = 128
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    static_smem_bytes: int = 0
    loop_spills: bool | None = False
    kernels: tuple[Report, ...] = ()


POLICY = A100()
FAMILY = next(f for f in families() if f.name == "retnet forward decay 64/64")


def contest(family: Family = FAMILY) -> Contest:
    return Contest(family=family, policy=POLICY)


def test_a_contest_builds_few_kernels_and_keeps_the_best_of_them() -> None:
    one = contest()
    wanted = one.wanted()
    assert 2 <= len(wanted) <= KERNELS + 1  # and the default
    assert len(set(wanted)) == len({twin(c) for c in wanted}) == len(wanted)
    for _ in range(6):
        for each in one.wanted():
            one.learn(each, Report())
    assert one.wanted() == []
    for choice in one.choices():
        place = FAMILY.shapes.index(choice.problem)
        cover = [c for c in one.times if twin(c) in one.built]
        assert choice.estimate_us <= choice.default_us
        if choice.candidate is not None:
            assert choice.candidate in cover
            assert choice.default_us >= (1 + MARGIN) * choice.estimate_us
            assert choice.estimate_us == pytest.approx(
                refine(choice.problem, choice.candidate, POLICY.spec, Report()).us
            )
            best = min(times[place] for times in one.times.values())
            assert choice.estimate_us <= 1.25 * best


def test_what_spills_or_does_not_build_falls_out_and_others_are_tried() -> None:
    one = contest()
    first = one.wanted()
    defaults = {twin(default) for default in one.defaults}
    bad = [each for each in first if each not in defaults]
    one.learn(bad[0], Report(spill_store_bytes=64, loop_spills=True))
    for each in bad[1:]:
        one.learn(each, BuildFailed(reason="ptxas said no"))
    assert set(one.spilled) == set(bad)
    again = one.wanted()
    assert again
    assert not set(again) & set(bad)
    for each in first:
        if each in defaults:
            one.learn(each, Report())
    assert all(choice.candidate is None for choice in one.choices())  # nothing else is built


def test_the_order_of_ctas_needs_no_build_of_its_own() -> None:
    one = contest()
    pairs = [c for c in one.times if twin(c) != c]
    assert pairs
    assert all(twin(twin(c)) == twin(c) for c in pairs)
    wide = H100().default(Problem(op="retnet", direction="backward", mask="explicit", causal=True))
    assert (wide.family, wide.config["knobs"]["cta_order"]) == ("sm90", "longest_first")
    assert twin(wide).config["knobs"] == wide.config["knobs"] | {"cta_order": "raster"}


def test_defaults_alone_have_the_models_times() -> None:
    for choice in defaults_only(FAMILY, POLICY):
        assert choice.candidate is None
        assert choice.runner_up_us is None
        assert 0 < choice.estimate_us == choice.default_us


def test_shapes_are_buckets_and_kernels_cover_within_a_few_percent() -> None:
    assert 1.0 < NEAR < 1 + MARGIN
    found = families()
    assert len({family.name for family in found}) == len(found)
    for family in found:
        assert all(shape == shape.bucketed() for shape in family.shapes)
        assert len(set(family.shapes)) == len(family.shapes)


# --- the command ----------------------------------------------------------------------------------


def test_a_changed_model_space_or_spec_is_stale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trials: Sequence[Trial]
) -> None:
    monkeypatch.setattr(predict, "families", lambda: [FAMILY])
    document = json.loads((predict.FOLDER / "a100.json").read_text(encoding="utf-8"))
    document["groups"] = [g for g in document["groups"] if g["class"]["mask"] == "decay"]
    document["groups"] = [
        g
        for g in document["groups"]
        if (g["class"]["direction"], g["class"]["dim_qk"]) == ("forward", 64)
    ]
    path = tmp_path / "a100.json"
    path.write_text(predict.dumps(document), encoding="utf-8")
    assert predict.stale(POLICY, trials, tmp_path) == []
    other = A100(replace(POLICY.spec, smem_bytes_per_clk_per_sm=100.0))
    assert len(predict.stale(other, trials, tmp_path)) == 2
    for change, said in (
        ({"fingerprint": "0"}, "the space"),
        ({"trusted": False}, "measurements now say trusted=True"),
        ({"class": {**document["groups"][0]["class"], "dim_v": 72}}, "missing"),
    ):
        changed = {**document, "groups": [document["groups"][0] | change]}
        path.write_text(predict.dumps(changed), encoding="utf-8")
        assert said in predict.stale(POLICY, trials, tmp_path)[0]


def test_a_file_survives_its_own_layout() -> None:
    text = (predict.FOLDER / "a100.json").read_text(encoding="utf-8")
    assert predict.dumps(json.loads(text)) == text
    assert len(PredictedPicks().picks("A100")) == sum(len(f.shapes) for f in families())


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="the page must have"):
        prediction_report.page("no marks", [])
