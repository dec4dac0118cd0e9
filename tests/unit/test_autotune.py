"""``autotune``: any Python function, in a worker or in the caller's process."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pickle
import warnings
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
from tests.tunable_functions import (
    SPACE,
    TIMES,
    Layer,
    add_one,
    bench,
    double,
    laid_out,
    largest,
    made,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with settings.override(cache_dir=tmp_path):
        for tunable in (double, add_one, laid_out, Layer.forward):
            tunable._known.clear()
        made.clear()
        yield tmp_path


def timed(mode: str) -> None:
    made.append(mode)


class Tally:
    def __call__(self, *, mode: str) -> None:
        made.append(mode)


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
        "exits": "crashed",
        "crashes": "crashed",
    }
    reasons = {timing.name: timing.outcome.reason for timing in result.timings}
    assert reasons["mode=exits"] == "SystemExit: 3"
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
        tunable(3, 0.5)
        assert {call[1:] for call in asked} == {(3, 0.5)}
        asked.clear()
        tunable(3, 0.25)  # floats count by type
        assert made[-1] == "faster"
        assert asked == [("faster", 3, 0.25)]
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
        (np.empty((2, 3), order="F")[::-1], [[2, 3], "torch.float64", [1, 0], "cpu"]),
        (np.empty(3, ">f4"), [[3], "numpy.>f4", [0], "cpu"]),
        (np.array(["a"]), [[1], "numpy.<U1", [0], "cpu"]),
        (np.array(["2020-01-01"], "datetime64[D]"), [[1], "numpy.datetime64[D]", [0], "cpu"]),
        (np.empty(1, [("a", "i4")]), [[1], "numpy.[('a', '<i4')]", [0], "cpu"]),
        (np.empty(1, object), [[1], "numpy.object", [0], "cpu"]),
        (torch.eye(2).to_sparse(), [[2, 2], "torch.float32", "torch.sparse_coo", "cpu"]),
        (np.int64(4), 4),
        (np.bool_(True), True),
        (np.float32(4), "numpy.float32"),
        ({"a": (1, 2.5, None)}, {"a": [1, "builtins.float", None]}),
        (Path(), "pathlib.PosixPath"),
    ],
)
def test_the_key_of_an_argument_is_what_speed_depends_on(value: Any, expected: Any) -> None:
    if isinstance(value, Path):
        expected = f"{type(value).__module__}.{type(value).__qualname__}"
    assert identity(value) == expected


CUBE = np.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "x",
    [
        np.asfortranarray(CUBE),
        CUBE.transpose(1, 0, 2),
        CUBE[::-1, :, ::-1],
        CUBE.transpose(2, 0, 1)[::-1],
        np.array(7.0),
        np.array(["a", "b"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(3, [("a", "i4")]),
        np.zeros(3, np.longdouble),
        np.zeros(3, ">f4"),
        np.array([None, "a"]),
    ],
    ids=lambda x: f"{x.dtype}-{x.strides}",
)
def test_arrays_of_any_layout_and_dtype_are_tuned_as_they_are(x: np.ndarray[Any, Any]) -> None:
    x.flags.writeable = False
    for in_process in (False, True):
        with warnings.catch_warnings(), settings.override(in_process=in_process, always_tune=True):
            warnings.simplefilter("error")
            result = laid_out.tune(x, x.strides)
        assert [timing.outcome.reason for timing in result.timings] == ["", ""]
    assert laid_out(x, x.strides) is x


def test_what_prune_leaves_out_of_a_call_is_not_used_for_its_key() -> None:
    def of(n: int, *, mode: str) -> int:
        made.append(mode)
        return n

    sizes = {"default": 1, "fast": 100, "faster": 1000}
    tunable = Tunable(
        of,
        {"mode": list(sizes)},
        key=lambda n: "all",
        prune=lambda config, n: sizes[config["mode"]] <= n,
        bench=bench,
    )
    with settings.override(in_process=True):
        for n, mode in ((1000, "faster"), (999, "fast"), (99, "default"), (1001, "faster")):
            tunable(n)
            assert made[-1] == mode
        made.clear()
        tunable(100)
        assert made == ["fast"]  # no further search
        tunable._known.clear()
        for n, mode in ((99, "default"), (999, "default")):  # known, and allowed
            tunable(n)
            assert made[-1] == mode
        tunable.tune(999)
        tunable(999)
        assert made[-1] == "fast"
    tunable._known.clear()
    with settings.override(in_process=True, always_tune=True):
        tune_together(lambda: (tunable(1000), tunable(99))[1], bench=bench, budget_seconds=0.1)
    made.clear()
    with settings.override(mode="off"):
        tunable(1000)
        tunable(99)
    assert made == ["faster", "default"]


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
        call()
        rounds.append(made[-1])
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
        ([{"mode": 1}], {"restore": ["mode"]}, r"must be a list of its arguments, got \['mode'\]"),
        ([{"mode": 1}], {"reset": "x"}, "must be a list of its arguments, got 'x'"),
        ([{"mode": 1}], {"reset": None}, "must be a list of its arguments, got None"),
        ([{"mode": 1}], {"key": "x"}, "key of .* must be a list of some of x, got 'x'"),
        ([{"mode": 1}], {"key": [1]}, r"key of .* must be a list of some of x, got \[1\]"),
        ([{"mode": 1}], {"tolerance": "x"}, "tolerance of .* must be a number of at least 0"),
        ([{"mode": 1}], {"tolerance": -1.0}, "or None, got -1.0"),
        ([{"mode": 1}], {"tolerance": float("nan")}, "or None, got nan"),
        ([{"mode": 1}], {"budget_seconds": "x"}, "must be a positive number of seconds, or None"),
        ([{"mode": 1}], {"budget_seconds": 0}, "budget_seconds of .* got 0"),
        ([{"mode": 1}], {"budget_seconds": -1}, "budget_seconds of .* got -1"),
        ([{"mode": 1}], {"prune": 5}, "prune of .* must be a function, or None, got 5"),
        ([{"mode": 1}], {"reference": 5}, "reference of .* must be a function, or None, got 5"),
        ([{"mode": 1}], {"bench": 5}, "bench of .* must be a function, or None, got 5"),
        ([{"mode": 1}], {"collective": "x"}, "collective of .* must be True or False, got 'x'"),
        ([{"mode": 1}], {"bogus": 1}, "autotune has no option 'bogus', got bogus=1"),
        ([1, 2], {}, "must be mappings from names of parameters to values, got 1"),
        (None, {}, "must be mappings from names of parameters to values, got None"),
        ({"mode": 5}, {}, "'mode' in the configurations of .* must be a list of values, got 5"),
        ({"mode": "ab"}, {}, "must be a list of values, got 'ab'"),
        ({"mode": [torch.half]}, {}, "must be numbers, strings, booleans or None, got torch.float"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(configs: Any, options: Any, words: str) -> None:
    with pytest.raises(UnsupportedArgumentError, match=words):
        autotune(configs, **options)(lambda x, *, mode: None)
    with pytest.raises(UnsupportedArgumentError, match="are arguments of every tunable function"):
        autotune([{"mode": 1}])(lambda config, *, mode: None)


def test_numbers_of_numpy_are_values_of_configurations() -> None:
    values: Any = {"size": np.arange(1, 3), "scale": [np.float32(0.5)], "mode": [np.str_("fast")]}
    tunable = Tunable(lambda *, size, scale, mode: None, values)
    assert tunable.configs == [{"size": n, "scale": 0.5, "mode": "fast"} for n in (1, 2)]
    kinds = {type(value) for config in tunable.configs for value in config.values()}
    assert kinds == {int, float, str}


@pytest.mark.parametrize("function", [functools.partial(print, 1), Tally(), 5, None])
def test_functions_without_a_name_are_refused(function: Any) -> None:
    with pytest.raises(UnsupportedArgumentError, match=r"autotune takes functions .* got "):
        autotune([{"mode": 1}])(function)


def test_calls_and_tune_together_refuse_what_they_cannot_take() -> None:
    x, out = arrays()
    config: Any
    for config in (["mode"], "mode", 5):
        with pytest.raises(UnsupportedArgumentError, match=r"config=.* it needs mode"):
            double(x, out, config=config)
    for options, words in (
        ({"reset": ["zz"]}, r"reset of .* got \['zz'\]: it takes x"),
        ({"bogus": 1}, "tune_together has no option 'bogus', got bogus=1; its options: budget_"),
        ({"budget_seconds": 0}, "budget_seconds of .* got 0"),
        ({"tolerance": "x"}, "tolerance of .* got 'x'"),
    ):
        with pytest.raises(UnsupportedArgumentError, match=words):
            tune_together(lambda x: double(x, x), (x,), **options)
    with pytest.raises(UnsupportedArgumentError, match="tune_together takes a function, got 5"):
        tune_together(5)  # type: ignore[arg-type]  # no function


def test_methods_are_tuned_like_functions() -> None:
    class Plain:
        @autotune([{"mode": "default"}, {"mode": "fast"}], bench=bench)
        def forward(self, n: int, *, mode: str) -> int:
            timed(mode)
            return n

    assert Plain().forward(3) == 3
    assert made[-1] == "fast"


def test_the_tuning_of_a_method_has_its_object() -> None:
    layer = Layer()
    assert layer.forward.tune(3).pick == {"mode": "fast"}
    assert layer.forward(3, autotune=False) == 3
    assert made == ["fast"]
    assert list(inspect.signature(layer.forward).parameters) == ["x", "mode"]
    assert layer.forward == layer.forward != Layer().forward
    assert layer.forward.configs == Layer.forward.configs
    assert pickle.loads(pickle.dumps(layer.forward))(4, autotune=False) == 4


def test_tunable_functions_are_pickled_and_copied_as_functions_are() -> None:
    for tunable in (double, Layer.forward):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(tunable, protocol)) is tunable
        assert copy.deepcopy(tunable) is copy.copy(tunable) is tunable
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(Tunable(lambda *, mode: None, [{"mode": 1}]))


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
