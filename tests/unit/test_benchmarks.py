"""The benchmarks' pure parts: what is compared, how figures become verdicts, records and tables."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from attention_autotuner import settings
from attention_autotuner.arch import resolve
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import BuildFailed, LaunchFailed, Ok, Outcome, Wrong
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.reference import attention
from attention_autotuner.serving import dispatch
from attention_autotuner.tuning.lookup import Hit, Query
from attention_autotuner.tuning.measure import CallableEntry
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipped import ShippedRecords
from benchmarks import attention_forward, commands, comparison, report, verdict
from benchmarks.cases import GRIDS, Grid, column_label, row_label
from benchmarks.library_peers import make_sdpa
from benchmarks.peer import Peer
from benchmarks.peers import PEERS
from benchmarks.rivals import Meeting, Rivals
from tests.fake_benchmark import (
    GPU,
    LONG,
    POLICY,
    SHORT,
    WIDE,
    FakeMeasurer,
    FakePipeline,
    candidates_of,
    run_search,
)

GRID = GRIDS["attention_forward"]


# --- cases and peers ------------------------------------------------------------------------------


def test_the_grid_is_the_published_one() -> None:
    assert len(GRID.problems) == len(set(GRID.problems)) == 36
    for problem in GRID.problems:
        assert problem.batch * problem.seqlen_q == 16384
        assert problem.heads_q * problem.dim_qk == problem.heads_kv * problem.dim_v == 2048
        assert (problem.dtype, problem.seqlen_q) == ("fp16", problem.seqlen_k)
    assert {(p.dim_qk, p.causal) for p in GRID.problems} == {
        (dim, causal) for dim in (64, 128, 256) for causal in (False, True)
    }
    rows = [row_label(p) for p in GRID.problems]
    assert list(dict.fromkeys(rows)) == [
        "d64", "d64 causal", "d128", "d128 causal", "d256", "d256 causal",
    ]  # fmt: skip
    assert [column_label(p) for p in GRID.problems[:6]] == ["512", "1k", "2k", "4k", "8k", "16k"]
    assert column_label(replace(SHORT, seqlen_k=1000)) == "1000"
    assert row_label(replace(SHORT, dim_v=128)) == "d64/128"


def test_a_part_of_the_grid_is_chosen_by_words() -> None:
    assert len(GRID.only([]).problems) == 36
    part = GRID.only(["d64", "causal"])
    assert {(p.dim_qk, p.causal) for p in part.problems} == {(64, True)}
    with pytest.raises(ValueError, match="d96"):
        GRID.only(["d96"])


def test_every_benchmark_has_a_grid_peers_and_bars_that_name_them() -> None:
    assert set(PEERS) == set(GRIDS) >= set(verdict.BARS)
    for benchmark, bars in verdict.BARS.items():
        assert set(bars) <= set(comparison.contests(PEERS[benchmark]))


def test_sdpa_refuses_what_it_masks_otherwise() -> None:
    peer = PEERS["attention_forward"]["sdpa_flash"]
    assert peer.refusal(LONG) == ""
    assert peer.refusal(replace(SHORT, seqlen_q=4)) == ""
    assert "top-left" in peer.refusal(replace(LONG, seqlen_q=4))
    assert peer.refusal(replace(LONG, seqlen_q=4, causal_alignment="top_left")) == ""


@pytest.mark.parametrize("problem", [SHORT, LONG], ids=Problem.describe)
def test_an_sdpa_peer_computes_our_attention(problem: Problem) -> None:
    small = replace(problem, heads_q=4, heads_kv=2, seqlen_q=9, seqlen_k=9, dim_qk=16, dim_v=16)
    tensors = [torch.randn(2, heads, 9, 16) for heads in (4, 2, 2)]
    found = make_sdpa(SDPBackend.MATH)(small)(*tensors)
    torch.testing.assert_close(found, attention(*tensors, causal=small.causal)[0])


# --- comparing ------------------------------------------------------------------------------------

FLASH = Peer(
    name="sdpa_flash",
    title="Flash",
    entry=lambda problem: CallableEntry(name="sdpa_flash", function=lambda q, k, v: None),
    refusal=lambda problem: "too long" if problem.seqlen_q > 9000 else "",
)
PEER_MAP = {"sdpa_flash": FLASH}
OTHER = next(one for one in POLICY.legal(SHORT) if one != POLICY.default(SHORT))


def rivals(problem: Problem = SHORT, pick: Candidate | None = None) -> Meeting:
    default = POLICY.default(problem)
    return Meeting(
        plain=Rivals(
            problem=problem,
            pick=pick or default,
            layer="record" if pick else "default",
            default=default,
        )
    )


def meet(
    meetings: Sequence[Meeting],
    time_us: Callable[[Problem, str], float | Outcome],
    pipeline: FakePipeline | None = None,
) -> dict[str, dict[str, Any]]:
    rows = comparison.compare(
        meetings,
        PEER_MAP,
        pipeline or FakePipeline(),
        FakeMeasurer(time_us),
        seconds=1.0,
        device_type=None,
        environment=lambda: replace(GPU, sm_clock_mhz=1700.0),
        say=lambda line: None,
    )
    return {row["name"]: row for row in rows}


def test_ratios_are_paired_and_come_with_each_ones_own_figures() -> None:
    row = meet([rivals()], lambda problem, name: 120.0 if name == "sdpa_flash" else 100.0)[
        SHORT.describe()
    ]
    assert row["pick"] == row["default"] == POLICY.default(SHORT).name
    assert row["layer"] == "default"
    assert row["gain_over_default"] is None
    assert row["ratios"]["sdpa_flash"]["ratio"] == pytest.approx(1.2)
    assert set(row["entries"]) == {"pick", "sdpa_flash"}
    assert row["entries"]["pick"]["tflops"] == pytest.approx(SHORT.flops / 100.0 / 1e6)
    assert row["clocks"]["sm_clock_mhz"] == 1700.0
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize(
    ("us", "picked", "layer"), [(95.0, OTHER, "record"), (99.5, POLICY.default(SHORT), "default")]
)
def test_a_pick_must_beat_the_default_here_too(us: float, picked: Candidate, layer: str) -> None:
    time = {OTHER.name: us, "sdpa_flash": 110.0}
    row = meet([rivals(pick=OTHER)], lambda problem, name: time.get(name, 100.0))[SHORT.describe()]
    assert (row["pick"], row["layer"]) == (picked.name, layer)
    assert row["gain_over_default"] == pytest.approx(100.0 / us - 1.0)
    assert set(row["entries"]) == {"pick", "default", "sdpa_flash"}
    ours = us if picked == OTHER else 100.0
    assert row["ratios"]["sdpa_flash"]["ratio"] == pytest.approx(110.0 / ours)


def test_a_pick_that_is_wrong_is_not_timed_and_the_default_takes_its_place() -> None:
    pipeline = FakePipeline(
        verify_outcome=lambda name: Wrong(reason="off") if name == OTHER.name else Ok()
    )
    row = meet([rivals(pick=OTHER)], lambda problem, name: 100.0, pipeline)[SHORT.describe()]
    assert row["pick"] == POLICY.default(SHORT).name


def test_losses_without_a_time_are_missed_bars() -> None:
    pipeline = FakePipeline(build_outcome=lambda name: BuildFailed(reason="no"))
    rows = meet([rivals()], lambda problem, name: 100.0, pipeline)
    row = rows[SHORT.describe()]
    assert row["entries"]["pick"]["outcome"]["kind"] == "build_failed"
    assert row["ratios"] == {}
    assert "build_failed: no" in comparison.describe(row)
    good = meet([rivals(LONG)], lambda problem, name: 100.0)[LONG.describe()]
    summary = verdict.summarise("attention_forward", [row, good], PEER_MAP)
    assert SHORT.describe() in summary["sdpa_flash"]["missed"]


def test_peers_that_refuse_or_fail_are_reported_as_such() -> None:
    far = replace(SHORT, seqlen_q=16384, seqlen_k=16384)
    failure = LaunchFailed(reason="no kernel image")
    rows = meet(
        [rivals(), rivals(far)],
        lambda problem, name: failure if name == "sdpa_flash" else 100.0,
    )
    assert rows[SHORT.describe()]["entries"]["sdpa_flash"]["outcome"]["reason"] == "no kernel image"
    assert rows[far.describe()]["entries"]["sdpa_flash"]["outcome"]["reason"] == "too long"
    assert verdict.summarise("attention_forward", list(rows.values()), PEER_MAP) == {}


def test_the_summary_names_the_worst_problem_and_the_missed_bars() -> None:
    speed = {SHORT: 96.0, LONG: 130.0, WIDE: 100.0}
    rows = meet(
        [rivals(problem) for problem in speed],
        lambda problem, name: speed[problem] if name == "sdpa_flash" else 100.0,
    )
    found = verdict.summarise("attention_forward", list(rows.values()), PEER_MAP)
    figures = found["sdpa_flash"]
    assert figures["problems"] == 3
    assert figures["geometric_mean"] == pytest.approx((0.96 * 1.3) ** (1 / 3))
    assert (figures["min"], figures["min_at"]) == (pytest.approx(0.96), SHORT.describe())
    assert figures["missed"] == ["min"]
    assert verdict.summarise("another", list(rows.values()), PEER_MAP)["sdpa_flash"]["missed"] == []


def test_an_interrupted_comparison_stops() -> None:
    measurer = FakeMeasurer(lambda problem, name: 100.0)
    measurer.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        list(
            comparison.compare(
                [rivals()], PEER_MAP, FakePipeline(), measurer, seconds=1.0,
                device_type=None, environment=lambda: GPU, say=lambda line: None,
            )
        )  # fmt: skip


# --- the whole run, without a GPU -----------------------------------------------------------------


@pytest.mark.parametrize(("us", "confirmed_pick"), [(80.0, "best"), (100.0, "default")])
def test_a_comparison_writes_settles_and_ships(
    us: float,
    confirmed_pick: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dispatch, "environment_of", lambda device, in_force: GPU)
    monkeypatch.setattr(commands, "collect", lambda: GPU)
    best = next(one for one in candidates_of(SHORT) if one != POLICY.default(SHORT))
    options = commands.parse(
        attention_forward.BENCHMARK,
        ["compare", "--results", str(tmp_path / "results"), "--ship", str(tmp_path / "tuned")],
    )
    with settings.override(cache_dir=tmp_path, mode="cached"):
        records = RecordStore(tmp_path / "records")
        tuning = FakePipeline(time_us=lambda problem, name: 80.0 if name == best.name else 100.0)
        run_search([SHORT], tuning, records)
        dispatch.invalidate()
        status = commands.compare(
            Grid(name="attention_forward", problems=(SHORT, LONG)),
            POLICY,
            FakePipeline(),
            records,
            options,
            FakeMeasurer(
                lambda problem, name: (
                    us if name == best.name else 120.0 if name == "sdpa_flash" else 100.0
                )
            ),
        )
    assert status == 0
    path = tmp_path / "results" / "nvidia-h100-80gb-hbm3" / "attention_forward.json"
    written = json.loads(path.read_text())
    assert [row["name"] for row in written["rows"]] == [SHORT.describe(), LONG.describe()]
    assert written["environment"]["gpu_name"] == GPU.gpu_name
    said = capsys.readouterr()
    assert "every bar is met" in said.err
    assert "| d64 causal |" in said.out
    query = Query(problem=SHORT, arch=POLICY.name, environment=GPU)
    for layer in (RecordStore(tmp_path / "records"), ShippedRecords(tmp_path / "tuned")):
        found = layer.find(query)
        assert isinstance(found, Hit)
        wanted = best if confirmed_pick == "best" else POLICY.default(SHORT)
        assert (found.record.candidate, found.record.confirmed) == (wanted, True)
        shipped = found.layer == "shipped"
        names = {one.candidate.name for one in found.record.entries}
        assert (names == {found.record.pick, found.record.default}) == shipped


def test_missed_bars_are_said_and_are_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dispatch, "environment_of", lambda device, in_force: GPU)
    monkeypatch.setattr(commands, "collect", lambda: GPU)
    options = commands.parse(attention_forward.BENCHMARK, ["compare", "--results", str(tmp_path)])
    with settings.override(cache_dir=tmp_path, mode="off"):
        status = commands.compare(
            Grid(name="attention_forward", problems=(SHORT,)), POLICY, FakePipeline(),
            RecordStore(tmp_path), options,
            FakeMeasurer(lambda problem, name: 100.0),
        )  # fmt: skip
    assert status == 1
    assert "missed: sdpa_flash: geometric_mean" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = FakePipeline()
    monkeypatch.setattr(pipeline, "can_measure", lambda: False)
    monkeypatch.setattr(commands, "LocalPipeline", lambda policy, in_force: pipeline)
    monkeypatch.setattr(commands, "resolve", lambda name: resolve("H200"))
    arguments = ["tune", "--cache-dir", str(tmp_path), "--only", "d64"]
    assert attention_forward.main(arguments) == 2
    assert "no GPU" in capsys.readouterr().err

    def refuse(name: str | None) -> None:
        raise UnsupportedArchitectureError("this machine has no CUDA driver")

    monkeypatch.setattr(commands, "resolve", refuse)
    assert attention_forward.main(arguments) == 2
    assert "no CUDA driver" in capsys.readouterr().err


def test_run_is_both_halves_each_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Done:
        returncode = 0

    def run(command: list[str], **rest: Any) -> Done:
        commands.append(command)
        return Done()

    monkeypatch.setattr(subprocess, "run", run)
    assert attention_forward.main(["run", "--only", "d64", "--seed", "3"]) == 0
    assert [command[3:] for command in commands] == [
        [half, "--only", "d64", "--seed", "3"] for half in ("tune", "compare")
    ]
    Done.returncode = 1
    assert attention_forward.main(["run"]) == 1
    assert len(commands) == 3


# --- the README -----------------------------------------------------------------------------------


def small_document() -> dict[str, Any]:
    speed = {SHORT: 96.0, LONG: 130.0, WIDE: 100.0}
    rows = meet(
        [rivals(problem) for problem in speed],
        lambda problem, name: speed[problem] if name == "sdpa_flash" else 100.0,
    )
    ordered = [rows[problem.describe()] for problem in speed]
    return verdict.document("attention_forward", ordered, PEER_MAP, POLICY, GPU)


def test_the_table_shows_gains_and_losses_alike() -> None:
    lines = report.forward_section(small_document())
    assert lines[0] == "### Attention forward on NVIDIA H100 80GB HBM3"
    table = [line for line in lines if line.startswith("|")]
    short, long, wide = (p.flops / 100.0 / 1e6 for p in (SHORT, LONG, WIDE))
    assert table == [
        "| | 512 | 4k |",
        "|---|---|---|",
        f"| d64 | {short:.0f} (**0.96**) |  |",
        f"| d64 causal |  | {long:.0f} (1.30) |",
        f"| d128 | {wide:.0f} (1.000) |  |",
    ]
    assert any("geometric mean 1.077, least 0.960 (attention forward" in line for line in lines)
    assert lines[-1].startswith("NVIDIA H100 80GB HBM3, driver 580.1, CUDA 13.0.88, torch 2.13.0")
    assert "SM clock after each race 1700 to 1700 MHz" in lines[-1]


def test_without_a_compiler_the_runtime_says_which_cuda() -> None:
    document = small_document()
    document["environment"] |= {"nvcc": None, "cuda_runtime": "13.0"}
    assert ", CUDA 13.0, torch" in report.forward_section(document)[-1]


def test_the_readme_is_rewritten_between_its_markers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    arguments = [
        "--results",
        str(results),
        "--readme",
        str(readme),
        "--docs",
        str(tmp_path / "docs"),
    ]
    assert report.main(arguments) == 0
    assert readme.read_text() == f"before\n{report.BEGIN}\n{report.NOTHING}\n{report.END}\nafter\n"
    folder = results / "nvidia-h100-80gb-hbm3"
    folder.mkdir(parents=True)
    (folder / "attention_forward.json").write_text(json.dumps(small_document()))
    assert report.main([*arguments, "--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert report.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n### Attention forward on")
    assert text.endswith(f"\n{report.END}\nafter\n")
    assert report.main([*arguments, "--check"]) == 0


@pytest.mark.parametrize(
    "text", ["", report.BEGIN, f"{report.END}{report.BEGIN}", report.BEGIN * 2]
)
def test_markers_must_be_there_once_and_in_order(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        report.replace_between_markers(text, "new")
