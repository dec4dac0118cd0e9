"""The matrix product of family sm90: Python and the headers agree, it compiles cleanly, and computes when emulated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.gemm_sm90.knobs import GemmSm90Knobs
from attention_autotuner.kernels.gemm_sm90.resources import workspace_bytes
from attention_autotuner.kernels.gemm_sm90.rules import GEMM_SM90_PREDICATES
from attention_autotuner.kernels.legality import check_kernel
from attention_autotuner.operations.gemm.problem import of_sizes
from attention_autotuner.operations.params import params_of
from tests.cpp_mirror import asserted, compare_traits, compile_host, source_of
from tests.cpp_programs import ask, index_of, kernel_of, pick_of, run
from tests.emulation.build import build
from tests.emulation.check import check

pytestmark = pytest.mark.build

PLAIN = Candidate.of(of_sizes(64, 64, 64), GemmSm90Knobs(block_m=128, block_n=128, stages=4))


def gemm_candidate(copy_bytes: Any = 16, **knobs: Any) -> Candidate:
    return replace(PLAIN, copy_bytes=copy_bytes, knobs=replace(PLAIN.knobs, **knobs))


ILLEGAL = {
    "tma_needs_alignment": gemm_candidate(2),
    "block_m_fills_warpgroups": gemm_candidate(block_m=64),
    "block_n_known": gemm_candidate(block_n=96),
    "stages_range": gemm_candidate(stages=1),
    "cluster_splits_columns": gemm_candidate(block_n=192, cluster=2),
    "fragments_fit_warpgroup": gemm_candidate(block_m=256, block_n=256, stages=2),
}


def test_every_rule_has_its_static_assert_and_memory_is_counted_alike(tmp_path: Path) -> None:
    assert ILLEGAL.keys() == GEMM_SM90_PREDICATES.keys()
    for name, candidate in ILLEGAL.items():
        rejection = check_kernel(candidate)
        assert rejection is not None
        assert rejection.predicate == name
    too_large = gemm_candidate(stages=8)
    assert check_kernel(PLAIN) is check_kernel(too_large) is None
    result = compile_host(tmp_path, source_of([*ILLEGAL.values(), too_large]))
    assert asserted(result) == {*ILLEGAL, "smem_fits_block"}
    legal = H100().legal(of_sizes(4096, 4096, 4096))
    kernels = list(dict.fromkeys(candidate.compiled for candidate in legal))
    compare_traits(tmp_path, kernels)


@pytest.mark.parametrize(
    ("operands", "knobs", "rows"),
    [
        ("nn", {"schedule": "cooperative", "block_m": 128}, 141),
        ("tt", {"schedule": "ping_pong", "block_m": 64}, 136),
    ],
)
def test_it_computes_on_the_emulated_machine(
    operands: Any,
    knobs: dict[str, Any],
    rows: int,
    tmp_path_factory: pytest.TempPathFactory,
    cpp_programs: Path,
) -> None:
    small = of_sizes(rows, 136, 136, operands=operands, dtype="bf16")
    a, b = (x == "t" for x in operands)
    full = GemmSm90Knobs(block_n=64, stages=2, transposed_a=a, transposed_b=b, **knobs)
    # Beside the machine, which is compiled once.
    kernel = build(Candidate.of(small, full), tmp_path_factory.getbasetemp() / "gemm" / operands)

    assert check(kernel, [small], [("random", 1)]).ok
    split = kernel.with_launch_knobs({"splits": 2, "row_blocks": 1})
    assert check(split, [small], [("lazy", 2)]).ok
    for loaded, splits in ((kernel, 1), (split, 2)):
        selected = Candidate.of(small, replace(full, splits=splits))
        assert loaded.workspace_bytes(params_of(small)) == workspace_bytes(small, selected)
    program = cpp_programs / "benchmarks" / "bench_gemm"
    sizes = ("--m", str(rows), "--n", "136", "--k", "136", "--splits", "2", "--rounds", "1")
    assert "TFLOP/s" in run(program, "--library", kernel.path, *sizes)
    bundle = tmp_path_factory.mktemp("bundle")
    library = Path(shutil.copy(kernel.path, bundle / "kernel.so"))
    picked = {**pick_of(small, 0), "launch": {"splits": 2, "row_blocks": 1}}
    index = index_of([kernel_of(kernel.info.name, library, bundle)], [picked])
    (bundle / "index.json").write_text(json.dumps(index), encoding="utf-8")
    of_bundle = (program, "--bundle", bundle, "--rounds", "1")
    named = (
        "--m",
        str(rows),
        "--n",
        "136",
        "--k",
        "136",
        "--dtype",
        "bf16",
        "--operands",
        operands,
    )
    bucketed = small.bucketed()
    assert f"{rows} x 136 x 136 {operands} bf16" in run(*of_bundle, *named)
    assert f"{bucketed.seqlen_q} x 136 x 136" in run(*of_bundle, "--every-pick")
    for command, reason in (
        (
            (program, "--library", kernel.path, "--n", "12"),
            "dim_v must be a positive multiple of 8",
        ),
        ((*of_bundle, "--every-pick", "--m", "8"), "--m names a problem"),
        ((*of_bundle, "--splits", "2"), "--splits is for --library"),
        ((program, "--library", kernel.path, "--operands", "nn"), "--operands is for --bundle"),
        ((*of_bundle, "--operands", "xy"), "--operands must be one of nn, nt, tn, tt"),
        ((program,), "give either --bundle or --library"),
    ):
        wrong = ask(*command)
        assert (wrong.returncode, reason in wrong.stderr) == (2, True), wrong.stderr
    missing = ask(*of_bundle, *named[:6], "--dtype", "fp16")
    assert (missing.returncode, "has no kernel for gemm" in missing.stderr) == (1, True)
