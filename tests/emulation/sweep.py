"""A sweep of a kernel's candidates over small problems: ``python -m tests.emulation.sweep KERNEL [options]``."""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from attention_autotuner.arch import H100
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem, of_shape
from attention_autotuner.kernels.registry import KERNELS

from .build import build
from .check import GROWING, Adjust, check, scaled

RUNS = (("lazy", 0), ("eager", 1), ("random", 2), ("random", 3))
ADJUSTMENTS: tuple[tuple[str, Adjust], ...] = (
    ("lazy", lambda inputs: (inputs, inputs)),
    ("random", lambda inputs: scaled(inputs, sign=-1.0)),
)
DIMS = ((64, 64), (128, 128), (80, 48), (96, 96), (192, 128), (256, 256), (16, 16), (64, 256))

MASKS = {"masked": "explicit", "decayed": "decay"}  # of retnet, by what is done to scores
# Queries, keys, heads of q, of k and v, and whether causal.
SHAPES = (
    (300, 300, 4, 2, True),
    (77, 333, 3, 3, False),
    (333, 77, 2, 1, True),
    (1, 130, 4, 1, True),
    (513, 513, 1, 1, True),
    (200, 50, 16, 16, False),
)
# Of retention, and with one head of gemm, whose rows the queries are.
SQUARE = tuple((n, n, 2, 2 - n % 2, True) for n in (300, 131, 77, 1, 513))


def problems(dim_qk: int, dim_v: int, **fields: Any) -> list[Problem]:
    """Small problems of two head dims: odd lengths, groups of heads, causal with rows that see nothing."""
    op, mask = fields["op"], fields["mask"]
    if op == "gemm":
        return [of_shape((1, 1, rows, dim_qk, dim_v), **fields) for rows, *_ in SQUARE]
    keys = 8 if mask == "explicit" else 1  # rows of a mask are read 16 bytes at a time
    return [
        Problem(
            batch=2 if k < 100 else 1,
            seqlen_q=q,
            seqlen_k=-(-k // keys) * keys,
            heads_q=heads,
            heads_kv=heads_kv,
            causal=causal or mask == "decay",
            dim_qk=dim_qk,
            dim_v=dim_v,
            **fields,
        )
        for q, k, heads, heads_kv, causal in (SQUARE if op == "retention" else SHAPES)
    ]


def outcome_of(candidate: Candidate, dims: tuple[int, int], folder: Path, seed: int) -> Outcome:
    """Verify a candidate under every policy, and, of attention, with adjusted inputs."""
    kernel = build(candidate, folder)
    small = problems(
        *dims,
        dtype=candidate.dtype,
        op=candidate.op,
        direction=candidate.direction,
        mask=candidate.mask,
    )
    runs = [(policy, number + 10 * seed) for policy, number in RUNS]
    outcome = check(kernel, small, runs)
    if candidate.op == "attention" and candidate.direction == "forward":
        for policy, adjust in ADJUSTMENTS:
            if outcome.ok:
                outcome = check(kernel, small, [(policy, seed)], adjust=adjust, ways=GROWING)
    return outcome


def candidates(kernel: str, dims: tuple[int, int]) -> list[Candidate]:
    """Every candidate of a kernel that an H100 offers for two head dims, for many heads and long sequences."""
    offered = []
    for op, direction, score in sorted(KERNELS[kernel].knobs.serves):
        problem = of_shape(
            (1, 1, 4096, *dims) if op == "gemm" else (8, 16, 2048, *dims),
            op=op,
            direction=direction,
            mask=MASKS[score] if op == "retnet" else "none",
            causal=score == "decayed",  # retention's, too
        )
        offered += [c for c in H100().legal(problem) if c.kernel == kernel]
    return offered


def main() -> int:
    """Sweep; 1 where some candidate was not Ok."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", nargs="?", default="attention_forward_sm90", choices=KERNELS)
    parser.add_argument("--count", type=int, default=20, help="candidates, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    source = random.Random(options.seed)
    pool = [(c, dims) for dims in DIMS for c in candidates(options.kernel, dims)]
    failures = 0
    for candidate, dims in source.sample(pool, min(options.count, len(pool))):
        candidate = replace(candidate, dtype=source.choice(("fp16", "bf16")))
        folder = Path(tempfile.gettempdir()) / "emulation" / candidate.name
        begin = time.monotonic()
        try:
            outcome = outcome_of(candidate, dims, folder, options.seed)
            text = "ok" if outcome.ok else f"{type(outcome).__name__}: {outcome.reason}"
        except subprocess.CalledProcessError as error:
            text = f"does not compile: {error.stderr[-600:]}"
        failures += text != "ok"
        sys.stdout.write(f"{candidate.name} {time.monotonic() - begin:.1f} s {text}\n")
        sys.stdout.flush()
        shutil.rmtree(folder, ignore_errors=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
