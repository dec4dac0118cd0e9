"""Candidates for tests, each written as one flat list of the fields that matter."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from attention_autotuner.arch import H100, ArchSpec
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.chunks_sm80.knobs import (
    ChunkPass,
    ChunksKnobs,
)
from attention_autotuner.kernels.recurrent_sm80.knobs import RecurrentKnobs
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.kernels.scores_backward_sm80.knobs import (
    BackwardKnobs,
    KeyPass,
    RowPass,
)
from attention_autotuner.kernels.scores_backward_sm90.knobs import BackwardSm90Knobs, Sm90Pass
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.operations.registry import OPERATIONS

_FORWARD = {field.name for field in fields(ForwardKnobs)}
_BACKWARD = {field.name for field in fields(BackwardKnobs)}
PLAIN = Candidate(
    dtype="fp16",
    padded_dim_qk=128,
    padded_dim_v=128,
    knobs=ForwardKnobs(block_m=128, block_n=64, warps_m=4, num_stages=2, k_slice=128),
)
KEYS = KeyPass(block_m=64, block_n=128, warp_pairs=4, num_stages=1)
ROWS = RowPass(block_rows=128, block_columns=32, warps=4, num_stages=2)

SM90_PASS = Sm90Pass(warpgroups=2, block_columns=64, num_stages=2, slice_stages=2)
MASKED_BACKWARD = Problem(
    op="retnet",
    direction="backward",
    mask="explicit",
    batch=1,
    heads_q=2,
    heads_kv=1,
    seqlen_q=300,
    seqlen_k=200,
    dim_qk=128,
    dim_v=128,
)


def masked_backward(passes: dict[str, Any] | None = None, **fields: Any) -> Candidate:
    """Retnet's backward of family ``sm90``, of three equal passes but for knobs of its own, with fields of it."""
    equal: dict[str, Any] = {"dq": SM90_PASS, "dk": SM90_PASS, "dv": SM90_PASS}
    config: dict[str, Any] = {"dtype": "fp16", "padded_dim_qk": 128, "padded_dim_v": 128} | fields
    return Candidate(
        op="retnet",
        direction="backward",
        mask="explicit",
        knobs=BackwardSm90Knobs(**(equal | (passes or {}))),
        **config,
    )


def offered_by(
    kernel: str, problem: Problem, spec: ArchSpec = H100.default_spec
) -> list[Candidate]:
    """The legal candidates of one kernel alone: a policy lists those of all that serve a problem."""
    points = (
        KERNELS[kernel].points(problem, spec) if KERNELS[kernel].serves_problem(problem) else ()
    )
    return [Candidate.of(problem, p) for p in points if not isinstance(p, Rejection)]


def forward(base: Candidate = PLAIN, **changes: Any) -> Candidate:
    """A forward candidate like ``base``, with other values of some fields of the candidate or of its knobs."""
    knobs = {name: value for name, value in changes.items() if name in _FORWARD}
    rest = {name: value for name, value in changes.items() if name not in _FORWARD}
    return replace(base, knobs=replace(base.knobs, **knobs), **rest)


def backward(plan: str, **changes: Any) -> Candidate:
    """A backward candidate of a plan with medium tiles, and other values of some fields of it or of its knobs."""
    passes: dict[str, dict[str, Any]] = {
        "one_pass": {"keys": KEYS},
        "two_kernels": {"keys": KEYS, "dq": ROWS},
        "three_kernels": {"dq": ROWS, "dk": ROWS, "dv": ROWS},
    }
    knobs = {name: value for name, value in changes.items() if name in _BACKWARD}
    rest = {name: value for name, value in changes.items() if name not in _BACKWARD}
    made = BackwardKnobs(plan=plan, **(passes[plan] | knobs))  # type: ignore[arg-type]  # from tests
    return replace(PLAIN, direction="backward", knobs=made, **rest)


CHUNKS = ChunkPass(columns=64, column_warps=2, num_stages=2)
RETENTION: dict[str, Any] = {
    "parallel": replace(PLAIN.knobs, chunk=64, states=CHUNKS),
    "chunkwise": ChunksKnobs(chunk=64, output=CHUNKS),
    "recurrent": RecurrentKnobs(columns=32, warps=4),
    "backward": ChunksKnobs(chunk=64, dq=CHUNKS, dk=CHUNKS, dv=CHUNKS),
}


def retention(kind: str, **changes: Any) -> Candidate:
    """A retention candidate of a form, or of ``backward``, with other values of some fields."""
    direction: Any = "backward" if kind == "backward" else "forward"
    values: dict[str, Any] = {"knobs": RETENTION[kind], "padded_dim_qk": 64, "padded_dim_v": 64}
    return replace(PLAIN, op="retention", direction=direction, **(values | changes))


RETNET = (
    replace(PLAIN, op="retnet", mask="explicit"),
    replace(PLAIN, op="retnet", mask="decay"),
    replace(backward("two_kernels"), op="retnet", mask="explicit"),
    replace(backward("one_pass"), op="retnet", mask="decay"),
)


ONE_MATRIX: dict[str, Any] = {"batch": 1, "heads_q": 1, "heads_kv": 1}


def candidates_of_every_service() -> list[Candidate]:
    """The first candidate of every kernel for every service that the kernel offers, with small head dims on an H100."""
    candidates = []
    for kernel in KERNELS.values():
        for op, direction, score in sorted(kernel.serves):
            mask: Any = (
                {"masked": "explicit", "decayed": "decay"}[score] if op == "retnet" else "none"
            )
            problem = Problem(
                op=op,
                direction=direction,
                mask=mask,
                causal=score == "decayed",
                seqlen_q=64,
                seqlen_k=64,
                dim_qk=64,
                dim_v=64,
                **({} if OPERATIONS[op].semantics.batched else ONE_MATRIX),
            )
            points = kernel.points(problem, H100.default_spec)
            knobs = next(point for point in points if not isinstance(point, Rejection))
            candidates.append(Candidate.of(problem, knobs))
    return candidates
