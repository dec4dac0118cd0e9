"""Kernels with modified scores, windows, documents or packed sequences under a sanitizer, by the verifier.

    python -m tests.gpu.sanitize_problems --store DIR --build      # on that machine, or it is compiled under the tool
    compute-sanitizer --tool memcheck --kernel-name kns=attention_autotuner \
        python -m tests.gpu.sanitize_problems --store DIR
    compute-sanitizer --tool racecheck --kernel-name kns=attention_autotuner \
        python -m tests.gpu.sanitize_problems --store DIR --only packed-forward-sm90

Tensors and launches are cupy's and references are torch's on the CPU: under racecheck the modules that torch loads on
a GPU end in an error of the sanitizer's own. ``tests.gpu.sanitize`` has the plain kernels. The status is 1 when a
result is wrong. Several at once need OMP_NUM_THREADS, as torch's threads of all keep each other from the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from attention_autotuner.arch import H100
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import registry
from attention_autotuner.tuning import isolated, worker
from attention_autotuner.tuning.remote import RemoteKernel
from attention_autotuner.tuning.verify import verify

from .sanitize import CHECK_RACES
from .sanitize_sm90 import first
from .verifying import alone

CPU = torch.device("cpu")
OF_CLAIMED = "backward-claimed"
OF_SHARING = "backward-sharing"
SMALL = Problem(
    batch=2, heads_q=2, heads_kv=1, seqlen_q=140, seqlen_k=160, dim_qk=64, dim_v=64, causal=True
)
FEATURES: dict[str, dict[str, Any]] = {
    "modified": {"modifications": ("softcap", "alibi_slopes", "sinks"), "window_size": (31, -1)},
    "spanned": {"modifications": ("prefix_lens", "document_ids"), "seqlen_k": 140},
    "biased": {"modifications": ("bias_table",)},
    "masked": {"modifications": ("attn_mask",)},
    "packed": {"batch": 5, "packed_rows": (301, 340)},
    "tokens": {
        "heads_q": 8,
        "seqlen_q": 3,
        "seqlen_k": 700,
        "batch": 5,
        "packed_rows": (11, 1700),
    },
    "retention": {
        "op": "retention",
        "heads_kv": 2,
        "seqlen_k": 140,
        "batch": 5,
        "packed_rows": (301, 301),
    },
}
# Backward, where CTAs claim their blocks of keys, with words of the kernel's name. They are checked on these problems
# alone, whose blocks have few steps and are more than an H200 has SMs: what they are verified on besides takes minutes
# under a sanitizer.
MANY_HEADS = {"heads_q": 40, "heads_kv": 40}
WIDE = {**MANY_HEADS, "dim_qk": 128, "dim_v": 128}
GROUPED = {**WIDE, "heads_q": 80}  # whose CTAs share blocks of keys
CAPPED: dict[str, Any] = {"modifications": ("softcap",)}
CLAIMED: dict[str, tuple[dict[str, Any], str]] = {
    "held": (MANY_HEADS, "i3x2h_own2stored"),
    "capped": ({**MANY_HEADS, **CAPPED}, "i3x2h_own1bulk"),
    "windowed": ({**WIDE, "window_size": (80, -1)}, "t2x2_keys2stored"),
    "spanned": ({**WIDE, **FEATURES["spanned"]}, "c64t3x2_keys1stored"),
    "packed": ({**GROUPED, **FEATURES["packed"]}, "c64t3x2_keys2stored"),
    "swapped": ({**GROUPED, "modifications": ("sinks",)}, "c80t3x2_keys1stored"),
    "packed-queued": ({**MANY_HEADS, **FEATURES["packed"]}, "own2queued"),
    "packed-queued-wide": ({**GROUPED, **FEATURES["packed"]}, "keys1queued"),
    "capped-queued": ({**MANY_HEADS, **CAPPED, "deterministic": True}, "own1queued"),
}
# Two passes, that over keys by warpgroups that share them.
SHARING: dict[str, dict[str, Any]] = {
    "modified": {**FEATURES["modified"], "dim_qk": 256, "dim_v": 256},
    "packed": {**FEATURES["packed"], "dim_qk": 256, "dim_v": 256},
    "spanned": {**FEATURES["spanned"], "dim_qk": 192, "dim_v": 192},
    "biased": {**FEATURES["biased"], "dim_qk": 192, "dim_v": 192},
}
LONG = 8192  # of a problem that is offered all of these
DIRECTIONS: dict[str, dict[str, Any]] = {
    "forward": {"direction": "forward"},
    "backward": {"direction": "backward"},
    "deterministic": {"direction": "backward", "deterministic": True},
}


def cases() -> dict[str, tuple[Problem, Candidate]]:
    """Each feature and pass with the default kernel of each family that has one."""
    cases_of: dict[str, tuple[Problem, Candidate]] = {}
    for (name, feature), (way, direction) in product(FEATURES.items(), DIRECTIONS.items()):
        problem = replace(SMALL, **{**feature, **direction})
        for kernel in registry.kernels_for(problem, H100().families):
            knobs = kernel.default(problem, H100().spec)
            if knobs is not None:
                made = Candidate.of(problem, knobs)
                cases_of[f"{name}-{way}-{made.family}"] = (problem, made)
    for name, feature in SHARING.items():
        problem = replace(SMALL, **feature, direction="backward")
        cases_of[f"{name}-{OF_SHARING}"] = (problem, H100().default(problem))
    for name, (feature, words) in CLAIMED.items():
        problem = replace(SMALL, **feature, direction="backward")
        long = problem if problem.packed else replace(problem, seqlen_q=LONG, seqlen_k=LONG)
        cases_of[f"{name}-{OF_CLAIMED}"] = (problem, _claiming(long, words))
    return cases_of


def _claiming(problem: Problem, words: str) -> Candidate:
    dims = (problem.dim_qk, problem.dim_v)
    return first(problem, dims, lambda name: words in name and "dynamic" in name)


def _verified(
    launching: isolated.InProcess,
    problem: Problem,
    candidate: Candidate,
    artifact: Artifact,
    *,
    by_itself: bool,
) -> Outcome:
    """The outcome of one check, with inputs of one seed; ``by_itself``: of no other problem."""
    library = {"path": str(artifact.path), "launch_knobs": dict(candidate.launch_knobs)}
    described = launching.call("load", library=library)
    if isinstance(described, Outcome):
        return described
    kernel = RemoteKernel(launching.call, described, CPU)
    with alone() if by_itself else nullcontext():
        return verify(
            problem, kernel, deterministic=candidate.deterministic, seeds=(0,), device=CPU
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the kernels, or verify them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="folder of the built kernels")
    parser.add_argument("--build", action="store_true", help="build them and stop")
    parser.add_argument("--only", nargs="+", choices=list(cases()), help="only these")
    options = parser.parse_args(arguments)
    chosen = {name: case for name, case in cases().items() if name in (options.only or cases())}
    toolchain = find_toolchain()
    built = build(
        [render(candidate) for _, candidate in chosen.values()],
        BuildTarget(arch="90a"),
        toolchain=replace(toolchain, cuda_flags=(*toolchain.cuda_flags, CHECK_RACES)),
        store=Store(options.store),
    )
    launching = isolated.InProcess(0, tasks=worker.TASKS)
    failed = 0
    for (name, (problem, candidate)), artifact in zip(chosen.items(), built, strict=True):
        said: object = artifact
        if isinstance(artifact, Artifact) and not options.build:
            by_itself = name.endswith((OF_CLAIMED, OF_SHARING))
            said = _verified(launching, problem, candidate, artifact, by_itself=by_itself)
        ok = isinstance(artifact, Artifact) and (options.build or bool(getattr(said, "ok", False)))
        failed += not ok
        print(f"{name}: {candidate.name}: {'ok' if ok else said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
