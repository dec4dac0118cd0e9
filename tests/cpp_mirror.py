"""Programs that print what the kernel headers compute for candidates at compile time, or fail their static_asserts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from attention_autotuner.arch import H100
from attention_autotuner.codegen.render import include_root, render
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import resources

TRAITS = {
    "keys": "attention_autotuner::KeyPassTraits<{0}>",
    "dq": "attention_autotuner::RowPassTraits<{0}, {0}::Dq, attention_autotuner::Result::kDq>",
    "dk": "attention_autotuner::RowPassTraits<{0}, {0}::Dk, attention_autotuner::Result::kDk>",
    "dv": "attention_autotuner::RowPassTraits<{0}, {0}::Dv, attention_autotuner::Result::kDv>",
}
# Entries check what is common to their passes.
RETENTION_TRAITS = {
    "chunkwise": ["attention_autotuner::ChunksEntry<{0}>::T"],
    "parallel": [
        "attention_autotuner::ForwardTraits<{0}>",
        "attention_autotuner::ParallelEntry<{0}>::T",
    ],
    "recurrent": ["attention_autotuner::RecurrentTraits<{0}>"],
    "auto": [
        f"attention_autotuner::ChunksBackwardEntry<{{0}}>::{name}" for name in ("Dq", "Dk", "Dv")
    ],
}


def traits_of(candidate: Candidate) -> list[str]:
    """The traits of a candidate's kernels, in the order they run, ``{0}`` standing for its config."""
    if candidate.kernel == "chunks_backward_sm90":
        return [
            f"attention_autotuner::ChunkBackwardTraits<{{0}}, "
            f"attention_autotuner::ChunkGradient::k{name}, false>"
            for name in ("Dq", "Dk", "Dv")
        ]
    if candidate.family == "sm90" and candidate.op == "retention":
        return ["attention_autotuner::ChunkSm90Traits<{0}, false>"]
    if candidate.kernel == "attention_backward_sm90":
        share = ", {0}::DqShare" if candidate.knobs.dq_share else ""
        return [
            f"attention_autotuner::BackwardPassSm90Traits<{{0}}, {{0}}::{name.capitalize()}, "
            f"attention_autotuner::GradientPass::k{name.capitalize()}{share}>"
            for name in candidate.knobs.passes
        ]
    if candidate.family == "sm90" and candidate.direction == "backward":
        names = {"dq": "Dq", "dk": "Dk", "dv": "Dv"}
        return [
            f"attention_autotuner::PassSm90Traits<{{0}}, {{0}}::{names[name]}, "
            f"attention_autotuner::Result::k{names[name]}>"
            if name in names
            else "attention_autotuner::StoredPassSm90Traits<{0}>"
            for name in candidate.knobs.passes
        ]
    if candidate.op == "gemm":
        return ["attention_autotuner::GemmSm90Traits<{0}>"]
    if candidate.kernel == "attention_forward_sm90":
        return ["attention_autotuner::AttentionForwardSm90Traits<{0}>"]
    if candidate.op == "retention":
        return RETENTION_TRAITS[candidate.form]
    if candidate.direction == "forward":
        return ["attention_autotuner::ForwardTraits<{0}>"]
    return [TRAITS[name] for name in candidate.knobs.passes]


def header_of(candidate: Candidate) -> str:
    """The header that defines the traits of a candidate's kernels."""
    if candidate.op == "retention" and candidate.kernel != "chunks_backward_sm90":
        headers = {
            "parallel": "scores_forward_sm80/retention_entry",
            "recurrent": "recurrent_sm80/mainloop",
        }
        if candidate.direction == "backward":
            return "chunks_sm80/backward_entry"
        default = "chunks_sm90/traits" if candidate.family == "sm90" else "chunks_sm80/entry"
        return headers.get(candidate.form, default)
    return f"{candidate.kernel}/traits"


def source_of(candidates: list[Candidate], *members: str) -> str:
    """A program that prints numbers of the traits of each candidate's kernels, of one direction."""
    assert len({candidate.direction for candidate in candidates}) == 1
    lines = ["#include <cstdio>", "#include <cuda_bf16.h>", "#include <cuda_fp16.h>"]
    headers = dict.fromkeys(map(header_of, candidates))
    lines += [f"#include <attention_autotuner/{header}.cuh>" for header in headers]
    for index, candidate in enumerate(candidates):
        config = re.search(r"struct Config \{.*?\n\};", render(candidate).text, re.DOTALL)
        assert config is not None
        lines.append(config.group(0).replace("struct Config", f"struct Config{index}", 1))
    lines.append("int main() {")
    lines += [
        f'std::printf("%d\\n", {traits.format(f"Config{index}")}::{member});'
        for member in members or ("kSmemBytes",)
        for index, candidate in enumerate(candidates)
        for traits in traits_of(candidate)
    ]
    return "\n".join([*lines, "}", ""])


def compile_host(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Compile a program into ``folder / "traits"``."""
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


def asserted(result: subprocess.CompletedProcess[str]) -> set[str]:
    """The names of the static_asserts that failed."""
    said = result.stdout + result.stderr
    return set(re.findall(r'static assertion failed with "(\w+)"', said))


def compare_traits(
    folder: Path, candidates: list[Candidate], **others: Sequence[int | None]
) -> None:
    """Hold the shared memory of kernels, and other numbers of their traits by name, to what Python's rules say.

    One program prints all of them: the compiler takes longer for the headers than for the numbers.
    """
    shapes = [kernel for candidate in candidates for kernel in resources.kernels(candidate)]
    wanted = {"kSmemBytes": [kernel.smem_bytes for kernel in shapes], **others}
    result = compile_host(folder, source_of(candidates, *wanted))
    assert result.returncode == 0, result.stderr
    ran = subprocess.run([folder / "traits"], capture_output=True, text=True, check=True)
    numbers = iter(map(int, ran.stdout.split()))
    for member, values in wanted.items():
        assert [next(numbers) for _ in shapes] == list(values), member
    assert not list(numbers)


def sm90_retnet_candidates() -> list[Candidate]:
    """Every backward candidate of masked retnet of family sm90 that an H100 offers over some head dims.

    But for those of attention's backward kernel, whose own test has them.
    """
    dims = ((64, 64), (96, 80), (128, 128), (192, 128), (256, 256), (256, 512), (16, 304))
    problems = (
        Problem(op="retnet", direction="backward", mask="explicit", dim_qk=qk, dim_v=v)
        for qk, v in dims
    )
    return [
        candidate
        for problem in problems
        for candidate in H100().legal(problem)
        if candidate.family == "sm90" and candidate.kernel != "attention_backward_sm90"
    ]
