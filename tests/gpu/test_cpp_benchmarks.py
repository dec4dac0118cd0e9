"""The C++ benchmarks on a real GPU: the same kernels as from Python, correct results, and equal times."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from attention_autotuner.arch import detect, probe
from attention_autotuner.arch.resolution import native_arch
from attention_autotuner.codegen.artifact import Artifact
from attention_autotuner.codegen.bundle import BundledPick, write_bundle
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.problem import Problem, of_shape
from benchmarks.cpp_agreement import (
    Agreement,
    build_kernels,
    build_programs,
    compare,
    measure_here,
    run_programs,
)
from tests.cpp_programs import ROOT, ask, cmake, run

pytestmark = [pytest.mark.gpu, pytest.mark.build]

FORWARD = of_shape((4, 16, 2048, 64, 64))
BACKWARD = of_shape((4, 16, 1024, 64, 64), direction="backward", causal=True)
RETENTION = of_shape((8, 16, 2048, 64, 64), op="retention", causal=True)
# Six cases of four kernels; one case is so short that it is replayed from a graph.
PROBLEMS = (
    FORWARD,
    replace(FORWARD, causal=True, heads_kv=4),
    of_shape((1, 8, 256, 64, 64)),
    BACKWARD,
    RETENTION,
    replace(RETENTION, direction="backward"),
)
ODD = (
    replace(FORWARD, batch=1, seqlen_q=333, seqlen_k=517, causal=True, dim_v=56),
    replace(BACKWARD, batch=1, heads_kv=4, seqlen_q=517, seqlen_k=333, dim_qk=56),
    replace(RETENTION, batch=1, heads_kv=4, seqlen_q=333, seqlen_k=333),
)


@dataclass(frozen=True, kw_only=True)
class Built:
    """Programs and kernels of these tests.

    Attributes:
        programs: folder of the programs.
        bundle: folder of the kernels.
        artifacts: the kernel of every problem.
    """

    programs: Path
    bundle: Path
    artifacts: list[Artifact]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    policy, toolchain = detect(0), find_toolchain()
    root = tmp_path_factory.mktemp("cpp")
    by_kind = {(p.op, p.direction): policy.default(p) for p in reversed(PROBLEMS)}
    candidates = [by_kind[p.op, p.direction] for p in PROBLEMS]
    with ThreadPoolExecutor() as pool:  # CMake builds programs and kernels in parallel
        programs = pool.submit(build_programs, root / "build", toolchain)
        artifacts = build_kernels(candidates, policy)
        picks = [
            BundledPick(problem=p.bucketed(), candidate=candidate, layer="default")
            for p, candidate in zip(PROBLEMS, candidates, strict=True)
        ]
        write_bundle(
            root / "bundle",
            arch=policy.name,
            build_arch=native_arch(probe(0).compute_capability),
            artifacts=artifacts,
            picks=picks,
        )
        return Built(
            programs=programs.result(),
            bundle=root / "bundle",
            artifacts=[artifacts[candidate] for candidate in candidates],
        )


def test_python_and_cpp_serve_one_kernel_and_time_it_alike(built: Built) -> None:
    agreements = compare(
        PROBLEMS,
        built.artifacts,
        bundle=built.bundle,
        programs=built.programs,
        measure=measure_here,
    )

    def line(agreement: Agreement) -> str:
        a = agreement
        return f"{a.problem.describe()}: {a.ratio:.3f} {a.python_us} {a.cpp_us} {a.error}"

    assert [agreement.digest for agreement in agreements] == [
        agreement.cpp_digest for agreement in agreements
    ]
    assert all(agreement.agrees for agreement in agreements), "\n".join(map(line, agreements))


@pytest.mark.parametrize("problem", ODD, ids=Problem.describe)
def test_odd_shapes_are_right(built: Built, problem: Problem) -> None:
    (result,) = run_programs(built.programs, built.bundle, [problem], check=True)
    assert result["error"] is None
    assert result["verified"] is True
    assert result["median_us"] > 0


def test_the_environment_stands_beside_the_figures(built: Built, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    command: list[str | Path] = [
        built.programs / "bench_attention",
        "--bundle",
        built.bundle,
        "--every-pick",
    ]
    run(*command, "--json", output, "--csv", tmp_path / "out.csv")
    document = json.loads(output.read_text(encoding="utf-8"))
    environment = document["environment"]
    properties = torch.cuda.get_device_properties(0)
    assert environment["gpu_name"] == properties.name
    assert environment["num_sms"] == properties.multi_processor_count
    assert environment["l2_bytes"] == properties.L2_cache_size
    assert environment["driver"]
    assert len(document["results"]) == 3
    assert (tmp_path / "out.csv").read_text(encoding="utf-8").count("\n") == 4


def test_a_peak_is_measured(built: Built, tmp_path: Path) -> None:
    output = tmp_path / "ceilings.json"
    program = built.programs / "bench_gemm_ceiling"
    run(program, "--which", "mma_fp16,hbm_copy", "--seconds", "0.2", "--json", output)
    assert '"error": null' in output.read_text(encoding="utf-8")


def test_a_program_without_python_computes_attention_and_its_gradients(
    built: Built, tmp_path: Path
) -> None:
    toolchain = find_toolchain()
    if not list(toolchain.cuda_root.glob("lib*/libcudart.so")):
        pytest.skip(f"{toolchain.cuda_root} has no shared CUDA runtime to link")
    run(toolchain.cmake, "--install", built.programs.parents[1] / "client", "--prefix", tmp_path)
    options = (f"-DCMAKE_PREFIX_PATH={tmp_path}", f"-DCUDAToolkit_ROOT={toolchain.cuda_root}")
    cmake(toolchain, ROOT / "examples" / "cpp", tmp_path / "example", *options)
    done = ask(tmp_path / "example" / "attention", built.bundle, "64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right") == 4
