"""Modes of calls, by direction and frozen, and the list of problems that nobody measured a kernel for."""

from __future__ import annotations

import json
import multiprocessing
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attention_autotuner
from attention_autotuner import settings
from attention_autotuner.arch import A100
from attention_autotuner.cli import main
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import BuildError, ProblemFileError, SettingsError, UntunedError
from attention_autotuner.serving import dispatch, runtime
from attention_autotuner.serving.untuned import list_untuned, read_problems
from attention_autotuner.tuning import search
from attention_autotuner.tuning.records import RecordStore
from tests.fake_pipeline import FakePipeline, fast
from tests.fake_world import PROBLEM, World, other_candidate

BACKWARD = replace(PROBLEM, direction="backward")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with settings.override(mode="cached", cache_dir=tmp_path), runtime.fresh():
        yield World(monkeypatch, tmp_path)


def test_a_mode_is_of_a_block_and_of_a_direction() -> None:
    mode = attention_autotuner.mode
    with mode("tune", backward="cached") as inside:
        assert [inside.mode_of(d) for d in ("forward", "backward")] == ["tune", "cached"]
        with mode(forward="off") as both:
            assert [both.mode_of(d) for d in ("forward", "backward")] == ["off", "cached"]
        with mode("frozen") as whole:
            assert {whole.mode_of(d) for d in ("forward", "backward")} == {"frozen"}
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(settings.current().mode))
        thread.start()
        thread.join()
        assert seen == ["cached"]  # another thread's is its own
        with mode("tune", backward="cached") as again:
            assert again is inside  # so that plans of the block are found again
    with pytest.raises(SettingsError, match="off, cached, tune or frozen"):
        mode(forward="sometimes").__enter__()  # type: ignore[arg-type]


def test_each_direction_follows_its_own_mode(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[str] = []
    monkeypatch.setattr(search, "tune", lambda problem, policy: tuned.append(problem.direction))
    with settings.mode("tune", backward="off"):
        for problem in (PROBLEM, BACKWARD):
            dispatch.kernel_for(problem, A100(), device=0)
        assert dispatch.lookup(BACKWARD, A100()).reason == "mode is off"
    assert tuned == ["forward"]


def test_frozen_picks_are_those_of_the_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "environment_of", lambda *_: FakePipeline().environment)
    policy = attention_autotuner.arch.H100()
    store = RecordStore(world.cache_dir / "records")
    ranked = search.tune(PROBLEM, policy, effort="none", top_k=3)
    best = [row.candidate.name for row in ranked.rows if row.candidate != ranked.default]

    def tune(problem: Any, name: str) -> None:
        pipeline = FakePipeline(time_us=fast(name, 80.0), confirmed_ratio=1.2)
        options: Any = {"top_k": 3, "records": store, "pipeline": pipeline}
        with settings.override(always_tune=True):
            assert search.tune(problem, policy, **options).pick.name == name

    tune(PROBLEM, best[1])
    with settings.mode("frozen"):
        assert dispatch.lookup(PROBLEM, policy).candidate.name == best[1]
        tune(PROBLEM, best[2])
        dispatch.invalidate()
        assert dispatch.lookup(PROBLEM, policy).candidate.name == best[1]
        backward = dispatch.lookup(BACKWARD, policy)
        assert (backward.layer, backward.candidate.deterministic) == ("default", True)
    with settings.mode("frozen", forward="cached"):
        assert dispatch.lookup(PROBLEM, policy).candidate.name == best[2]


def test_a_frozen_pick_that_fails_is_an_error_and_not_replaced(world: World) -> None:
    mine = other_candidate(A100())
    world.shipped.answer = world.hit(mine, "shipped")
    world.build_failures[mine.name] = BuildError("syntax")
    with settings.mode("frozen"), pytest.raises(BuildError, match="syntax"):
        dispatch.kernel_for(PROBLEM, A100(), device=0)


@pytest.mark.parametrize("mode", ["cached", "frozen", "tune"])
def test_a_call_without_a_measured_pick_is_refused_where_that_is_wanted(
    world: World, mode: Any
) -> None:
    policy = A100()
    with settings.override(mode=mode, strict_picks=True, effort="none"):
        with pytest.raises(UntunedError, match="b2 h4 s1000 d128 on A100"):
            dispatch.kernel_for(PROBLEM, policy, device=0)
        world.shipped.answer = world.hit(other_candidate(policy), "shipped")
        dispatch.invalidate()
        if mode != "frozen":
            dispatch.kernel_for(PROBLEM, policy, device=0)
        else:
            with pytest.raises(UntunedError):
                dispatch.kernel_for(PROBLEM, policy, device=0)
    with settings.override(mode="off", strict_picks=True):
        dispatch.kernel_for(PROBLEM, policy, device=0)


@pytest.mark.parametrize(("strict", "said"), [(True, "is an error"), (False, "is the default's")])
def test_why_says_that_picks_are_frozen(
    capsys: pytest.CaptureFixture[str], strict: bool, said: str
) -> None:
    with settings.override(backward_mode="frozen", strict_picks=strict):
        assert main(["why", "--device-type", "A100", "--direction", "backward"]) == 0
        lines = capsys.readouterr().out
        assert main(["why", "--device-type", "A100", "--direction", "backward", "--json"]) == 0
        explained = json.loads(capsys.readouterr().out)
        assert main(["why", "--device-type", "A100"]) == 0
        assert "frozen" not in capsys.readouterr().out
    assert "frozen: a process keeps the picks" in lines
    assert f"without a pick {said}" in lines
    assert lines.startswith("serves: nothing: no measured pick is known") == strict
    assert explained["mode"] == "frozen"
    assert explained["problem"]["deterministic"]


def test_untuned_problems_of_calls_are_listed_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "new" / "untuned.jsonl"
    other = replace(PROBLEM, seqlen_q=512)
    with settings.override(untuned_log=str(file)):
        for problem in (PROBLEM, replace(PROBLEM, seqlen_q=999), other, PROBLEM):
            dispatch.kernel_for(problem, A100(), device=0)
        assert read_problems(file) == [PROBLEM, other]
        monkeypatch.setattr(Path, "read_text", None)  # a known problem costs no file
        dispatch.kernel_for(PROBLEM, A100(), device=0)
        monkeypatch.undo()
        dispatch.lookup(replace(PROBLEM, batch=77), A100())  # `why` and its like call nothing
    world = World(monkeypatch, tmp_path)
    world.shipped.answer = world.hit(other_candidate(A100()), "shipped")
    with settings.override(untuned_log=file, jobs=3):  # measured: not listed
        dispatch.kernel_for(replace(PROBLEM, seqlen_q=16), A100(), device=0)
    assert read_problems(file) == [PROBLEM, other]


def test_a_list_that_cannot_be_written_costs_a_warning(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with settings.override(untuned_log=tmp_path):
        dispatch.kernel_for(PROBLEM, A100(), device=0)
    assert "is not listed in" in caplog.text


def _list_many(path: Path, first: int) -> None:
    for batch in range(first, first + 20):
        list_untuned(path, replace(PROBLEM, batch=batch))


def test_several_processes_list_whole_lines(tmp_path: Path) -> None:
    file, fork = tmp_path / "untuned.jsonl", multiprocessing.get_context("fork")
    processes = [fork.Process(target=_list_many, args=(file, first)) for first in (1, 11, 21)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
    assert {problem.batch for problem in read_problems(file)} == set(range(1, 41))


def test_problems_of_a_file_are_filled_as_those_of_tune(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    lines = ({"seqlen_q": 512}, {"op": "retention"}, {"op": "gemm"}, {"dtype": "bfloat16"})
    file.write_text("\n".join(map(json.dumps, lines)))
    expected = [
        Problem(seqlen_q=512, seqlen_k=512),
        Problem(op="retention", causal=True),
        Problem(op="gemm", batch=1, heads_q=1, heads_kv=1),
        Problem(dtype="bf16"),
    ]
    assert read_problems(file) == expected
    file.write_text(json.dumps(lines, indent=1))
    assert read_problems(file) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"seqlen": 5}', ":1: a problem has no field 'seqlen'; its fields: op, direction"),
        ('{}\n\n{"dim_qk": 7}', ":3: dim_qk must be a positive multiple of 8, got 7"),
        ('[{}, {"heads_q": 0}]', ": entry 2: heads_q must be at least 1, got 0"),
        ("[3]", ": entry 1: a problem must be an object of fields, got 3"),
        ("null", ":1: a problem must be an object of fields, got null"),
        ('{}\n{"causal": tru}', ":2: it must be JSON, .*: Expecting value at column 12"),
        ('[\n{},\n{"causal": tru}]', ":3: it must be JSON, .*: Expecting value at column 12"),
        ('{"modifications": 3}', ":1: modifications must be a list of names, got 3"),
    ],
)
def test_an_error_of_a_file_names_line_and_field_and_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(text)
    with pytest.raises(ProblemFileError, match=said):
        read_problems(file)
    for command in (["warmup"], ["tune"], ["export", "--output", str(tmp_path / "bundle")]):
        assert main([*command, "--device-type", "A100", "--problems", str(file)]) == 2
        error = capsys.readouterr().err
        assert re.search(f"^error: {re.escape(str(file))}{said}", error)
        assert "--" not in error
