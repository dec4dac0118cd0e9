from __future__ import annotations

import random
from math import log

import pytest

from attention_autotuner.core.outcome import LaunchFailed
from attention_autotuner.tuning.racing import EARLY_ROUNDS, Race


def run_race(
    true_us: dict[str, float],
    *,
    rounds: int,
    noise: float,
    drift: float = 0.0,
    keep: tuple[str, ...] = (),
    seed: int = 0,
) -> Race:
    """Rounds with multiplicative noise of each timing and a clock that drifts from round to round."""
    source = random.Random(seed)
    race = Race(list(true_us), keep=keep, seed=seed)
    clock = 1.0
    for _ in range(rounds):
        clock *= 1.0 + source.gauss(0.0, drift)
        times = {}
        for name in race.order():
            times[name] = true_us[name] * clock * (1.0 + source.gauss(0.0, noise))
        race.add(times)
    return race


def test_the_fastest_wins_and_the_order_is_by_ratio() -> None:
    true_us = {"a": 130.0, "b": 100.0, "c": 110.0}
    results = run_race(true_us, rounds=12, noise=0.01, keep=("a", "c")).results()
    assert [timing.name for timing in results] == ["b", "c", "a"]
    assert results[0].ratio_to_best == 1.0
    assert results[1].ratio_to_best == pytest.approx(1.10, abs=0.02)
    assert results[2].ratio_to_best == pytest.approx(1.30, abs=0.02)
    assert [timing.tied for timing in results] == [True, False, False]
    assert results[0].median_us == pytest.approx(100.0, rel=0.02)
    assert results[0].samples == 12


def test_clearly_slower_entries_leave_early_and_close_ones_stay() -> None:
    true_us = {"base": 100.0, "awful": 200.0, "slow": 110.0, "close": 100.2}
    race = run_race(true_us, rounds=40, noise=0.01)
    samples = {timing.name: timing.samples for timing in race.results()}
    assert samples["awful"] == EARLY_ROUNDS
    assert EARLY_ROUNDS < samples["slow"] < 20
    assert samples["close"] == samples["base"] == 40
    assert race.running == ["base", "close"]


def test_an_entry_that_left_is_not_the_fastest_for_a_few_strange_rounds() -> None:
    race = Race(["default", "b", "left"], keep=["default"])
    for times in [{"default": 900.0, "b": 50.0, "left": 80.0}] * 2 + [
        {"default": 90.0, "b": 100.0}
    ] * 10:
        race.order()
        race.add(times)
    assert race.running == ["default"]
    first = race.results()[0]
    assert (first.name, first.ratio_to_best) == ("default", 1.0)
    race.fail("b", LaunchFailed(reason="gone"))
    assert race.results()[0].name == "left"  # nothing is left that it lost to


def test_kept_entries_are_timed_to_the_end() -> None:
    race = run_race({"fast": 10.0, "peer": 30.0}, rounds=15, noise=0.01, keep=("peer",))
    assert {timing.name: timing.samples for timing in race.results()} == {"fast": 15, "peer": 15}


def test_a_tie_goes_to_the_entry_given_first() -> None:
    for names in (("default", "other"), ("other", "default")):
        results = run_race(dict.fromkeys(names, 50.0), rounds=30, noise=0.02, seed=5).results()
        assert [timing.name for timing in results] == list(names)
        assert all(timing.tied for timing in results)


def test_a_tie_is_an_interval_that_includes_one() -> None:
    race = Race(["default", "close", "slow"])
    for _ in range(10):
        race.add({"default": 100.0, "close": 100.4, "slow": 103.0})
    default, close, slow = race.results()
    assert (default.ratio_low, default.ratio_high) == (1.0, 1.0)
    assert close.ratio_low <= 1.0 < close.ratio_to_best < close.ratio_high
    assert 1.0 < slow.ratio_low < slow.ratio_to_best < slow.ratio_high
    assert [timing.tied for timing in (default, close, slow)] == [True, True, False]


def test_noise_does_not_replace_the_default() -> None:
    picks = [
        run_race({"default": 100.0, "twin": 100.0}, rounds=20, noise=0.03, seed=seed)
        .results()[0]
        .name
        for seed in range(400)
    ]
    assert picks.count("default") >= 385


def test_a_gain_of_two_percent_is_found_under_drifting_clocks() -> None:
    # The clock wanders by several times the gain; pairs of one round share it.
    picks = [
        run_race({"default": 100.0, "better": 98.0}, rounds=40, noise=0.01, drift=0.05, seed=seed)
        .results()[0]
        .name
        for seed in range(30)
    ]
    assert picks.count("better") >= 28


def test_who_runs_after_whom_decides_no_race() -> None:
    # The second of a pair finds other clocks than the first, always by so much.
    for seed in range(40):
        race = Race(["first", "second"], seed=seed)
        for _ in range(10):
            race.add(dict(zip(race.order(), (100.0, 101.0), strict=True)))
        results = race.results()
        assert [timing.name for timing in results] == ["first", "second"]
        assert results[1].ratio_to_best == pytest.approx(1.0, abs=1e-9)


def test_drift_does_not_bias_an_entry_that_left_early() -> None:
    race = Race(["a", "b", "c"])
    # The clock halves after the slow entry has left: its median is from better times than the others'.
    for _ in range(4):
        race.add({"a": 100.0, "b": 103.0, "c": 150.0})
    for _ in range(10):
        race.add({"a": 200.0, "b": 206.0})
    results = {timing.name: timing for timing in race.results()}
    assert results["c"].median_us < results["a"].median_us
    assert results["c"].ratio_to_best == pytest.approx(1.5)
    assert [timing.name for timing in race.results()] == ["a", "b", "c"]


def test_failed_entries_come_last_with_their_reason() -> None:
    race = Race(["a", "b"])
    race.fail("a", LaunchFailed(reason="no such kernel image"))
    race.add({"b": 5.0})
    results = race.results()
    assert [timing.name for timing in results] == ["b", "a"]
    assert results[1].outcome == LaunchFailed(reason="no such kernel image")
    assert not results[1].tied
    assert race.running == ["b"]


def test_an_entry_that_fails_after_winning_rounds_is_no_reference() -> None:
    race = Race(["a", "b", "c"])
    for _ in range(5):
        race.add({"a": 1.0, "b": 2.0, "c": 2.2})
    race.fail("a", LaunchFailed(reason="context lost"))
    results = race.results()
    assert [timing.name for timing in results] == ["b", "c", "a"]
    assert results[0].ratio_to_best == 1.0
    assert results[1].ratio_to_best == pytest.approx(1.1)


def test_a_race_without_samples_has_no_winner() -> None:
    race = Race(["a", "b"])
    assert all(not timing.tied and timing.samples == 0 for timing in race.results())


def test_a_race_settles_when_ratios_are_known_and_not_before() -> None:
    quiet = run_race({"a": 100.0, "b": 100.3}, rounds=12, noise=0.001)
    assert quiet.settled()
    loud = run_race({"a": 100.0, "b": 100.3}, rounds=12, noise=0.05, keep=("a", "b"))
    assert not loud.settled()
    young = run_race({"a": 100.0, "b": 100.3}, rounds=5, noise=0.001)
    assert not young.settled()


def test_the_error_shrinks_with_rounds() -> None:
    few = run_race({"a": 100.0, "b": 104.0}, rounds=8, noise=0.01, keep=("b",)).results()[1]
    many = run_race({"a": 100.0, "b": 104.0}, rounds=128, noise=0.01, keep=("b",)).results()[1]
    assert many.error < 0.5 * few.error
    assert abs(log(many.ratio_to_best / 1.04)) < 4 * many.error


def test_orders_are_permutations_that_change_and_repeat_with_the_seed() -> None:
    names = [f"k{i}" for i in range(8)]
    first_race, two = Race(names, seed=3), Race(names, seed=3)
    first = [first_race.order() for _ in range(4)]
    assert first == [two.order() for _ in range(4)]
    assert all(sorted(order) == names for order in first)
    assert len({tuple(order) for order in first}) > 1
    assert [first[1], first[3]] == [first[0][::-1], first[2][::-1]]


@pytest.mark.parametrize("time", [0.0, -1.0, float("inf"), float("nan")])
def test_times_must_be_positive_and_finite(time: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        Race(["a"]).add({"a": time})


def test_names_must_be_distinct_and_kept_ones_known() -> None:
    with pytest.raises(ValueError, match="distinct"):
        Race(["a", "a"])
    with pytest.raises(ValueError, match="distinct"):
        Race([])
    with pytest.raises(ValueError, match="cannot keep"):
        Race(["a"], keep=["b"])


def test_any_two_entries_are_compared_over_the_rounds_they_share() -> None:
    race = run_race({"a": 100.0, "b": 104.0, "c": 130.0}, rounds=32, noise=0.004, drift=0.1)
    ratio, error = race.compare("c", "b")
    assert abs(log(ratio / 1.25)) < 5 * error
    assert race.compare("b", "c")[0] == pytest.approx(1 / ratio)
    assert race.compare("a", "a") == (1.0, 0.0)
    alone = Race(["a", "b"])
    alone.add({"a": 1.0})
    assert alone.compare("a", "b") == (float("inf"), float("inf"))
