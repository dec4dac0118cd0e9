"""The kinds of retnet's and retention's kernels for sanitizer runs, and their launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attention_autotuner.core.candidate import Candidate, KernelKnobs
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.chunks_sm80.knobs import (
    ChunkPass,
    ChunksKnobs,
)
from attention_autotuner.kernels.chunks_sm90.knobs import ChunkwiseSm90Knobs
from attention_autotuner.kernels.recurrent_sm80.knobs import RecurrentKnobs
from attention_autotuner.kernels.scores_backward_sm80.knobs import (
    BackwardKnobs,
    KeyPass,
    RowPass,
)
from attention_autotuner.kernels.scores_backward_sm90.knobs import (
    BackwardSm90Knobs,
    Sm90Pass,
)
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs

from .bare_retention import RetentionCall


def _made(dims: tuple[int, int], knobs: KernelKnobs, **fields: Any) -> Candidate:
    backward = any(service[1] == "backward" for service in knobs.serves) and knobs.form == "auto"
    config: dict[str, Any] = {
        "direction": "backward" if backward else "forward",
        "dtype": "fp16",
        "padded_dim_qk": dims[0],
        "padded_dim_v": dims[1],
    }
    return Candidate(knobs=knobs, **(config | fields))


def _retnet(
    dims: tuple[int, int], knobs: KernelKnobs, mask: str = "explicit", **fields: Any
) -> Candidate:
    return _made(dims, knobs, op="retnet", mask=mask, **fields)


def _retention(dims: tuple[int, int], knobs: KernelKnobs, **fields: Any) -> Candidate:
    return _made(dims, knobs, op="retention", **fields)


FORWARD = ForwardKnobs(block_m=64, block_n=32, warps_m=4, num_stages=2, k_slice=64)
ONE_STAGE = replace(FORWARD, num_stages=1)
WIDE = Sm90Pass(warpgroups=2, block_columns=64, num_stages=2, slice_stages=2)
IN_PARTS = replace(WIDE, num_stages=1, depth_slices=2, slice_stages=3)
IN_TURNS = replace(WIDE, warpgroups=3, ping_pong=True)
KEYS = KeyPass(block_m=32, block_n=64, warp_pairs=4, num_stages=2)
ROWS = RowPass(block_rows=64, block_columns=32, warps=4, num_stages=2)
FUSED = BackwardKnobs(plan="one_pass", keys=KEYS)
PAIR = BackwardKnobs(plan="two_kernels", keys=KEYS, dq=ROWS)
SPLIT = BackwardKnobs(plan="three_kernels", dq=ROWS, dk=ROWS, dv=ROWS)
INLINE = ChunkPass(columns=64, column_warps=2, num_stages=2)
GIVEN = ChunkPass(columns=64, column_warps=2, depth_warps=2, num_stages=1, scores="precomputed")
SLICED = ChunkPass(columns=32, column_warps=2, num_stages=3)

# Each score modification with each mainloop; each plan with the passes for dmask and through r.
RETNET: dict[str, Candidate] = {
    "retnet-explicit": _retnet((64, 64), FORWARD),
    "retnet-explicit-unaligned-bf16": _retnet((64, 64), ONE_STAGE, copy_bytes=2, dtype="bf16"),
    "retnet-explicit-two-warps-along-keys": _retnet(
        (64, 64), replace(FORWARD, block_n=64, warps_m=2, warps_n=2)
    ),
    "retnet-wgmma-backward": _retnet(
        (64, 64), BackwardSm90Knobs(dq=WIDE, dk=IN_TURNS, dv=IN_TURNS)
    ),
    "retnet-wgmma-backward-parts-bf16": _retnet(
        (112, 128),
        BackwardSm90Knobs(dq=IN_PARTS, dk=IN_PARTS, dv=replace(WIDE, slices=2)),
        dtype="bf16",
    ),
    "retnet-decay": _retnet((64, 64), FORWARD, "decay"),
    "retnet-decay-unaligned": _retnet(
        (48, 80), replace(ONE_STAGE, k_slice=48), "decay", copy_bytes=2
    ),
    "retnet-fused": _retnet((64, 64), FUSED),
    "retnet-fused-decay": _retnet((64, 64), FUSED, "decay"),
    "retnet-pair": _retnet((64, 64), PAIR, dtype="bf16"),
    "retnet-pair-decay": _retnet((64, 64), PAIR, "decay"),
    "retnet-split": _retnet((64, 64), SPLIT),
    "retnet-split-unaligned": _retnet((48, 80), SPLIT, copy_bytes=2),
}
WALK = ChunkwiseSm90Knobs(warpgroups=1, num_stages=2)
# Each form; chunks in one pass and over super-chunks; scores computed in a pass and before a pass.
RETENTION: dict[str, Candidate] = {
    "retention-parallel": _retention((64, 64), replace(FORWARD, chunk=64, states=INLINE)),
    "retention-one-pass": _retention((64, 64), ChunksKnobs(chunk=32, output=INLINE)),
    "retention-one-pass-sliced-bf16": _retention(
        (48, 64), ChunksKnobs(chunk=64, output=SLICED), dtype="bf16"
    ),
    "retention-super-chunks-given": _retention(
        (64, 64), ChunksKnobs(chunk=32, super_chunk=64, output=GIVEN)
    ),
    "retention-super-chunks-unaligned": _retention(
        (64, 64), ChunksKnobs(chunk=16, super_chunk=32, output=INLINE), copy_bytes=2
    ),
    "retention-wgmma": _retention((64, 64), WALK),
    "retention-wgmma-super-chunks-sliced-bf16": _retention(
        (64, 192), replace(WALK, warpgroups=2, super_chunk=64), dtype="bf16"
    ),
    "retention-recurrent": _retention((64, 64), RecurrentKnobs(columns=32, warps=2)),
    "retention-recurrent-unaligned": _retention(
        (64, 64), RecurrentKnobs(columns=16, warps=4), copy_bytes=2
    ),
    "retention-backward-inline": _retention(
        (64, 64), ChunksKnobs(chunk=32, dq=INLINE, dk=SLICED, dv=INLINE)
    ),
    "retention-backward-given": _retention(
        (64, 64),
        ChunksKnobs(chunk=32, super_chunk=64, dq=GIVEN, dk=GIVEN, dv=GIVEN),
        dtype="bf16",
    ),
    "retention-backward-super-chunks-unaligned": _retention(
        (64, 64),
        ChunksKnobs(chunk=32, super_chunk=64, dq=INLINE, dk=GIVEN, dv=SLICED),
        copy_bytes=2,
    ),
}
# (batch, heads_q, heads_kv, seqlen_q, seqlen_k, causal, scale) of retnet; seqlen_k is a multiple of 8, plus 1 where
# tensors may be unaligned. (batch, heads_q, heads_kv, tokens, scale) of retention.
MASKED = (
    (1, 2, 1, 1, 8, False, 0.5),
    (2, 2, 1, 77, 88, True, 0.125),
    (1, 2, 2, 91, 40, True, -0.2),
)
TOKENS = ((1, 2, 1, 1, 0.5), (2, 2, 1, 77, 0.125), (1, 2, 2, 150, -0.2))


def retention_calls_of(candidate: Candidate) -> list[RetentionCall]:
    """The launches of a kernel; true dims are one chunk below the padded ones."""
    base = Problem(
        op=candidate.op,
        direction=candidate.direction,
        mask=candidate.mask,
        form=candidate.form,
        dtype=candidate.dtype,
        dim_qk=candidate.padded_dim_qk - 8,
        dim_v=candidate.padded_dim_v - 8,
        causal=True,
        alignment_bytes=candidate.copy_bytes,
    )
    shapes = MASKED
    if candidate.op == "retention":
        shapes = tuple((*heads, n, n, True, scale) for *heads, n, scale in TOKENS)  # type: ignore[assignment]
    calls = []
    for number, (batch, heads_q, heads_kv, seqlen_q, seqlen_k, causal, scale) in enumerate(shapes):
        odd = candidate.op == "retnet" and candidate.copy_bytes == 2
        problem = replace(
            base,
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k + odd,
            causal=causal or candidate.mask != "explicit",
        )
        call = RetentionCall(
            problem=problem,
            scale=scale,
            shared=number == 1,
            r_grad=number == 1,
            whole=number != 2,
        )
        calls.append(call)
    return calls
