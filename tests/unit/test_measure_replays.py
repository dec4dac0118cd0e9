"""The launches of one sample of a short kernel, over a GPU that only remembers what it was asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_autotuner.tuning import sampling
from attention_autotuner.tuning.measure import TorchDevice
from attention_autotuner.tuning.sampling import launches_per_replay


class Recorder:
    """Remembers launches and events in order; a graph is the list of what it captured."""

    def __init__(self, once_us: float) -> None:
        self.once_us = once_us
        self.stream: list[Any] = []
        self.first: list[Any] = []
        self.captured: list[Any] | None = None

    def put(self, item: Any) -> None:
        (self.stream if self.captured is None else self.captured).append(item)

    @contextmanager
    def graph(self, made: Any) -> Iterator[None]:
        self.captured = made.content
        yield
        self.captured = None

    def make_graph(self) -> Any:
        content: list[Any] = []
        return SimpleNamespace(content=content, replay=lambda: self.stream.append(content))

    def make_event(self, *, enable_timing: bool, external: bool) -> Any:
        assert enable_timing
        assert external  # or a capture would refuse it
        event = SimpleNamespace()
        event.record = lambda: self.put("event")
        event.elapsed_time = lambda other: self.once_us * 4e-3
        return event


def prepared(monkeypatch: pytest.MonkeyPatch, once_us: float, sets: int) -> Recorder:
    """One sample of an entry whose launches take so long."""
    recorder = Recorder(once_us)
    monkeypatch.setattr(torch.cuda, "Event", recorder.make_event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", recorder.make_graph)
    monkeypatch.setattr(torch.cuda, "graph", recorder.graph)
    entry: Any = SimpleNamespace(name="one", prepare=lambda inputs, outputs: None, run=recorder.put)
    device = TorchDevice(torch.device("cpu"))
    made = sampling._Prepared(device, entry, [SimpleNamespace()] * sets, [])  # type: ignore[list-item]
    recorder.first, recorder.stream = recorder.stream, []
    made.enqueue()
    return recorder


@pytest.mark.parametrize("sets", [1, 3, 5, 32])
def test_a_replay_rotates_all_sets_equally_often_between_its_own_events(
    monkeypatch: pytest.MonkeyPatch, sets: int
) -> None:
    (replay,) = prepared(monkeypatch, 11.5, sets).stream
    launches = launches_per_replay(11.5, sets)
    assert replay == ["event", *[index % sets for index in range(launches)], "event"]
    assert launches % sets == 0


def test_a_long_kernel_is_launched_between_events_on_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = prepared(monkeypatch, 100.0, 3).stream
    assert (sample[0], sample[-1]) == ("event", "event")
    assert len(sample) == 2 + 4


def test_the_first_launches_are_outside_of_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(monkeypatch, 100.0, 2).first
    assert first[: first.index("event")] == [0, 1, 0]


def test_the_noise_of_one_timing_changes_no_launches() -> None:
    """An 11 us kernel on an H200: 32 sets outlast its L2."""
    assert {launches_per_replay(once, 32) for once in (10.5, 11.1, 11.5, 12.4, 12.6, 20.0)} == {32}
