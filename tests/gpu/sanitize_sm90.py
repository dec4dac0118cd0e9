"""Kernels of family ``sm90`` for :mod:`.sanitize`: defaults of a few problems, and what searches offer beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attention_autotuner.arch import H100
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem

PLAIN = Problem(batch=8, heads_q=16, heads_kv=16, seqlen_q=2048, seqlen_k=2048, causal=True)
GRADIENTS = replace(PLAIN, direction="backward")
FEW = replace(PLAIN, dtype="bf16", heads_kv=4, seqlen_q=1, causal=False)
MASKED = replace(PLAIN, op="retnet", mask="explicit", causal=False)
RETENTION = replace(GRADIENTS, op="retention")


def _default(problem: Problem, dims: tuple[int, int]) -> Candidate:
    return H100().default(replace(problem, dim_qk=dims[0], dim_v=dims[1]))


def first(problem: Problem, dims: tuple[int, int], wanted: Callable[[str], bool]) -> Candidate:
    """The first candidate of the family whose name is wanted."""
    offered = H100().legal(replace(problem, dim_qk=dims[0], dim_v=dims[1]))
    return next(c for c in offered if c.kernel.endswith("_sm90") and wanted(c.name))


WGMMA: dict[str, Candidate] = {
    "wgmma-forward": _default(PLAIN, (64, 64)),
    "wgmma-forward-overlap-bf16": first(
        replace(PLAIN, dtype="bf16"), (128, 128), lambda name: "g2n128_overlap_optimistic" in name
    ),
    "wgmma-forward-dynamic": first(PLAIN, (96, 96), lambda name: "dynamic" in name),
    "wgmma-decode": _default(FEW, (128, 128)).launched({"splits": 3}),
    "wgmma-decode-many-splits": _default(FEW, (128, 128)).launched({"splits": 12}),
    "wgmma-forward-masked": first(MASKED, (64, 64), lambda name: "exact" in name),
    "wgmma-forward-masked-slices-bf16": _default(replace(MASKED, dtype="bf16"), (128, 304)),
    "wgmma-forward-masked-kept": _default(MASKED, (128, 128)),
    "wgmma-forward-masked-kept-turns-bf16": _default(replace(MASKED, dtype="bf16"), (96, 96)),
    "wgmma-forward-shared-scores": first(MASKED, (256, 512), lambda name: "_x1_" in name),
    "wgmma-backward-claimed-own": _default(GRADIENTS, (64, 64)),
    "wgmma-backward-claimed-turns-bf16": _default(replace(GRADIENTS, dtype="bf16"), (128, 128)),
    "wgmma-backward-claimed-swapped": _default(
        replace(GRADIENTS, seqlen_q=4096, seqlen_k=4096), (128, 128)
    ),
    "wgmma-backward-long-steps": first(
        GRADIENTS, (32, 32), lambda name: "c128s2x2_own2stored" in name and "dynamic" in name
    ),
    "wgmma-backward-claimed-bulk": first(
        GRADIENTS, (96, 96), lambda name: "keys2bulk" in name and "dynamic" in name
    ),
    "wgmma-backward-own": first(GRADIENTS, (64, 64), lambda name: "own2bulk_lpt_early" in name),
    "wgmma-backward-keys-bf16": first(
        replace(GRADIENTS, dtype="bf16"), (128, 128), lambda name: "c64a3x2_keys2bulk" in name
    ),
    "wgmma-backward-turns-bf16": first(
        replace(GRADIENTS, dtype="bf16"),
        (128, 128),
        lambda name: "t3x2_keys2bulk_lpt_early" in name,
    ),
    "wgmma-backward-turns-swapped": first(
        replace(GRADIENTS, causal=False),
        (128, 128),
        lambda name: "c80t3x2_keys1bulk_raster_persistent_early" in name and "dynamic" not in name,
    ),
    "wgmma-backward-shared-keys": _default(GRADIENTS, (256, 256)),
    "wgmma-backward-stored": _default(replace(GRADIENTS, seqlen_q=512, seqlen_k=512), (128, 128)),
    "wgmma-backward-stored-own-bf16": first(
        replace(GRADIENTS, dtype="bf16"), (64, 64), lambda name: "own2stored" in name
    ),
    "wgmma-masked-backward-claimed": first(
        replace(MASKED, direction="backward"), (64, 64), lambda name: "dynamic" in name
    ),
    "wgmma-masked-backward": _default(replace(MASKED, direction="backward"), (64, 64)),
    "wgmma-masked-backward-passes": first(
        replace(MASKED, direction="backward"), (256, 512), lambda name: "k64_dk" in name
    ),
    "wgmma-masked-backward-stored": first(
        replace(MASKED, direction="backward"), (128, 128), lambda name: "stored_dk_g2r128" in name
    ),
    "wgmma-masked-backward-stored-bf16": first(
        replace(MASKED, direction="backward", dtype="bf16"),
        (256, 512),
        lambda name: "k64_stored_dk" in name,
    ),
    "wgmma-backward-ordered": first(GRADIENTS, (64, 64), lambda name: "own2ordered" in name),
    "wgmma-backward-queued": _default(
        replace(GRADIENTS, deterministic=True, dtype="bf16"), (128, 128)
    ),
    "wgmma-backward-queued-own": _default(replace(GRADIENTS, deterministic=True), (64, 64)),
    "wgmma-backward-queued-apart": _default(
        replace(GRADIENTS, causal=False, deterministic=True), (128, 128)
    ),
    "wgmma-backward-two-pass": first(
        replace(GRADIENTS, deterministic=True),
        (64, 64),
        lambda name: "two_pass" in name and "early_gathered" in name,
    ),
    "wgmma-backward-three-pass": first(GRADIENTS, (256, 256), lambda name: "three_pass" in name),
    "wgmma-retention-backward": _default(RETENTION, (64, 64)),
    "wgmma-retention-backward-in-parts": _default(RETENTION, (64, 512)),
    "wgmma-retention-backward-super-chunks": first(
        RETENTION, (128, 128), lambda name: "p512" in name and "chunkwise" in name
    ),
}
