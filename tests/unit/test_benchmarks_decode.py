"""The benchmark of decoding and the baseline fla, as far as no GPU is needed."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.kernels.recurrent_sm80.knobs import RecurrentKnobs
from attention_autotuner.operations.bindings import make_inputs
from attention_autotuner.operations.shared.tensors import Outputs
from attention_autotuner.tuning.devices import workspace_on
from attention_autotuner.tuning.entries import KernelEntry
from attention_autotuner.tuning.measure import TorchDevice
from benchmarks import decode, run
from benchmarks.baselines import BASELINES, fla
from benchmarks.baselines.flash_attn import FlashAttention2
from benchmarks.contenders import Selection
from benchmarks.decode import DECODE
from benchmarks.reporting import site
from benchmarks.suites import trials
from tests.fake_benchmark import GPU, FakeMeasurer, session_of
from tests.fake_pipeline import FakeBuilt

SMALL = replace(DECODE, batch=2, heads_q=2, heads_kv=2, dim_qk=16, dim_v=32)


# --- decoding ---------------------------------------------------------------------------------------


def test_a_step_is_one_token_of_64_sequences_and_moves_the_state_twice() -> None:
    assert DECODE.describe() == "retention recurrent forward fp16 b64 h8 s1 d256/512 causal"
    state = 64 * 8 * 256 * 512 * 4
    rows = 64 * 8 * (256 + 512) * 2 * 2
    assert decode.bytes_of_step(DECODE) == 2 * state + rows


def test_a_step_in_place_writes_the_state_where_it_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(
        KernelEntry, "prepare", lambda self, inputs, outputs: taken.append((inputs, outputs))
    )
    inputs = [make_inputs(SMALL, seed=0, device="cpu")]
    tensors = {"o": torch.empty(2, 2, 1, 32), "final_state": torch.empty(2, 2, 16, 32)}
    outputs = [Outputs(tensors=tensors, workspace=workspace_on(TorchDevice(torch.device("cpu"))))]
    for kind in (decode.InPlaceEntry, KernelEntry):
        kind(name="x", path=Path(), problem=SMALL).prepare(inputs, outputs)
    (_, in_place), (_, beside) = taken
    state = inputs[0].tensors["initial_state"]
    assert in_place[0].tensors["final_state"] is state
    assert beside[0].tensors["final_state"] is tensors["final_state"]
    assert in_place[0].tensors["o"] is tensors["o"]


def test_candidates_race_copies_in_both_ways() -> None:
    moved = decode.bytes_of_step(DECODE)
    times = {
        "copy 256 MiB": 200.0,
        "copy 2048 MiB": 1000.0,
        "in place: a": 150.0,
        "not in place: a": 140.0,
    }
    measurer = FakeMeasurer(lambda problem, name: times[name])
    figures = decode.run(
        DECODE, {"a": FakeBuilt(path=Path("a"), report=parse_ptxas(""))}, measurer, 1.0
    )
    assert measurer.raced == [list(times)]
    assert figures["copy_gb_per_s"] == pytest.approx(2 * 2048 * 2**20 / 1000e3)
    ways = figures["rows"][0]["ways"]
    assert ways["in place"]["gb_per_s"] == pytest.approx(moved / 150e3)
    assert ways["not in place"]["us"] == pytest.approx(140.0)
    failing = FakeMeasurer(lambda problem, name: Wrong(reason="off") if ": a" in name else 1.0)
    with pytest.raises(RuntimeError, match="wrong: off"):
        decode.run(DECODE, {"a": FakeBuilt(path=Path("a"), report=parse_ptxas(""))}, failing, 1.0)


def summary(share: float) -> dict[str, Any]:
    """Of a pick that reaches a share of the copy in place, and a tenth more elsewhere."""
    rates = {"copy 256 MiB": 3500.0, "copy 2048 MiB": 4000.0}
    rates |= {"in place: a": 4000.0 * share, "not in place: a": 4400.0 * share}
    return decode.summarise(rates, ["a"], DECODE)


def test_shares_are_of_the_faster_copy_and_have_a_bar() -> None:
    figures = summary(0.8)
    assert figures["copy_gb_per_s"] == 4000.0
    way = figures["rows"][0]["ways"]["in place"]
    assert way["share_of_copy"] == pytest.approx(0.8)
    assert way["us"] == pytest.approx(decode.bytes_of_step(DECODE) / 3200e9 * 1e6)
    assert decode.missed(figures) == []
    assert decode.missed(summary(0.65)) == ["in place"]
    assert decode.missed(summary(0.5)) == ["in place", "not in place"]


def recurrent(columns: int) -> Candidate:
    return Candidate.of(DECODE, RecurrentKnobs(columns=columns, warps=8))


@pytest.mark.parametrize(("us", "kept"), [(99.5, 64), (90.0, 128)])
def test_a_pick_must_beat_the_default_to_be_confirmed(us: float, kept: int) -> None:
    pick, default = recurrent(128), recurrent(64)
    selection = Selection(problem=DECODE, pick=pick, layer="record", default=default)
    moved = decode.bytes_of_step(DECODE)
    times = {pick.name: us, default.name: 100.0}
    rates = {f"{way}: {name}": moved / t / 1e3 for name, t in times.items() for way in decode.WAYS}
    figures = decode.summarise(rates | {"copy 1 MiB": 4000.0}, list(times), DECODE)
    row = decode.confirmed(selection, figures)
    assert row["pick"] == recurrent(kept).name
    assert row["entries"]["pick"]["median_us"] == pytest.approx(us if kept == 128 else 100.0)
    assert Problem(**row["problem"]) == DECODE


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str | None) -> None:
        raise UnsupportedArchitectureError("this machine has no CUDA driver")

    monkeypatch.setattr(run, "resolve", refuse)
    assert decode.main([]) == 2
    assert "no CUDA driver" in capsys.readouterr().err


def test_the_results_of_decoding_are_shown_from_their_file(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h100-80gb-hbm3"
    folder.mkdir()
    document = {"problem": DECODE.describe(), "environment": GPU.to_json(), **summary(0.8)}
    (folder / "retention_decode.json").write_text(json.dumps(document))
    files = site.build(tmp_path)
    us = decode.bytes_of_step(DECODE) / 3200e3
    assert f"| in place | {us:.1f} | 3200 | 80% |" in files["results.md"]
    assert "of the 4000 GB/s of a copy" in files["results.md"]
    assert ">80%</td>" in files["report.html"]


# --- fla --------------------------------------------------------------------------------------------


def test_fla_tunes_once_for_each_pair_of_dims() -> None:
    problems = [t.problem for t in trials(["retention"], modes=["forward"])]
    classes = fla.tuned_classes(problems)
    pairs = [(p.heads_q, p.dim_qk, p.dim_v) for p in classes]
    assert sorted(pairs) == [
        (8, 256, 256), (8, 256, 512), (16, 128, 128), (16, 128, 256), (32, 64, 64),
    ]  # fmt: skip
    assert set(classes) <= set(problems)


@pytest.mark.parametrize(("missing", "reason"), [("triton", "triton"), ("fla", "fla"), ("", "")])
def test_absent_packages_are_named(
    missing: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fla, "find_spec", lambda name: None if name == missing else object())
    assert fla.absence() == (f"{reason} is not installed" if reason else "")
    problem = trials(["retention"])[0].problem
    assert BASELINES["fla"].available(problem) == fla.absence()
    assert "heads" in BASELINES["fla"].available(replace(problem, heads_kv=2))


def test_the_output_is_the_first_of_flas_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def chunk_retention(*tensors: Any) -> tuple[Any, None]:
            return tensors, None

    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, Module())
    monkeypatch.setitem(sys.modules, "fla.ops.retention", Module())
    assert fla.chunk_retention(1, 2, 3) == (1, 2, 3)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (64, 128)])
def test_a_copy_moves_the_bytes_of_keys_and_values(dims: tuple[int, int]) -> None:
    problem = Problem(batch=1, seqlen_q=1, seqlen_k=640, dim_qk=dims[0], dim_v=dims[1])
    inputs = make_inputs(problem, seed=0, device="cpu")
    copied = BASELINES["copy"].function(problem)(inputs.q, inputs.k, inputs.v)
    assert 2 * copied.nbytes == inputs.k.nbytes + inputs.v.nbytes
    source = inputs.k if dims[0] >= dims[1] else inputs.v
    assert torch.equal(copied, source.flatten()[: copied.numel()])


class Config:
    def __init__(self, number: int) -> None:
        self.number = number

    def all_kwargs(self) -> dict[str, Any]:
        return {"number": self.number}


class Kernel:
    """Compiles unless the configuration is the last one."""

    def __init__(self) -> None:
        self.compiled: list[int] = []

    def run(self, *args: Any, number: int, warmup: bool, grid: int) -> None:
        assert warmup, "nothing is launched"
        if number == 8:
            raise RuntimeError("out of resources")
        self.compiled.append(number)


def tuner(cached: bool) -> Any:
    """Triton's tuner as far as it is replaced."""

    class Autotuner:
        def __init__(self) -> None:
            self.fn = Kernel()
            self.kept: list[str] = []

        def check_disk_cache(self, key: Any, configs: Any, benchmark: Callable[[], None]) -> bool:
            if cached:
                return True
            benchmark()
            self.kept.append(key)
            return False

    return Autotuner


@pytest.mark.parametrize("share", range(fla.SHARES))
def test_a_share_of_the_configurations_is_compiled_and_no_choice_kept(share: int) -> None:
    kind = tuner(cached=False)
    fla._only_compile(kind, share)
    instance = kind()
    times: list[list[float]] = []

    def benchmark() -> None:
        times.extend(
            instance._bench(config=Config(number), warmup=False, grid=1) for number in range(9)
        )

    assert instance.check_disk_cache("key", [], benchmark) is False
    assert instance.kept == []
    mine = [number for number in range(9) if (number + 1) % fla.SHARES == share]
    assert instance.fn.compiled == [number for number in mine if number != 8]
    finite = [number for number, time in enumerate(times) if time[0] < float("inf")]
    assert finite == instance.fn.compiled


def test_choices_that_are_cached_are_used() -> None:
    kind = tuner(cached=True)
    fla._only_compile(kind, 0)

    def benchmark() -> None:
        raise AssertionError("nothing is to be tried")

    assert kind().check_disk_cache("key", [], benchmark) is True


def test_baselines_get_ready_where_they_are_available(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(
        fla.Fla, "get_ready", lambda self, problems, jobs: calls.append((len(problems), jobs))
    )
    session = session_of(trials(["retention"]), jobs=16)
    for reason in ("", "fla is not installed"):
        monkeypatch.setattr(fla, "absence", lambda reason=reason: reason)
        session.get_ready()
    assert calls == [(16, 16)]


def test_the_folder_around_flash_attn_4_is_not_flash_attn_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert FlashAttention2().absence() == "flash-attn 2 is not installed"
    (tmp_path / "flash_attn" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert not FlashAttention2().absence()
