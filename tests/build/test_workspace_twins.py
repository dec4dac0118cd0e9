"""Python and the entries agree about the device memory that launches take beside their tensors.

Entries whose ``Workspace`` names no kernel answer in a program of the host; of the others, artifacts do.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.chunks_sm80 import resources as chunks
from attention_autotuner.kernels.legality import check_kernel
from attention_autotuner.kernels.registry import KERNELS, kernel_of
from attention_autotuner.kernels.scores_backward_sm80.knobs import KeyPass, RowPass
from attention_autotuner.kernels.scores_backward_sm90.knobs import StoredPass
from attention_autotuner.kernels.scores_forward_sm80 import resources as scores_forward
from attention_autotuner.operations.params import workspace_bytes
from tests.candidates import CHUNKS, PLAIN, RETENTION, RETNET, backward, forward, retention
from tests.cpp_mirror import compile_host

pytestmark = pytest.mark.build

# batch, heads_q, heads_kv, tokens: few CTAs and many, groups of heads, a rest, one token, and causal blocks to split,
# evenly and not.
SHAPES = (
    (1, 2, 1, 1),
    (1, 1, 1, 4097),
    (1, 4, 2, 1000),
    (2, 8, 1, 2048),
    (8, 16, 16, 520),
    (1, 32, 8, 4096),
    (1, 32, 8, 16500),
    (1, 64, 8, 8192),
    (1, 64, 4, 8192),
    (2, 28, 4, 2048),
    (2, 28, 4, 4096),
    (1, 40, 8, 4096),
    (1, 40, 8, 8192),
)
NARROWER = 8  # of true head dims than padded ones
PROGRAM = """
template <typename Entry>
void answer(int dim_qk, int dim_v, int splits) {
  using Params = typename Entry::Params;
  int const shapes[][4] = {%s};
  for (auto const& shape : shapes) {
    for (bool more : {false, true}) {
      Params p{};
      p.struct_size = sizeof(p);
      p.abi_version = ATTENTION_AUTOTUNER_ABI_VERSION;
      p.batch = shape[0], p.heads_q = shape[1], p.heads_kv = shape[2];
      p.dim_qk = dim_qk, p.dim_v = dim_v;
      float* const somewhere = reinterpret_cast<float*>(256);
      if constexpr (std::is_same_v<Params, attention_autotuner_retention_forward_params>) {
        p.seqlen = shape[3], p.log2_gamma = somewhere, p.final_state = more ? somewhere : nullptr;
      } else if constexpr (std::is_same_v<Params, attention_autotuner_retention_backward_params>) {
        p.seqlen = shape[3], p.log2_gamma = somewhere, p.dlog2_gamma = more ? somewhere : nullptr;
      } else {
        p.seqlen_q = p.seqlen_k = shape[3], p.causal = more;
      }
      if constexpr (std::is_same_v<Params, attention_autotuner::AttentionForwardParams1003>) p.splits = splits;
      if constexpr (std::is_same_v<Params, attention_autotuner_retnet_backward_params>) p.mask.data = somewhere;
      std::printf("%%zu\\n", Entry::workspace_bytes(p));
    }
  }
}
"""


MASKED_PASSES = "scores_backward_sm90"


def sm90(kernel: str = "_sm90", **options: Any) -> Candidate:
    problem = Problem(dim_qk=64, dim_v=64, **options)
    return next(selected for selected in H100().legal(problem) if selected.kernel.endswith(kernel))


def passes(names: str, **knobs: Any) -> dict[str, Any]:
    """Passes over chunks by name, the middling one but for its knobs."""
    return {name: replace(CHUNKS, **knobs) for name in names.split()}


def chunked(kind: str, classes: tuple[int, int], **knobs: Any) -> Candidate:
    made = replace(RETENTION[kind], **knobs)
    return retention(kind, knobs=made, padded_dim_qk=classes[0], padded_dim_v=classes[1])


GRADIENTS = "dq dk dv"
SOFTMAX = sm90()
FUSED = sm90(direction="backward")
TWO_PASS = sm90(direction="backward", deterministic=True)
MASKED = replace(
    FUSED,
    op="retnet",
    mask="explicit",
    knobs=replace(FUSED.knobs, keys=replace(FUSED.knobs.keys, mask_stages=1)),
)
PASSES = sm90(MASKED_PASSES, op="retnet", mask="explicit", direction="backward")
STORED = replace(
    PASSES,
    knobs=replace(PASSES.knobs, dk=None, stored_dk=StoredPass(warpgroup_rows=128, num_stages=2)),
)
RETENTION_BACKWARD = sm90(op="retention", causal=True, direction="backward")
SPLIT: dict[str, Any] = {"output": "direct", "split_kv": True}
CHUNKWISE_SM90 = sm90(op="retention", causal=True, form="chunkwise")
GRADIENTS_SM90 = [
    replace(
        RETENTION_BACKWARD,
        padded_dim_v=dim_v,
        knobs=replace(RETENTION_BACKWARD.knobs, super_chunk=n),
    )
    for dim_v in (64, 128)
    for n in (0, 256, 1024)
]
CLAIMING: dict[str, Any] = {
    "cta_order": "raster",
    **dict.fromkeys(("persistent", "early_launches", "gathered_stores", "dynamic"), True),
}
CLAIMED = [replace(FUSED.knobs.dq_share, dq_add=dq_add) for dq_add in ("bulk", "stored")]
ON_HOST = [
    PLAIN,
    *RETNET[:2],
    sm90(op="retnet", mask="explicit"),
    *(replace(SOFTMAX, knobs=replace(SOFTMAX.knobs, schedule=s)) for s in ("grid", "dynamic")),
    *(
        replace(SOFTMAX, knobs=replace(SOFTMAX.knobs, schedule=s, splits=splits, **SPLIT))
        for s, splits in (("static", 1), ("static", 3), ("dynamic", 64))
    ),
    *(forward(split_kv=True, pack_gqa=True, splits=splits) for splits in (1, 3, 64)),
    FUSED,
    MASKED,
    TWO_PASS,
    *(
        replace(
            FUSED,
            knobs=replace(
                FUSED.knobs, dq_share=replace(FUSED.knobs.dq_share, dq_by=dq_by, dq_add="ordered")
            ),
            padded_dim_qk=dim,
        )
        for dq_by, dim in (("own", 64), ("keys", 80))
    ),
    *(replace(FUSED, knobs=replace(FUSED.knobs, dq_share=share, **CLAIMING)) for share in CLAIMED),
    retention("recurrent"),
    *(chunked("parallel", classes, k_slice=64) for classes in ((64, 64), (64, 256))),
    *(
        chunked("chunkwise", (64, 128), super_chunk=tokens, **passes("output", scores=scores))
        for tokens, scores in product((0, 256, 512, 2048), ("inline", "precomputed"))
    ),
    *(
        chunked("backward", (64, 256), super_chunk=tokens, **passes(GRADIENTS, depth_warps=2))
        for tokens in (0, 64, 512, 1024)
    ),
    chunked(
        "backward", (64, 64), super_chunk=512, **passes("dq"), **passes("dv", scores="precomputed")
    ),
    chunked("backward", (128, 64), **passes("dk dv", scores="precomputed"), **passes("dq")),
    chunked("backward", (64, 64), chunk=32, super_chunk=128, **passes("dq", scores="precomputed")),
    *(
        replace(CHUNKWISE_SM90, knobs=replace(CHUNKWISE_SM90.knobs, super_chunk=tokens))
        for tokens in (0, 256, 1024)
    ),
]


def source_of(candidates: list[Candidate]) -> str:
    """A program that prints the workspace of each candidate, by shape, without and with optional results or a mask."""
    lines = ["#include <cstdio>", "#include <type_traits>"]
    body = []
    includes = []
    for index, selected in enumerate(candidates):
        entry, text = kernel_of(selected).entry(selected), render(selected).text
        config = re.search(r"struct Config \{.*?\n\};", text, re.DOTALL)
        assert config is not None
        includes.append(f"#include <attention_autotuner/{selected.kernel}/{entry.header}>")
        body.append(config.group(0).replace("struct Config", f"struct Config{index}", 1))
    shapes = ", ".join("{" + ", ".join(map(str, shape)) + "}" for shape in SHAPES)
    calls = [
        f"answer<attention_autotuner::{kernel_of(selected).entry(selected).cpp_type}<Config{index}>>"
        f"({selected.padded_dim_qk - NARROWER}, {selected.padded_dim_v - NARROWER}, "
        f"{selected.launch_knobs.get('splits', 0)});"
        for index, selected in enumerate(candidates)
    ]
    lines += dict.fromkeys(includes)
    return "\n".join([*lines, *body, PROGRAM % shapes, "int main() {", *calls, "}", ""])


def problem_of(selected: Candidate, shape: tuple[int, int, int, int], **options: Any) -> Problem:
    batch, heads_q, heads_kv, tokens = shape
    return Problem(
        op=selected.op,
        direction=selected.direction,
        mask=selected.mask,
        causal=selected.score == "decayed",
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=tokens,
        seqlen_k=tokens,
        dim_qk=selected.padded_dim_qk - NARROWER,
        dim_v=selected.padded_dim_v - NARROWER,
        modifications=selected.modifications,
        **options,
    )


def with_more(problem: Problem, selected: Candidate) -> int:
    """The workspace of a call that also wants the final state, or the gradient of gamma, or that is causal."""
    if selected.form == "parallel":
        return scores_forward.workspace_bytes(problem, selected, final_state=True)
    if selected.kernel == "chunks_sm80" and selected.direction == "backward":
        return chunks.workspace_bytes(problem, selected, dgamma=True)
    causal = replace(problem, causal=True)
    return kernel_of(selected).workspace_bytes(causal, selected)


def test_entries_without_kernels_in_it(tmp_path: Path) -> None:
    assert not list(filter(None, map(check_kernel, ON_HOST)))
    result = compile_host(tmp_path, source_of(ON_HOST))
    assert result.returncode == 0, result.stderr
    ran = subprocess.run([tmp_path / "traits"], capture_output=True, text=True, check=True)
    printed = list(map(int, ran.stdout.split()))
    counted = []
    for selected, shape in product(ON_HOST, SHAPES):
        problem = problem_of(selected, shape)
        counted += [
            kernel_of(selected).workspace_bytes(problem, selected),
            with_more(problem, selected),
        ]
    assert counted == printed
    answers = len(SHAPES) * 2
    taking = {
        selected.kernel
        for i, selected in enumerate(ON_HOST)
        if any(printed[answers * i :][:answers])
    }
    assert taking == {
        "scores_forward_sm80",
        "chunks_sm80",
        "chunks_sm90",
        "attention_forward_sm90",
        "attention_backward_sm90",
    }


def test_gradients_of_retention_by_warpgroups(tmp_path: Path) -> None:
    """Without that of gamma, which Python leaves out."""
    candidates = GRADIENTS_SM90
    assert not list(filter(None, map(check_kernel, candidates)))
    result = compile_host(tmp_path, source_of(candidates))
    assert result.returncode == 0, result.stderr
    ran = subprocess.run([tmp_path / "traits"], capture_output=True, text=True, check=True)
    expected = [
        kernel_of(selected).workspace_bytes(problem_of(selected, shape), selected)
        for selected, shape in product(candidates, SHAPES)
    ]
    assert list(map(int, ran.stdout.split()))[::2] == expected
    assert len(set(expected)) > len(candidates)


KEYS = KeyPass(block_m=64, block_n=64, warp_pairs=2, num_stages=1)
ROWS = RowPass(block_rows=64, block_columns=32, warps=2, num_stages=1)
SMALL: dict[str, Any] = {"padded_dim_qk": 32, "padded_dim_v": 16}
BUILT = {
    "one_pass": (backward("one_pass", **SMALL, keys=replace(KEYS, block_m=32)), "80"),
    "two_kernels": (
        replace(backward("two_kernels", **SMALL, keys=KEYS, dq=ROWS), op="retnet", mask="explicit"),
        "80",
    ),
    "biased": (
        replace(backward("one_pass", **SMALL, keys=KEYS), modifications=("bias_table",)),
        "80",
    ),
    "sm90": (PASSES, "90"),
    "stored_sm90": (STORED, "90"),
    "biased_sm90": (sm90(modifications=("bias_table",), direction="backward"), "90"),
    "chunks": (
        chunked(
            "chunkwise",
            (32, 16),
            super_chunk=256,
            **passes("output", columns=16, column_warps=1, depth_warps=2),
        ),
        "80",
    ),
}


@pytest.fixture(scope="module")
def libraries(kernel_store: Store) -> dict[str, Path]:
    """Artifacts by their names above."""
    toolchain = find_toolchain()
    paths = {}
    for arch in ("80", "90"):
        kernels = {
            name: render(selected) for name, (selected, target) in BUILT.items() if target == arch
        }
        results = build(
            list(kernels.values()), BuildTarget(arch=arch), toolchain=toolchain, store=kernel_store
        )
        for name, result in zip(kernels, results, strict=True):
            assert isinstance(result, Artifact), result
            paths[name] = result.path
    return paths


def test_every_kernel_is_compared() -> None:
    assert {
        selected.kernel
        for selected in (*ON_HOST, *GRADIENTS_SM90, *(selected for selected, _ in BUILT.values()))
    } == set(KERNELS) - {"gemm_sm90"}  # whose params are others, see test_gemm_builds


@pytest.mark.parametrize("name", BUILT)
def test_artifacts(libraries: dict[str, Path], name: str) -> None:
    selected, _ = BUILT[name]
    problems = [problem_of(selected, shape) for shape in SHAPES]
    if selected.op != "retention":
        problems += [replace(problem, seqlen_q=77) for problem in problems[:3]]
    answers = [workspace_bytes(problem, libraries[name]) for problem in problems]
    assert [
        kernel_of(selected).workspace_bytes(problem, selected) for problem in problems
    ] == answers
    assert len(set(answers)) > 2
