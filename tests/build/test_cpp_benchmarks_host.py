"""The C++ benchmarks over kernels that run on the host, and that nvcc compiles what they ask of a GPU."""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attention_autotuner.arch import Policy, resolve
from attention_autotuner.codegen.artifact import Artifact
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.codegen.tools import clean_environment
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.identity import values_of
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import ToolchainError
from attention_autotuner.tuning import devices, sampling
from attention_autotuner.tuning.racing import Race
from benchmarks import cpp_agreement
from benchmarks.cpp_agreement import PROGRAMS, compare, configure, report, run_programs
from tests.cpp_programs import (
    FAKE_KERNELS,
    RETENTION,
    ROOT,
    SMALL,
    Fake,
    ask,
    compile_library,
    run,
    write_fake_bundle,
)
from tests.fake_bundles import publish

pytestmark = pytest.mark.build

NAMES = sorted({*PROGRAMS.values(), "bench_gemm_ceiling"})
OUTPUTS = {
    "attention_forward_fake": ["o", "lse"],
    "attention_backward_fake": ["dq", "dk", "dv"],
    "retention_forward_fake": ["o"],
    "retention_forward_decoding": ["o", "final_state"],
    "retention_backward_fake": ["dq", "dk", "dv"],
}


@pytest.fixture(scope="module")
def programs(cpp_programs: Path) -> Path:
    """The folder of the benchmarks."""
    return cpp_programs / "benchmarks"


def results_of(path: Path) -> list[dict[str, Any]]:
    actual: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return actual


def test_every_pick_of_a_bundle_is_checked_timed_and_written(
    programs: Path, fake_bundle: Path, tmp_path: Path
) -> None:
    seen = {}
    for name in dict.fromkeys(PROGRAMS.values()):
        files = (tmp_path / f"{name}.json", tmp_path / f"{name}.csv")
        run(
            programs / name,
            "--bundle",
            fake_bundle,
            "--every-pick",
            "--json",
            files[0],
            "--csv",
            files[1],
        )
        document = json.loads(files[0].read_text(encoding="utf-8"))
        assert document["benchmark"] == name
        assert document["protocol"] == {
            "rounds": 10, "rest": 0, "warm_up_seconds": devices.WARM_UP_SECONDS,
            "l2": "cold", "samples": 64, "seed": 0,
        }  # fmt: skip
        assert document["environment"]["gpu_name"] == 'a "host", at best'
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*\+00:00", document["environment"]["time_utc"])
        with files[1].open(newline="", encoding="utf-8") as file:
            table = list(csv.DictReader(file))
        for row, result in zip(table, document["results"], strict=True):
            assert row["gpu_name"] == 'a "host", at best'
            assert float(row["median_us"]) == result["median_us"]
            assert row["case"] == result["case"]
            seen[result["kernel"]] = result
    index = json.loads((fake_bundle / "index.json").read_text(encoding="utf-8"))
    digests = {kernel["name"]: kernel["digest"] for kernel in index["kernels"]}
    for fake in FAKE_KERNELS:
        result = seen[fake.name]
        assert Problem(**result["problem"]) == fake.problem
        assert result["case"] == fake.problem.describe()
        assert result["digest"] == digests[fake.name]
        assert (result["layer"], result["exact"], result["error"]) == ("default", True, None)
        assert result["verified"] is True
        assert [check["output"] for check in result["checks"]] == OUTPUTS[fake.name]
        for check in result["checks"]:
            assert check["reason"] == ""
            assert 0 < check["max_error"] <= check["max_allowed"]
        seconds = result["median_us"] * 1e-6
        assert result["tflops"] * 1e12 * seconds == pytest.approx(fake.problem.flops, rel=1e-6)
        assert result["gbytes_per_s"] * 1e9 * seconds == pytest.approx(
            fake.problem.bytes_moved, rel=1e-6
        )


ODD = (
    replace(SMALL, seqlen_q=19, seqlen_k=45, causal=False, heads_q=4, heads_kv=2, batch=2),
    replace(SMALL, seqlen_q=45, seqlen_k=19),  # the first rows see no key
    replace(SMALL, seqlen_q=19, seqlen_k=45, causal_alignment="top_left"),
    replace(SMALL, seqlen_q=21, seqlen_k=33, direction="backward", heads_q=4, heads_kv=2, batch=2),
    replace(SMALL, seqlen_q=33, seqlen_k=21, direction="backward"),
    replace(RETENTION, seqlen_q=41, seqlen_k=41, heads_q=4, heads_kv=2, batch=2),
    replace(RETENTION, seqlen_q=1, seqlen_k=1, batch=3, form="recurrent"),
    replace(RETENTION, seqlen_q=41, seqlen_k=41, heads_q=4, heads_kv=2, direction="backward"),
)  # fmt: skip


def test_odd_shapes_are_right(programs: Path, tmp_path: Path) -> None:
    bundle = write_fake_bundle(tmp_path)
    index = json.loads((bundle / "index.json").read_text(encoding="utf-8"))
    index["picks"].append(
        index["picks"][0] | {"problem": values_of(replace(SMALL, causal=False)), "kernel": 0}
    )
    (bundle / "index.json").write_text(json.dumps(index), encoding="utf-8")
    for problem, result in zip(ODD, run_programs(programs, bundle, ODD, check=True), strict=True):
        assert result["error"] is None, f"{problem.describe()}: {result}"
        assert result["verified"] is True


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("-DNO_WORK",), "elements are not finite"),
        (("-DLAUNCH_STATUS=2",), "cannot launch it: a bad shape (status 2"),
        (("-DPREPARE_STATUS=4",), "cannot prepare it on device 0"),
        (("-DPREPARE_STATUS=4",), "kernel attention_forward_fake, built for sm_80 and newer)"),
        (("-DLEAKS",), "bytes beside lse changed"),
        (("-DVARIES",), "two runs on the same input differ in lse"),
        (("-DLSE_BIAS=0.05f",), "lse: largest error"),
        (("-DO_FACTOR=1.01f",), "o: largest error"),
    ],
)
def test_wrong_kernels_are_found_out(
    programs: Path, tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    bundle = write_fake_bundle(tmp_path, [replace(FAKE_KERNELS[0], options=options)])
    json_file = tmp_path / "out.json"
    done = ask(
        programs / "bench_attention", "--bundle", bundle, "--every-pick", "--json", json_file
    )
    assert done.returncode == 1, done.stdout
    (result,) = results_of(json_file)
    assert reason in result["error"]
    assert reason in done.stdout
    assert "median_us" not in result


def test_another_dtype_is_no_excuse(programs: Path, tmp_path: Path) -> None:
    problem = replace(SMALL, dtype="bf16")  # which the kernel takes for fp16
    bundle = write_fake_bundle(tmp_path, [replace(FAKE_KERNELS[0], problem=problem)])
    (result,) = run_programs(programs, bundle, [problem], check=True)
    assert result["error"]
    (result,) = run_programs(programs, bundle, [problem], check=False)
    assert result["error"] is None
    assert result["verified"] is False


def test_one_library_is_measured_without_a_bundle(programs: Path, tmp_path: Path) -> None:
    library = compile_library(tmp_path, FAKE_KERNELS[0])
    record = {"digest": "d" * 64, "kernel_digest": "e" * 64}
    (tmp_path / "build.json").write_text(json.dumps(record), encoding="utf-8")
    command: list[str | Path] = [programs / "bench_attention", "--library", library, "--causal"]
    command += [
        "--batch",
        "1",
        "--heads",
        "2",
        "--heads-kv",
        "1",
        "--seqlen",
        "16,24",
        "--dim-qk",
        "64",
    ]
    command += ["--dim-v", "48", "--rounds", "4", "--seed", "3", "--json", tmp_path / "out.json"]
    run(*command)
    first, second = results_of(tmp_path / "out.json")
    assert (first["digest"], first["layer"]) == ("d" * 64, None)
    assert (first["problem"]["seqlen_q"], second["problem"]["seqlen_k"]) == (16, 24)
    assert first["rounds"] == 4
    wrong = ask(programs / "bench_attention_backward", *command[1:-1], tmp_path / "other.json")
    assert wrong.returncode == 1
    assert (
        "the params are of attention backward, the kernel is attention_forward_fake" in wrong.stdout
    )


def test_short_kernels_are_replayed_and_sets_rotated(programs: Path, tmp_path: Path) -> None:
    library = compile_library(tmp_path, replace(FAKE_KERNELS[0], options=("-DNO_WORK",)))
    command: list[str | Path] = [
        programs / "bench_attention",
        "--library",
        library,
        "--samples",
        "0",
    ]
    command += ["--seqlen", "64", "--batch", "1", "--heads", "1", "--dim-qk", "64", "--dim-v", "48"]
    command += ["--json", tmp_path / "out.json"]
    run(*command)
    (cold,) = results_of(tmp_path / "out.json")
    assert cold["graph"] is True
    assert cold["input_sets"] == int(3.0 * 65536 / (2 * 2 * 64 * 112)) + 2
    assert cold["launches_a_round"] == 64
    assert cold["launches_a_round"] % cold["input_sets"] == 0
    run(*command, "--warm-l2")
    (warm,) = results_of(tmp_path / "out.json")
    assert warm["input_sets"] == 1


def test_the_protocol_is_that_of_python(cpp_programs: Path) -> None:
    source = (ROOT / "benchmarks" / "cpp" / "measure.cpp").read_text(encoding="utf-8")
    source += (ROOT / "benchmarks" / "cpp" / "measure.hpp").read_text(encoding="utf-8")
    actual = dict(re.findall(r"constexpr \w+ k(\w+) = ([\d'.e]+);", source))
    expected = {
        "GraphBelowUs": sampling.GRAPH_BELOW_US,
        "SampleUs": sampling.SAMPLE_US,
        "MaxLaunches": sampling.MAX_LAUNCHES,
        "MaxInputSets": sampling.MAX_INPUT_SETS,
        "RotationOverL2": sampling.ROTATION_OVER_L2,
        "MaxMemoryShare": sampling.MAX_MEMORY_SHARE,
        "HeadStartCycles": sampling.HEAD_START_CYCLES,
        "HeadStartCyclesASecond": sampling.HEAD_START_CYCLES_A_SECOND,
        "MaxHeadStartCycles": sampling.MAX_HEAD_START_CYCLES,
        "WarmUpSeconds": devices.WARM_UP_SECONDS,
    }
    assert {name: float(text.replace("'", "")) for name, text in actual.items()} == expected

    source_of = random.Random(4)
    samples = [[source_of.uniform(1, 2) for _ in range(n)] for n in (1, 2, 3, 4, 5, 10, 11, 24)]
    asked = [("stats " + " ".join(map(repr, values))) for values in samples]
    asked += [
        "sets 1e5 62914560 1e11",
        "sets 5e8 62914560 1e11",
        "sets 1e9 62914560 3e9",
        "sets 1e7 6e7 1e7",
    ]
    done = ask(cpp_programs / "probe", stdin="\n".join(asked) + "\n")
    lines = done.stdout.splitlines()
    for values, line in zip(samples, lines[: len(samples)], strict=True):
        race = Race(["one"])
        for value in values:
            race.add({"one": value})
        (timing,) = race.results()
        middle, spread = map(float, line.split())
        assert middle == median(values) == timing.median_us
        assert spread == pytest.approx(timing.spread_us, abs=1e-15)
    assert lines[len(samples) :] == ["32 1", "2 1", "1 1", "1 1"]


@pytest.mark.parametrize("name", NAMES)
def test_help_names_every_flag_and_bad_ones_end_with_2(programs: Path, name: str) -> None:
    shown = run(programs / name, "--help")
    flags = re.findall(r"^  (--[\w-]+)", shown, re.MULTILINE)
    assert {"--device", "--json", "--csv", "--help"} <= set(flags)
    assert len(flags) == len(set(flags))
    for arguments, reason in (
        (["--frob"], "unknown option --frob"),
        (["--device", "x"], "--device must be a whole number of at least 0, got"),
        (["--json"], "--json needs a value"),
    ):
        done = ask(programs / name, *arguments)
        assert done.returncode == 2
        assert reason in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give either --bundle or --library"),
        (["--bundle", "x", "--library", "y"], "give either --bundle or --library"),
        (["--library", "x", "--every-pick"], "--every-pick needs --bundle"),
        (["--bundle", "x", "--every-pick", "--batch", "2"], "--batch names a problem by its sizes, --every-pick takes"),
        (["--bundle", "x", "--problem-json", "{}", "--causal"], "--causal names a problem by its sizes"),
        (["--bundle", "x", "--dim-qk", "7"], "dim_qk must be a positive multiple of 8, got 7"),
        (["--bundle", "x", "--seqlen", "16,,32"], "--seqlen must be a whole number"),
        (["--bundle", "x", "--rounds", "0"], "--rounds must be a whole number of at least 1"),
        (["--bundle", "x", "--rest", "-1"], "--rest must be a number from 0 to 100, got"),
        (["--bundle", "x", "--rest", "nan"], "--rest must be a number from 0 to 100, got"),
        (["--bundle", "x", "--dtype", "fp8"], "--dtype must be one of fp16, bf16"),
        (["--bundle", "x", "--problem-json", '{"op": "retention", "causal": true}'], "does not measure retention"),
        (["--bundle", "x", "--problem-json", "{"], "no problem in JSON"),
    ],
)  # fmt: skip
def test_contradictions_end_with_2(programs: Path, arguments: list[str], reason: str) -> None:
    done = ask(programs / "bench_attention", *arguments)
    assert done.returncode == 2
    assert reason in done.stderr


def test_what_is_missing_ends_with_1(programs: Path, fake_bundle: Path, tmp_path: Path) -> None:
    assert ask(programs / "bench_attention", "--bundle", tmp_path).returncode == 1
    done = ask(programs / "bench_attention", "--bundle", fake_bundle, "--device", "3")
    assert (done.returncode, "there is no device 3" in done.stderr) == (1, True)
    done = ask(programs / "bench_attention", "--bundle", fake_bundle, "--dim-qk", "32")
    assert (done.returncode, "has no kernel for" in done.stdout) == (1, True)


def test_peaks_that_cannot_be_measured_are_reported(programs: Path, tmp_path: Path) -> None:
    output = tmp_path / "ceilings.json"
    command: list[str | Path] = [
        programs / "bench_gemm_ceiling",
        "--seconds",
        "0.25",
        "--json",
        output,
    ]
    run(*command, "--which", "mma_fp16,wgmma_fp16,hbm_copy")
    first, second, third = results_of(output)
    assert (first["value"], first["spread"], first["samples"]) == (0.25e12, 1e9, 7)
    assert (first["measured_sm_clock_mhz"], third["measured_sm_clock_mhz"]) == (1500, None)
    assert (second["value"], second["error"]) == (None, "this device cannot")
    assert ask(*command, "--which", "launch").returncode == 1  # failed, rather than cannot
    done = ask(*command, "--which", "gemm")
    assert (done.returncode, 'knows no peak "gemm"' in done.stderr) == (2, True)
    assert ask(*command, "--seconds", "0").returncode == 2


def fake_artifact(bundle: Path, fake: Fake, digest: str | None = None) -> Artifact:
    """As much of an artifact as a comparison asks for."""
    index = json.loads((bundle / "index.json").read_text(encoding="utf-8"))
    known = {kernel["name"]: kernel for kernel in index["kernels"]}[fake.name]
    path = bundle / known["library"]
    return cast(
        "Artifact", SimpleNamespace(name=fake.name, digest=digest or known["digest"], path=path)
    )


def agreed(programs: Path, bundle: Path, fakes: Sequence[Fake], factor: float) -> dict[str, Any]:
    """A report in which Python's times are those of C++ times a factor."""
    times: dict[str, float] = {}

    def measured(problem: Problem, library: Path, rounds: int, rest: float) -> float:
        assert library.is_file()
        assert rest == 0.5
        (result,) = run_programs(programs, bundle, [problem], check=False, rounds=rounds)
        assert result["rounds"] == rounds
        times[problem.describe()] = result["median_us"]
        return float(result["median_us"]) * factor

    problems = [fake.problem for fake in fakes]
    artifacts = [fake_artifact(bundle, fake) for fake in fakes]
    actual = compare(
        problems,
        artifacts,
        bundle=bundle,
        programs=programs,
        measure=measured,
        repeats=1,
        rounds=3,
        rest=0.5,
    )
    return report(actual)


def test_agreement_is_judged_by_digest_and_time(programs: Path, fake_bundle: Path) -> None:
    document = agreed(programs, fake_bundle, FAKE_KERNELS, 100.0)
    assert not document["passed"]
    assert [case["digest"] == case["cpp_digest"] for case in document["cases"]] == [True] * 5
    assert all(0 < case["ratio"] < 0.5 and not case["agrees"] for case in document["cases"])
    assert json.loads(json.dumps(document, allow_nan=False))["passed"] is False
    agreement = compare(
        [SMALL],
        [fake_artifact(fake_bundle, FAKE_KERNELS[0], "0" * 64)],
        bundle=fake_bundle,
        programs=programs,
        measure=lambda problem, library, rounds, rest: 1.0,
        repeats=1,
        rounds=3,
    )[0]
    same_time = replace(agreement, cpp_us=(1.02,))
    assert not same_time.agrees  # another digest
    assert replace(same_time, digest=agreement.cpp_digest).agrees
    assert not replace(same_time, digest=agreement.cpp_digest, cpp_us=(1.04,)).agrees
    assert not replace(same_time, digest=agreement.cpp_digest, error="wrong").agrees
    untimed = replace(same_time, cpp_us=(), error="wrong")
    document = report([same_time, untimed, agreement])
    assert document["worst_ratio"] is None  # a case without a time has none
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize("repeats", ["0", "-1", "x"])
def test_agreement_takes_a_positive_number_of_repeats(
    repeats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cpp_agreement.main(["--output", str(tmp_path / "x.json"), "--repeats", repeats])
    assert ended.value.code == 2
    assert "--repeats" in capsys.readouterr().err


def test_the_command_builds_a_bundle_and_writes_its_summary(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it but the GPU: picks of dispatch, a bundle as export writes it, programs, report."""
    problems = [fake.problem for fake in FAKE_KERNELS]
    sources = {(fake.problem.op, fake.problem.direction): fake for fake in FAKE_KERNELS}

    def build_fakes(candidates: Sequence[Candidate], _: Policy) -> dict[Candidate, Artifact]:
        store = Store(tmp_path / "store")
        made = {}
        for number, candidate in enumerate(dict.fromkeys(candidates)):
            folder = tmp_path / f"k{number}"
            folder.mkdir()
            fake = replace(sources[candidate.op, candidate.direction], name=candidate.name)
            content = compile_library(folder, fake).read_bytes()
            made[candidate] = publish(store, candidate, content=content)
        return made

    monkeypatch.setattr(cpp_agreement, "PROBLEMS", problems)
    monkeypatch.setattr(cpp_agreement, "ROUNDS", 3)
    monkeypatch.setattr(cpp_agreement, "detect", lambda device: resolve("A100"))
    monkeypatch.setattr(cpp_agreement, "build_programs", lambda folder, toolchain: programs)
    monkeypatch.setattr(cpp_agreement, "build_kernels", build_fakes)
    monkeypatch.setattr(cpp_agreement, "measure_here", lambda *asked: 1.0)
    output = tmp_path / "results" / "agreement.json"
    assert (
        cpp_agreement.main(["--output", str(output), "--repeats", "2"]) == 1
    )  # no host is so fast
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["passed"] is False
    assert (document["rounds"], document["rest"]) == (3, cpp_agreement.REST)
    for problem, case in zip(problems, document["cases"], strict=True):
        assert Problem(**case["problem"]) == problem
        assert case["digest"] == case["cpp_digest"]
        assert case["error"] == ""
        assert len(case["cpp_us"]) == len(case["python_us"]) == 2
        assert case["ratio"] > 1.03


def test_a_program_without_a_report_is_an_error(programs: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="there is no bundle at"):
        run_programs(programs, tmp_path, [SMALL], check=True)


def symbols(file: Path) -> set[str]:
    """The symbols that an object defines of the interface to a GPU, inline functions left out."""
    listed = [line.split(" ", 2)[1:] for line in run("nm", "--demangle", file).splitlines()]
    return {
        name for kind, name in filter(lambda pair: len(pair) == 2, listed)
        if kind == "T" and re.match(r"attention_autotuner::benchmarks::\w", name)
    }  # fmt: skip


def test_nvcc_compiles_what_the_host_stands_in_for(tmp_path: Path, cpp_programs: Path) -> None:
    toolchain = find_toolchain()
    everything = ("-DATTENTION_AUTOTUNER_ARCHS=80;89;90a", "-DCMAKE_CUDA_FLAGS_RELEASE=-O0")
    configure(tmp_path, toolchain, *everything)
    recipe = (tmp_path / "build.ninja").read_text(encoding="utf-8")
    assert all(f"sm_{arch}]" in recipe for arch in ("80", "89", "90a"))
    configure(tmp_path, toolchain, "-DATTENTION_AUTOTUNER_ARCHS=80")
    # The one object of the benchmarks that needs nvcc; the GPU tests link and run them all.
    part = "benchmarks/cpp/CMakeFiles/attention_autotuner_benchmarks.dir/gpu.cu.o"
    run(toolchain.ninja, "-C", tmp_path, part, environment=clean_environment())
    (host,) = cpp_programs.rglob("host_gpu.cpp.o")
    assert symbols(host) == symbols(tmp_path / part)
    assert "attention_autotuner::benchmarks::free_memory()" in symbols(tmp_path / part)
