"""``autotune``: any Python function, in a worker or in the caller's process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention_autotuner import autotune, settings, tune_together
from attention_autotuner.errors import NoCandidateError, UnsupportedArgumentError
from attention_autotuner.tuning.function_records import identity
from attention_autotuner.tuning.functions import MANY_KEYS, Tunable
from tests.tunable_functions import SPACE, TIMES, add_one, bench, double, largest, made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with settings.override(cache_dir=tmp_path):
        for tunable in (double, add_one):
            tunable._known.clear()
        made.clear()
        yield tmp_path


def timed(mode: str) -> str:
    made.append(mode)
    return mode


def arrays() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.arange(5.0), np.full(5, 7.0)


def test_a_worker_races_what_is_right_and_the_caller_calls_once(cache: Path) -> None:
    x, out = arrays()
    result = double.tune(x, out)
    assert (result.status, result.pick, result.default) == ("measured", {"mode": "fast"}, SPACE[0])
    assert result.gain == pytest.approx(1.0)
    kinds = {timing.name.split("=")[1]: timing.outcome.kind for timing in result.timings}
    assert kinds == {
        **dict.fromkeys(("default", "fast", "close"), "ok"),
        "wrong": "wrong",
        "raises": "launch_failed",
        "crashes": "crashed",
    }
    assert (made, out.tolist()) == ([], [7.0] * 5)  # nothing ran here, on nothing of ours
    out[:] = 0
    double(x, out)
    assert (made, out.tolist()) == (["fast"], (2 * x).tolist())

    (path,) = cache.glob("functions/*/*.json")
    document = json.loads(path.read_text())
    assert document["pick"] == {"mode": "fast"}
    wrong = next(e for e in document["entries"] if e["config"] == {"mode": "wrong"})
    assert wrong["outcome"]["reason"].startswith("it differs from the reference: result ")
    double._known.clear()
    assert double.tune(x, out).status == "recorded"
    with settings.override(always_tune=True, in_process=False):
        assert double.tune(x, out).status == "measured"
    path.write_text("{")
    double._known.clear()
    assert double.tune(x, out).status == "measured"


def test_calls_can_say_what_they_want() -> None:
    x, out = arrays()
    double(x, out, autotune=False)
    double(x, out, config={"mode": "close"})
    for setting in ({"mode": "off"}, {"mode": "frozen"}, {"effort": "none"}):
        with settings.override(**setting):
            double(x, out)
    assert made == ["default", "close", "default", "default", "default"]
    double.tune(x, out)
    double(x, out, autotune=False)
    assert made[5:] == ["fast"]
    with pytest.raises(UnsupportedArgumentError, match="it needs mode"):
        double(x, out, config={"block": 1})
    with pytest.raises(TypeError, match="mode"):
        double(x, out, mode="fast")


def test_what_cannot_be_imported_is_tuned_here_with_a_warning(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    @autotune([{"mode": "default"}, {"mode": "faster"}], bench=bench)
    def local(x: torch.Tensor, *, mode: str) -> torch.Tensor:
        timed(mode)
        return x * torch.rand(3)

    x = torch.ones(3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert local(x, verbose=True).equal(expected)  # the draws of a search are its own
    assert "is tuned in this process, which a configuration that faults ends" in caplog.text
    assert made[-1] == "faster"
    ranking = capsys.readouterr().err
    assert "measure 1/" in ranking
    assert "mode=faster: 40.0 us, 1.000 of the fastest" in ranking


def test_written_arguments_are_put_back_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2)
    with settings.override(in_process=True):
        assert add_one.tune(x).pick == {"mode": "fast", "size": 1}
        assert x.tolist() == [0, 0]
        monkeypatch.setattr(add_one, "_call", Tunable(add_one.function, add_one.configs)._call)
        add_one._known.clear()
        with settings.override(always_tune=True):
            result = add_one.tune(x)
    kinds = [timing.outcome.kind for timing in result.timings]
    assert kinds == ["ok", "wrong", "wrong", "wrong"]  # an undeclared write shows


def test_less_than_one_percent_keeps_the_default() -> None:
    tunable = Tunable(
        lambda *, mode: timed(mode), [{"mode": "default"}, {"mode": "close"}], bench=bench
    )
    with settings.override(in_process=True):
        result = tunable.tune()
    assert (result.pick, result.gain) == ({"mode": "default"}, 0.0)


def test_keys_and_pruning_say_what_is_tuned_for_what(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[Any] = []

    def prune(config: Any, n: int, scale: float) -> bool:
        asked.append((config["mode"], n, scale))
        return config["mode"] != "default"

    configs = [{"mode": mode} for mode in TIMES]
    of: Any = lambda n, scale, *, mode: timed(mode)  # noqa: E731
    with settings.override(in_process=True):
        tunable = Tunable(of, configs, prune=prune, bench=bench, budget_seconds=0.1)
        assert tunable(3, 0.5) == tunable(3, 0.25) == "faster"  # floats count by type
        assert {call[1:] for call in asked} == {(3, 0.5)}
        assert len(tunable._known) == 1
        assert tunable.tune(3, 0.5).default == {"mode": "fast"}
        by_name = Tunable(of, configs, key=["scale"], bench=bench)
        by_rule = Tunable(of, configs, key=lambda n, scale: n // 1000, bench=bench)
        for tunable in (by_name, by_rule):
            for n in range(MANY_KEYS):
                tunable(n, 0.5)
            assert len(tunable._known) == 1
        nothing = Tunable(of, configs, prune=lambda *args: False)
        with pytest.raises(UnsupportedArgumentError, match="prune leaves no configuration"):
            nothing(1, 1.0)
        assert "is `key` too fine" not in caplog.text
        too_fine = Tunable(lambda n, *, mode: timed(mode), configs[:1], bench=bench)
        for n in range(MANY_KEYS):
            too_fine(n)
        assert "was tuned for 32 keys: is `key` too fine?" in caplog.text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.empty(2, 3, dtype=torch.float16).T, [[3, 2], "torch.float16", [1, 0], "cpu"]),
        (np.empty((2, 3), np.int32), [[2, 3], "torch.int32", [0, 1], "cpu"]),
        ({"a": (1, 2.5, None)}, {"a": [1, "builtins.float", None]}),
        (Path(), "pathlib.PosixPath"),
    ],
)
def test_the_key_of_an_argument_is_what_speed_depends_on(value: Any, expected: Any) -> None:
    if isinstance(value, Path):
        expected = f"{type(value).__module__}.{type(value).__qualname__}"
    assert identity(value) == expected


def test_wall_time_decides_on_the_cpu_without_a_bench() -> None:
    x = np.random.default_rng(0).random(100_000)
    tunable = Tunable(largest, {"slowly": [True, False]}, budget_seconds=0.3)
    assert tunable.tune(x).pick == {"slowly": False}
    result = tunable.tune(x[:90_000])
    times = {timing.name: timing.median_us for timing in result.timings}
    assert times["slowly=True"] > 2 * times["slowly=False"] > 0.0


def test_ctrl_c_ends_a_search_and_a_call_with_it(cache: Path) -> None:
    rounds: list[str] = []

    def interrupted(call: Any) -> float:
        rounds.append(call())
        if len(rounds) > 20:
            raise KeyboardInterrupt
        return TIMES[rounds[-1]]

    configs = [{"mode": "default"}, {"mode": "fast"}]
    tunable = Tunable(lambda *, mode: timed(mode), configs, bench=interrupted)
    with settings.override(in_process=True):
        result = tunable.tune()
        assert result.interrupted
        assert result.pick == {"mode": "fast"}  # the best so far
        assert not list(cache.rglob("*.json"))
        tunable._known.clear()
        with pytest.raises(KeyboardInterrupt):
            tunable()


def test_no_usable_configuration_is_an_error_that_tabulates_why() -> None:
    x, _ = arrays()
    out = np.zeros(4)
    with pytest.raises(
        NoCandidateError, match="mode=raises: launch_failed: ValueError: no such mode"
    ):
        double.tune(x, out)


@pytest.mark.parametrize(
    ("configs", "options", "words"),
    [
        ([], {}, "there is none"),
        ([{"mode": 1}, {"block": 2}], {}, "all need the same names"),
        ([{"mode": 1}, {"mode": 1}], {}, "one is there twice"),
        ([{"block": 1}], {}, "it takes x, mode"),
        ([{"mode": 1}], {"restore": ["y"]}, "it takes x, mode"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(configs: Any, options: Any, words: str) -> None:
    with pytest.raises(UnsupportedArgumentError, match=words):
        autotune(configs, **options)(lambda x, *, mode: None)
    with pytest.raises(UnsupportedArgumentError, match="are arguments of every tunable function"):
        autotune([{"mode": 1}])(lambda config, *, mode: None)


def test_methods_are_tuned_like_functions() -> None:
    class Layer:
        @autotune([{"mode": "default"}, {"mode": "fast"}], bench=bench)
        def forward(self, n: int, *, mode: str) -> str:
            return timed(mode)

    assert Layer().forward(3) == "fast"


def test_functions_that_are_called_together_are_tuned_by_the_time_of_the_whole() -> None:
    costs = {"default": 10.0, "fast": 5.0, "hurts": 1.0}
    spent: list[str] = []

    def part(name: str) -> Tunable[str]:
        def function(x: torch.Tensor, *, mode: str) -> str:
            spent.append(mode)
            x += 1
            return "" if name == "second" else mode[:0]

        function.__qualname__ = name
        return Tunable(function, {"mode": ["default", "hurts", "fast"]})

    first, second = part("first"), part("second")

    def step(x: torch.Tensor) -> torch.Tensor:
        first(x)
        second(x)
        return x + 0

    def whole(call: Any) -> float:
        spent.clear()
        call()
        return sum(costs[mode] for mode in spent) + (50.0 if spent[0] == "hurts" else 0.0)

    x = torch.zeros(2)
    results = tune_together(step, (x,), restore=["x"], bench=whole, budget_seconds=0.2)
    assert [result.pick for result in results] == [{"mode": "fast"}, {"mode": "hurts"}]
    assert x.tolist() == [0, 0]
    spent.clear()
    step(x)  # both serve what was recorded
    assert (spent, x.tolist()) == (["fast", "hurts"], [2, 2])
    with pytest.raises(UnsupportedArgumentError, match="calls no tunable function"):
        tune_together(lambda x: x, (x,))
