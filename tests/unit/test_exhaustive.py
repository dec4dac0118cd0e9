from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core.outcome import Ok, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.kernels.cost_model import rank
from attention_autotuner.tuning.model_card import times_of
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipping import evidence
from attention_autotuner.tuning.shortlist import shortlist
from benchmarks import exhaustive, fit_constants
from benchmarks.exhaustive import (
    FIRST,
    SAMPLE,
    measured,
    sample,
    sample_of,
    stratified,
    stratum_of,
    write,
)
from benchmarks.exhaustive import PROBLEMS as PROBLEMS_MEASURED
from tests.fake_benchmark import POLICY as BENCHED
from tests.fake_benchmark import SHORT, WIDE, FakePipeline

POLICY = H100()
SM80 = POLICY.on((8, 0))
PROBLEMS = [
    Problem(seqlen_q=n, seqlen_k=n, causal=causal) for n, causal in ((1024, False), (8192, True))
]
RANKED = [rank(problem, POLICY.legal(problem), POLICY.spec) for problem in PROBLEMS]
DEFAULTS = [POLICY.default(problem) for problem in PROBLEMS]


def test_the_sample_is_reproducible_and_spread_and_holds_the_models_first() -> None:
    chosen = sample(RANKED[0], DEFAULTS[0])
    assert len(chosen) == len(set(chosen)) == SAMPLE
    assert chosen == sample(RANKED[0], DEFAULTS[0])
    assert chosen != sample(RANKED[0], DEFAULTS[0], seed=1)
    assert DEFAULTS[0] in chosen
    assert {candidate for candidate, _ in RANKED[0][:FIRST]} <= set(chosen)
    assert {candidate for candidate, _ in shortlist(RANKED[0], DEFAULTS[0], FIRST)} <= set(chosen)
    for knob in ("block_m", "block_n", "num_threads", "num_stages", "mainloop", "schedule"):
        offered = {getattr(candidate.knobs, knob, None) for candidate, _ in RANKED[0]}
        assert {getattr(candidate.knobs, knob, None) for candidate in chosen} == offered


def test_problems_of_one_class_share_most_of_their_builds() -> None:
    first, second = (
        set(sample(ranked, default)) for ranked, default in zip(RANKED, DEFAULTS, strict=True)
    )
    assert len(first & second) >= SAMPLE - 3 * FIRST


def test_a_small_space_is_measured_whole() -> None:
    few = RANKED[0][:30]
    assert set(sample(few, few[0][0])) == {candidate for candidate, _ in few}
    with pytest.raises(ValueError, match="size must be at least"):
        sample(RANKED[0], DEFAULTS[0], size=5)


def test_stratified_order_is_a_permutation() -> None:
    candidates = [candidate for candidate, _ in RANKED[0]]
    order = list(stratified(candidates, seed=0))
    assert sorted(candidate.name for candidate in order) == sorted(
        candidate.name for candidate in candidates
    )


def test_a_sample_of_backward_candidates_is_spread_over_plans_and_tiles() -> None:
    problem = replace(PROBLEMS[0], direction="backward")
    ranked = rank(problem, SM80.legal(problem), SM80.spec)
    chosen = sample(ranked, SM80.default(problem), size=48)
    assert len(chosen) == len(set(chosen)) == 48
    offered = {candidate.knobs.plan for candidate, _ in ranked}
    assert {candidate.knobs.plan for candidate in chosen} == offered
    assert len({stratum_of(candidate) for candidate in chosen}) > 20
    candidate = next(candidate for candidate in chosen if candidate.knobs.keys is not None)
    assert candidate.knobs.keys is not None
    order = (
        replace(candidate.knobs, cta_order="longest_first"),
        replace(candidate.knobs, cta_order="raster"),
    )
    assert len({stratum_of(replace(candidate, knobs=knobs)) for knobs in order}) == 1
    wider = replace(candidate.knobs, keys=replace(candidate.knobs.keys, num_stages=9))
    assert stratum_of(replace(candidate, knobs=wider)) != stratum_of(candidate)


def test_searches_are_written_class_by_class_and_read_back(tmp_path: Path) -> None:
    problems = (SHORT, WIDE, replace(SHORT, causal=True))
    samples = {problem: sample_of(problem, BENCHED, 21, 0) for problem in problems}
    failing = replace(
        SHORT, dim_qk=32, dim_v=32
    )  # nothing of its class is right: the others are measured
    samples[failing] = sample_of(failing, BENCHED, 21, 0)
    pipeline = FakePipeline(
        time_us=lambda problem, name: 100.0 + len(name),
        check=lambda name: Wrong(reason="off") if "d32x32" in name else Ok(),
    )
    records = RecordStore(tmp_path / "records")
    collected = []
    lines: list[str] = []
    for searched in measured(samples, BENCHED, pipeline, records, 0.1, lines.append):
        collected += searched
        write(tmp_path / "searches.jsonl.xz", collected)
        kept = list(evidence(tmp_path / "searches.jsonl.xz").values())
        assert [record.measured_problem for record in kept] == [
            record.measured_problem for record in collected
        ]
    assert [record.measured_problem for record in collected] == [
        problems[0],
        problems[2],
        problems[1],
    ]
    assert any("off" in line for line in lines)
    raced = {problem: set(names) for problem, names in pipeline.raced}
    assert raced[problems[0]] == raced[problems[2]] >= {c.name for c in samples[problems[2]]}
    assert all(set(times_of(r)) == {e.candidate for e in r.entries} for r in kept)
    assert all(entry.proof is None for record in kept for entry in record.entries)


def test_problems_that_are_measured_cover_both_ways_of_every_operation() -> None:
    assert len(PROBLEMS_MEASURED) >= 10
    assert {(p.op, p.direction) for p in PROBLEMS_MEASURED} == {
        (op, direction)
        for op in ("attention", "retnet", "retention")
        for direction in ("forward", "backward")
    }


def test_a_machine_without_a_gpu_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> None:
        raise UnsupportedArchitectureError("this machine has no CUDA driver")

    monkeypatch.setattr(exhaustive, "resolve", refuse)
    assert exhaustive.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("this machine has no CUDA driver")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no file "),
        ("{", "is damaged: "),
        ('{"a": 1}', "is damaged: the record lacks the field"),
        ("", "a fit takes at least 2 measured times of split, got 0"),
    ],
)
def test_files_that_hold_nothing_to_fit_to_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    path = tmp_path / "searches.jsonl"
    if text is not None:
        path.write_text(text)
    assert fit_constants.main([str(path), "--kernels", "split"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fit_constants: ")
    assert said in line
