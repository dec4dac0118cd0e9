"""A few kernels of every kind on tiny shapes, without torch, so that a sanitizer takes minutes and not hours.

    python -m tests.gpu.sanitize --store DIR --build       # needs the compiler, not the GPU
    compute-sanitizer --tool memcheck python -m tests.gpu.sanitize --store DIR
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize --store DIR --direction backward

The status is 1 when a result is wrong or a kernel cannot be launched.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attention_autotuner.arch import resolve
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate, KernelKnobs
from attention_autotuner.core.problem import DIRECTIONS, Problem, operations
from attention_autotuner.kernels.scores_backward_sm80.knobs import (
    BackwardKnobs,
    KeyPass,
    RowPass,
)
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.serving import loader

from .bare_launch import Call, DeviceMemory, Memory, run
from .bare_retention import RetentionCall
from .bare_retention import run as run_retention
from .sanitize_retention import RETENTION, RETNET, retention_calls_of
from .sanitize_sm90 import WGMMA

MANIFEST = "sanitize.json"
CHECK_RACES = "-DATTENTION_AUTOTUNER_CHECK_RACES"


def _candidate(
    dims: tuple[int, int], knobs: KernelKnobs, *, dtype: Any = "fp16", copy_bytes: Any = 16
) -> Candidate:
    return Candidate(
        direction="forward" if isinstance(knobs, ForwardKnobs) else "backward",
        dtype=dtype,
        padded_dim_qk=dims[0],
        padded_dim_v=dims[1],
        copy_bytes=copy_bytes,
        knobs=knobs,
    )


def _forward(dims: tuple[int, int], tile: tuple[int, int], warps: int, **knobs: Any) -> Candidate:
    fields = {name: knobs.pop(name) for name in ("dtype", "copy_bytes") if name in knobs}
    config: dict[str, Any] = {"num_stages": 1, "k_slice": dims[0]} | knobs
    made = ForwardKnobs(block_m=tile[0], block_n=tile[1], warps_m=warps, **config)
    return _candidate(dims, made, **fields)


def _keys(tile: tuple[int, int], pairs: int, stages: int, **knobs: Any) -> KeyPass:
    return KeyPass(block_m=tile[0], block_n=tile[1], warp_pairs=pairs, num_stages=stages, **knobs)


def _rows(tile: tuple[int, int], warps: int, stages: int, **knobs: Any) -> RowPass:
    return RowPass(
        block_rows=tile[0], block_columns=tile[1], warps=warps, num_stages=stages, **knobs
    )


# Each mainloop, each way to hold Q and P, slices, both copy widths, both schedules.
FORWARD: dict[str, Candidate] = {
    "one-stage": _forward((64, 64), (64, 32), 4),
    "two-stages-32-rows": _forward((64, 64), (128, 64), 4, num_stages=2),
    "three-stages-bf16": _forward((128, 128), (64, 32), 4, num_stages=3, dtype="bf16"),
    "q-in-registers": _forward((64, 64), (64, 32), 4, num_stages=2, q_in_registers=True),
    "qk-ahead": _forward((64, 64), (64, 32), 4, num_stages=2, qk_ahead=True),
    "k-slices": _forward((128, 128), (64, 32), 4, num_stages=2, k_slice=32),
    "k-slices-three-stages": _forward((128, 64), (64, 32), 4, num_stages=3, k_slice=64),
    "two-warps-along-keys": _forward((192, 192), (64, 64), 2, warps_n=2),
    "two-warps-along-keys-k-slices": _forward(
        (256, 256), (64, 64), 2, num_stages=2, warps_n=2, k_slice=64
    ),
    "value-slices": _forward((64, 256), (64, 32), 4, num_stages=2, v_slices=2),
    "persistent": _forward(
        (32, 32), (64, 32), 4, num_stages=2, persistent=True, cta_order="longest_first"
    ),
    "persistent-q-in-registers": _forward(
        (64, 64), (64, 32), 4, q_in_registers=True, persistent=True, cta_order="longest_first"
    ),
    "unaligned": _forward((64, 64), (64, 32), 4, num_stages=2, copy_bytes=2),
    "unaligned-bf16-one-stage": _forward((48, 80), (64, 32), 4, copy_bytes=2, dtype="bf16"),
}
SMALL_ROWS = _rows((64, 32), 4, 2)
# Each plan, every number of stages, splits of queries, shared rows, slices, both copy widths, both raster orders.
BACKWARD: dict[str, Candidate] = {
    "fused-one-stage": _candidate(
        (64, 64), BackwardKnobs(plan="one_pass", keys=_keys((32, 64), 4, 1))
    ),
    "fused-two-stages": _candidate(
        (64, 64),
        BackwardKnobs(plan="one_pass", keys=_keys((64, 64), 2, 2), cta_order="longest_first"),
    ),
    "fused-three-stages-bf16": _candidate(
        (48, 80), BackwardKnobs(plan="one_pass", keys=_keys((32, 64), 2, 3)), dtype="bf16"
    ),
    "fused-query-parts": _candidate(
        (64, 64), BackwardKnobs(plan="one_pass", keys=_keys((64, 64), 2, 2, query_subtiles=2))
    ),
    "fused-unaligned": _candidate(
        (64, 64), BackwardKnobs(plan="one_pass", keys=_keys((32, 64), 4, 2)), copy_bytes=2
    ),
    "two_kernels": _candidate(
        (64, 64), BackwardKnobs(plan="two_kernels", keys=_keys((32, 64), 4, 2), dq=SMALL_ROWS)
    ),
    "pair-query-parts-one-stage": _candidate(
        (80, 48),
        BackwardKnobs(
            plan="two_kernels",
            keys=_keys((64, 64), 2, 1, query_subtiles=2),
            dq=_rows((32, 32), 2, 1, column_warps=2),
            cta_order="longest_first",
        ),
    ),
    "pair-unaligned-bf16": _candidate(
        (64, 64),
        BackwardKnobs(plan="two_kernels", keys=_keys((32, 64), 4, 1), dq=SMALL_ROWS),
        dtype="bf16",
        copy_bytes=2,
    ),
    "three_kernels": _candidate(
        (64, 128),
        BackwardKnobs(plan="three_kernels", dq=SMALL_ROWS, dk=SMALL_ROWS, dv=SMALL_ROWS),
    ),
    "split-slices-shared-rows": _candidate(
        (64, 256),
        BackwardKnobs(
            plan="three_kernels",
            dq=_rows((32, 32), 2, 1, column_warps=2, slices=2),
            dk=_rows((32, 32), 2, 2, column_warps=2),
            dv=_rows((64, 32), 4, 1, slices=2),
            cta_order="longest_first",
        ),
    ),
    "split-unaligned": _candidate(
        (48, 80),
        BackwardKnobs(plan="three_kernels", dq=SMALL_ROWS, dk=SMALL_ROWS, dv=SMALL_ROWS),
        copy_bytes=2,
    ),
}
KINDS = FORWARD | BACKWARD | RETNET | RETENTION | WGMMA
# (batch, heads_q, heads_kv, seqlen_q, seqlen_k, causal, scale); causal is bottom-right.
SHAPES = (
    (1, 2, 1, 1, 1, False, 0.5),
    (1, 2, 1, 77, 91, True, 0.125),
    (1, 1, 1, 91, 40, True, -0.2),
    (2, 2, 2, 70, 33, False, 0.0),
)
# More tiles than resident CTAs of these kernels on any present GPU, so that persistent kernels loop.
MANY = (128, 12, 12, 65, 33, True, 0.125)
# And so many blocks of keys that those of a head begin at tiles of queries of their own, where shares of dQ are queued,
# and that several warps combine the splits of a row.
LONG = (1, 2, 1, 150, 1100, False, 0.125)


def calls_of(candidate: Candidate) -> list[Call]:
    """The launches of a kernel; true dims are one chunk below the padded ones."""
    persistent = getattr(candidate.knobs, "persistent", False)
    long = persistent or getattr(candidate.knobs, "split_kv", False)
    return [
        Call(
            problem=Problem(
                direction=candidate.direction,
                dtype=candidate.dtype,
                batch=batch,
                heads_q=heads_q,
                heads_kv=heads_kv,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                dim_qk=candidate.padded_dim_qk - 8,
                dim_v=candidate.padded_dim_v - 8,
                causal=causal,
                alignment_bytes=candidate.copy_bytes,
            ),
            scale=scale,
        )
        for batch, heads_q, heads_kv, seqlen_q, seqlen_k, causal, scale in (
            *SHAPES,
            *([LONG] if long else []),
            *([MANY] if persistent else []),
        )
    ]


def build_all(kinds: Sequence[str], folder: Path, arch: str) -> int:
    """Build kinds and write the paths of their libraries; returns 1 when a build fails.

    Kernels are compiled for racecheck (``ATTENTION_AUTOTUNER_CHECK_RACES``), which tracks only the threads that arrive
    at a barrier themselves, not the threads of the warp on whose behalf they arrive.
    """
    toolchain = find_toolchain()
    results = build(
        [render(KINDS[kind]) for kind in kinds],
        BuildTarget(arch=arch),
        toolchain=replace(toolchain, cuda_flags=(*toolchain.cuda_flags, CHECK_RACES)),
        store=Store(folder),
    )
    paths: dict[str, str] = {}
    for kind, result in zip(kinds, results, strict=True):
        if isinstance(result, Artifact):
            paths[kind] = str(result.path)
        else:
            print(f"{kind}: {result}", file=sys.stderr)
    (folder / MANIFEST).write_text(json.dumps(paths, indent=1), encoding="utf-8")
    return 0 if len(paths) == len(kinds) else 1


def run_all(paths: dict[str, str], memory: Memory) -> int:
    """Run kinds on every shape; returns 1 when a result is wrong."""
    wrong = []
    for kind, path in paths.items():
        candidate = KINDS[kind]
        kernel = loader.load(path)
        kernel.prepare(0)
        if candidate.launch_knobs:
            kernel = kernel.with_launch_knobs(candidate.launch_knobs)
        calls: Sequence[Call] = (
            calls_of(candidate) if candidate.op == "attention" else retention_calls_of(candidate)
        )
        for call in calls:
            shape = call.problem.describe()
            wrong += [
                f"{kind}, {shape}: {complaint}" for complaint in _complaints(kernel, call, memory)
            ]
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{len(paths)} kernels, {len(wrong)} complaints")
    return 1 if wrong else 0


def _complaints(kernel: loader.LoadedKernel, call: Call, memory: Memory) -> list[str]:
    if isinstance(call, RetentionCall):
        return run_retention(kernel, call, memory)
    return run(kernel, call, memory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the kernels, or run them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="folder of the built kernels")
    parser.add_argument("--build", action="store_true", help="build them and stop")
    parser.add_argument("--arch", help="target, e.g. 90; by default that of the present GPU")
    parser.add_argument("--direction", choices=DIRECTIONS, help="only kinds of this direction")
    parser.add_argument("--op", choices=operations(), help="only kinds of this operation")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), help="only these kinds")
    options = parser.parse_args(arguments)
    kinds = options.only or [
        kind
        for kind, candidate in KINDS.items()
        if options.direction in (None, candidate.direction) and options.op in (None, candidate.op)
    ]
    if options.build:
        return build_all(kinds, options.store, options.arch or resolve(None).build_arch)
    manifest = options.store / MANIFEST
    if not manifest.is_file():
        parser.error(f"{manifest} is missing: run with --build first")
    paths = json.loads(manifest.read_text(encoding="utf-8"))
    missing = [kind for kind in kinds if kind not in paths]
    if missing:
        parser.error(f"{', '.join(missing)} did not build")
    return run_all({kind: paths[kind] for kind in kinds}, DeviceMemory())


if __name__ == "__main__":
    sys.exit(main())
