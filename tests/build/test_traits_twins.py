"""What Python says of a candidate and what the kernel headers say must be the same: rules and shared memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from attention_autotuner.arch import legality, resolve, resources
from attention_autotuner.codegen.candidate import Candidate
from attention_autotuner.codegen.knobs import ForwardKnobs
from attention_autotuner.codegen.problem import Problem
from attention_autotuner.codegen.render import include_root, render
from attention_autotuner.codegen.toolchain import find_toolchain
from tests.candidates import forward

pytestmark = pytest.mark.build

LEGAL = Candidate(
    family="sm80",
    dtype="fp16",
    class_qk=128,
    class_v=256,
    knobs=ForwardKnobs(
        block_m=64,
        block_n=64,
        warps_m=4,
        num_stages=2,
        k_slice=128,
    ),
)
# One candidate a rule, which breaks that rule; some break others on the way.
ILLEGAL = {
    "class_qk_range": forward(LEGAL, class_qk=272, k_slice=272),
    "class_v_range": forward(LEGAL, class_v=528),
    "warps_range": forward(LEGAL, warps_m=20, block_m=320),
    "row_barriers_available": forward(LEGAL, warps_m=16, warps_n=2, block_m=256),
    "block_m_divides_among_warps": forward(LEGAL, block_m=80),
    "block_n_divides_among_warps": forward(LEGAL, block_n=40),
    "v_slices_divide_class_v": forward(LEGAL, v_slices=3),
    "value_columns_divide_among_warps": forward(LEGAL, class_v=240, warps_n=2),
    "k_slice_divides_class_qk": forward(LEGAL, k_slice=48),
    "num_stages_range": forward(LEGAL, num_stages=5),
    "qk_ahead_needs_two_whole_stages": forward(LEGAL, qk_ahead=True, num_stages=1),
    "sliced_k_needs_two_stages": forward(LEGAL, k_slice=64, num_stages=1),
    "copy_bytes_known": forward(LEGAL, copy_bytes=4),  # what the rule is for
}
TOO_LARGE = forward(LEGAL, block_m=256, warps_m=16, block_n=128, num_stages=4)


def configs(candidates: list[Candidate], statement: str) -> str:
    """One translation unit with a Config per candidate, each followed by a statement about its traits."""
    lines = [
        "#include <cstdio>",
        "#include <cuda_bf16.h>",
        "#include <cuda_fp16.h>",
        "#include <attention_autotuner/attention_forward_traits.cuh>",
    ]
    for index, candidate in enumerate(candidates):
        found = re.search(r"struct Config \{.*?\n\};", render(candidate).text, re.DOTALL)
        assert found is not None
        lines.append(found.group(0).replace("struct Config", f"struct Config{index}", 1))
    lines.append("int main() {")
    lines += [statement.format(f"Config{index}") for index in range(len(candidates))]
    return "\n".join([*lines, "}", ""])


def compile_host(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    toolchain = find_toolchain()
    source = folder / "traits.cu"
    source.write_text(text, encoding="utf-8")
    includes = [f"-I{include_root()}", f"-I{toolchain.cutlass_include}"]
    command = [str(toolchain.nvcc), "-std=c++17", "-arch=sm_80", *includes, *toolchain.cuda_flags]
    return subprocess.run(
        [*command, "-o", str(folder / "traits"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_kernel_rule_has_its_static_assert(tmp_path: Path) -> None:
    assert ILLEGAL.keys() == legality.KERNEL_PREDICATES.keys()
    for name, candidate in ILLEGAL.items():
        reason = legality.KERNEL_PREDICATES[name](candidate)
        assert reason, name
        assert legality.KERNEL_PREDICATES[name](LEGAL) is None, name
    statement = 'std::printf("%d\\n", attention_autotuner::ForwardTraits<{}>::kSmemBytes);'
    result = compile_host(tmp_path, configs([*ILLEGAL.values(), TOO_LARGE], statement))
    assert result.returncode != 0
    asserted = set(
        re.findall(r'static assertion failed with "(\w+)"', result.stdout + result.stderr)
    )
    assert asserted == {*legality.KERNEL_PREDICATES, "smem_fits_block"}


def test_shared_memory_is_counted_alike(tmp_path: Path) -> None:
    policy = resolve("H100")
    dims = ((64, 64), (128, 128), (256, 512), (80, 48), (256, 256))
    candidates = [LEGAL]
    for dim_qk, dim_v in dims:
        legal = policy.legal(Problem(dim_qk=dim_qk, dim_v=dim_v))
        candidates += legal[:: max(1, len(legal) // 23)]
    statement = 'std::printf("%d\\n", attention_autotuner::ForwardTraits<{}>::kSmemBytes);'
    result = compile_host(tmp_path, configs(candidates, statement))
    assert result.returncode == 0, result.stderr
    printed = subprocess.run([tmp_path / "traits"], capture_output=True, text=True, check=True)
    counted = [int(line) for line in printed.stdout.split()]
    assert counted == [resources.smem_bytes(candidate) for candidate in candidates]
    for knob in ("num_stages", "q_in_registers", "k_slice", "v_slices", "warps_n", "block_n"):
        assert len({getattr(candidate.forward, knob) for candidate in candidates}) > 1, knob
