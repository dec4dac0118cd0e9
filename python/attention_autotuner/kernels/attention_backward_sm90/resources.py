"""Resources that the passes of attention's backward of family ``sm90`` take from an SM, as formulas over their knobs.

``smem_bytes`` is exact and the twin of ``BackwardPassSm90Traits::kSmemBytes`` (a test compares the two).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...arch.h100 import H100_SPEC
from ...arch.occupancy import REGISTERS_BESIDE_FRAGMENTS_MIN, KernelNeeds
from ...core.candidate import Candidate
from ...core.modifications import PACKED, TYPICAL_BIAS_DISTANCE
from ...core.problem import Problem
from ...core.sizes import ELEMENT_BYTES, FP32_BYTES
from ..shared import workspace
from ..shared.sm90_tiles import SWIZZLE_COLUMNS, Sm90Shape, cta_bytes, whole_columns
from ..shared.workspace import LISTED_BYTES
from .knobs import STORED, BackwardPassSm90, DqShareSm90, knobs_of

CONSUMER_REGISTERS = {(2, False): 240, (2, True): 208, (3, False): 160}  # by owns_dq, too
OTHER_REGISTERS = {(2, False): 24, (2, True): 24 + 72, (3, False): 32}  # producer and dQ
REGISTERS_BESIDE_FACTORS = 56  # of retnet's steps of more than 64 columns
# By turns, and of the interleaved order where dQ is another warpgroup's.
REGISTERS_BESIDE_SPARING = 32
OWN_DQ_STAGES = 2  # of shares on their way to the thread that stores them, if a warpgroup of its own computes them
SWAPPED_BLOCK = 80  # queries of a step for which rows of dQ's MMAs are columns of dQ
VALUE_BYTES = 4  # of a row of base or of shift
SEMAPHORE_BYTES = 4
CLAIM_BYTES = 128  # of barriers and slots, where CTAs claim blocks
BIAS_WARP_BYTES = 2048  # of a warp that sums dS by distance from the diagonal
P_STAGES = 2  # of P between warpgroups that share rows
ENOUGH_CTAS = H100_SPEC.num_sms
MOST_SPLIT_BLOCKS = 128  # of a head, beyond which parts of dK and dV take too much memory


@dataclass(frozen=True, kw_only=True)
class BackwardPassSm90Shape(Sm90Shape):
    """A pass with the candidate that it is of.

    Attributes:
        name: ``keys``, ``dk``, ``dv`` or ``dq``.
        knobs: of the pass.
        share: of dQ; None but for a fused pass.
    """

    name: str
    knobs: BackwardPassSm90
    share: DqShareSm90 | None

    @property
    def by_queries(self) -> bool:
        """True where rows are queries, and columns keys."""
        return self.name == "dq"

    @property
    def has_ds(self) -> bool:
        """True where the pass takes dS, and so dP."""
        return self.name != "dv"

    @property
    def has_dv(self) -> bool:
        """True where P is an operand."""
        return self.name in ("keys", "dv")

    @property
    def takes_scores(self) -> bool:
        """True where S has a part in every step: of retnet, dS takes its signs alone, where r has a gradient."""
        return self.has_dv or self.candidate.score == "softmax"

    @property
    def scores_at_once(self) -> bool:
        """True where P and dS of retnet are made from S and dP at once, with the same factors."""
        both = self.has_dv and self.has_ds and self.candidate.score != "softmax"
        return both and self.knobs.issue_order != "interleaved"

    @property
    def owns_dq(self) -> bool:
        """True where a warpgroup does nothing but the share of dQ."""
        return self.share is not None and self.share.dq_by == "own"

    @property
    def block_rows(self) -> int:
        """Rows of the results that one CTA computes."""
        return 64 if self.knobs.shared_rows else 64 * self.knobs.warpgroups

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        return self.knobs.num_threads + 128 * self.owns_dq

    @property
    def consumer_registers(self) -> int | None:
        """Registers of a consumer thread; None where there are not so many warpgroups."""
        if self.share is not None and self.knobs.warpgroups != 2:
            return None
        return CONSUMER_REGISTERS.get((self.knobs.warpgroups, self.owns_dq))

    @property
    def columns(self) -> int:
        """Columns of V and dO as tiles hold them."""
        return whole_columns(self.candidate.padded_dim_v)

    @property
    def products(self) -> int:
        """Columns of all MMAs of a step together, each as many FLOPs a score; without a gradient of r."""
        qk, v = self.candidate.padded_dim_qk, self.candidate.padded_dim_v
        of_qk = self.takes_scores + self.has_ds + (self.share is not None)
        return qk * of_qk + v * (self.has_ds + self.has_dv)

    @property
    def dq_columns(self) -> int:
        """Columns of the MMAs of a warpgroup for the share of dQ, whose 64 rows are queries, or columns of dQ."""
        qk = self.candidate.padded_dim_qk
        if self.owns_dq:
            return min(qk, 64)
        block = self.knobs.block_columns
        return block if block in (64, SWAPPED_BLOCK) else qk

    @property
    def dq_fragments(self) -> int:
        """Registers of the share of dQ in a warpgroup of keys."""
        return 0 if self.share is None or self.owns_dq else self.dq_columns // 2

    @property
    def registers_beside(self) -> int:
        """Registers that a thread needs at least beside its fragments."""
        if self.candidate.score != "softmax" and self.knobs.block_columns > SWIZZLE_COLUMNS:
            return REGISTERS_BESIDE_FACTORS
        order = self.knobs.issue_order
        sparing = order == "by_turns" or (self.owns_dq and order == "interleaved")
        return REGISTERS_BESIDE_SPARING if sparing else REGISTERS_BESIDE_FRAGMENTS_MIN

    @property
    def fragment_registers(self) -> int:
        """Registers of a thread's fragments: the results, and what is there beside them at a time."""
        qk, v = self.candidate.padded_dim_qk, self.candidate.padded_dim_v
        order, half = self.knobs.issue_order, self.knobs.block_columns // 2
        if self.knobs.shared_rows:  # one result, its scores and its operand
            return max(qk, v) // 2 + half + half // 2
        results = (self.has_ds * qk + self.has_dv * v) // 2
        shares = order == "by_turns"
        scores = half if shares else (1 + self.has_ds) * half
        packed = half // 2 if shares else (self.has_ds + self.has_dv) * half // 2
        beside = {
            "both_ahead": scores + packed + self.dq_fragments,
            "scores_ahead": half + max(packed, self.dq_fragments),
            "serial": packed + self.dq_fragments,
            "interleaved": scores + packed // 2,
            "by_turns": scores + packed,
        }
        held = self.knobs.held_rows * (qk + self.has_ds * v) // 4
        return results + held + max(scores, beside[order])


def shapes(candidate: Candidate) -> tuple[BackwardPassSm90Shape, ...]:
    """The passes of a candidate, in the order they run."""
    knobs = knobs_of(candidate)
    return tuple(
        BackwardPassSm90Shape(candidate=candidate, name=name, knobs=item, share=knobs.dq_share)
        for name, item in knobs.passes.items()
    )


def smem_bytes(shape: BackwardPassSm90Shape) -> int:
    """Dynamic shared memory of one CTA, bytes."""
    knobs = shape.knobs
    rows = shape.block_rows * (shape.depth + shape.has_ds * shape.columns)
    stages = knobs.first_stages * shape.depth + knobs.second_stages * shape.columns
    ds = 0 if shape.share is None else shape.share.ds_stages * shape.block_rows
    p = P_STAGES * shape.block_rows if knobs.shared_rows else 0
    sums = 0
    if shape.share is not None and shape.share.dq_add == "bulk":
        groups = 1 if shape.owns_dq else knobs.warpgroups
        sums = 64 * groups * shape.dq_columns * FP32_BYTES
    elif shape.share is not None and shape.share.dq_add in STORED:
        copies = OWN_DQ_STAGES if shape.owns_dq else 1
        sums = copies * knobs.block_columns * shape.candidate.padded_dim_qk * FP32_BYTES
    results = shape.block_rows * shape.columns if _stores_apart(shape) else 0
    staged = knobs.first_stages + knobs.second_stages
    values = 0 if shape.by_queries else staged * knobs.block_columns * VALUE_BYTES
    masks = knobs.mask_stages * shape.block_rows
    tiles = rows + results + knobs.block_columns * (stages + masks + ds + p)
    claims = CLAIM_BYTES * knobs_of(shape.candidate).dynamic
    used = cta_bytes(tiles, sums + values + claims)
    of_bias = 4 * knobs.warpgroups * BIAS_WARP_BYTES if _may_sum_bias(shape) else 0
    return used + (of_bias if used + of_bias <= H100_SPEC.smem_per_block_bytes else 0)


def _stores_apart(shape: BackwardPassSm90Shape) -> bool:
    """True where results that TMA stores have a place of their own, as X1 is in registers."""
    stores = knobs_of(shape.candidate).dynamic and shape.depth <= shape.columns
    return stores and shape.knobs.held_rows


def _may_sum_bias(shape: BackwardPassSm90Shape) -> bool:
    """True where the pass finds the gradient of a bias table if there is shared memory for it."""
    names = set(shape.candidate.modifications)
    plain = "bias_table" in names and not names & {"softcap", PACKED}
    return plain and shape.has_ds and not shape.by_queries and not shape.knobs.shared_rows


def sums_bias(problem: Problem, candidate: Candidate) -> bool:
    """True where the pass over keys finds the gradient of a bias table of typical distance.

    Where a CTA has several query heads, or no shared memory left, a kernel of its own does.
    """
    keys = shapes(candidate)[0]
    one_head = problem.heads_q // problem.heads_kv == head_splits(problem, candidate)
    if not (one_head and _may_sum_bias(keys)):
        return False
    without = replace(keys, candidate=replace(candidate, modifications=()))
    return smem_bytes(keys) > smem_bytes(without)


def needs(shape: BackwardPassSm90Shape) -> KernelNeeds:
    """Resources that the kernel takes. Warpgroups trade registers, so fragments are what is left of an even share."""
    groups = shape.knobs.warpgroups
    others = OTHER_REGISTERS.get((groups, shape.owns_dq), 0)
    consumers = groups * (shape.fragment_registers + shape.registers_beside)
    even = (consumers + others) // (shape.threads // 128)
    return KernelNeeds(
        name=shape.name,
        threads=shape.threads,
        ctas_per_sm=1,
        smem_bytes=smem_bytes(shape),
        fragment_registers=max(0, even - REGISTERS_BESIDE_FRAGMENTS_MIN),
    )


def head_splits(problem: Problem, candidate: Candidate) -> int:
    """CTAs that share a block of keys, each with some of the query heads of a group."""
    keys = shapes(candidate)[0]
    if not has_uneven_parts(keys):
        return splits_of_block(problem, keys.block_rows)
    head_bytes = streamed_bytes(problem, keys, ENOUGH_CTAS * keys.block_rows)
    return splits_of_block(problem, keys.block_rows, head_bytes)


def has_tail(shape: BackwardPassSm90Shape) -> bool:
    """True where the list of a pass may have a tail of heads side by side: ``kTailed`` of its traits."""
    queued = shape.share is not None and shape.share.dq_add == "queued"
    return knobs_of(shape.candidate).dynamic and not (queued or shape.by_queries)


def has_uneven_parts(shape: BackwardPassSm90Shape) -> bool:
    """True where CTAs that share a block of keys may have unlike numbers of heads: ``kUnevenParts`` of its traits."""
    return has_tail(shape) or (shape.packed and not shape.by_queries)


def streamed_bytes(problem: Problem, shape: BackwardPassSm90Shape, rows: int) -> int:
    """Bytes that blocks of a head stream of so many rows, with the sums of dQ."""
    sums = FP32_BYTES * problem.dim_qk if shape.share is not None else 0
    return rows * (ELEMENT_BYTES * (problem.dim_qk + problem.dim_v) + sums)


def splits_of_block(problem: Problem, block: int, head_bytes: int | None = None) -> int:
    """The same of so many keys a block.

    ``head_bytes`` is what the CTAs of all SMs stream of a head, where their parts may be uneven.
    """
    counted, enough = workspace.KeyBlocks.of(problem, block, ENOUGH_CTAS), ENOUGH_CTAS
    bounded = 0 <= problem.window_size[0] < problem.seqlen_k
    uneven = problem.causal and not bounded and not problem.spanned
    if uneven and counted.of_head <= MOST_SPLIT_BLOCKS:
        if head_bytes is not None:
            group = problem.heads_q // problem.heads_kv
            return workspace.count_tailed_head_splits(counted, group, head_bytes)
        enough = workspace.enough_uneven_ctas(counted.of_head, ENOUGH_CTAS)
    return workspace.count_head_splits(problem, counted.all, enough)


def dq_sum_bytes(problem: Problem, shape: BackwardPassSm90Shape) -> int:
    """Bytes of the sums of dQ, of the semaphores that order them, and of counters; none without a share."""
    if shape.share is None:
        return 0
    block = shape.knobs.block_columns
    tiles = workspace.query_tiles(problem, block)
    counted = dict.fromkeys(STORED, 1) | {"ordered": 1 if shape.owns_dq else shape.knobs.warpgroups}
    semaphores = tiles * counted.get(shape.share.dq_add, 0) * SEMAPHORE_BYTES
    groups = problem.batch * problem.heads_kv * head_splits(problem, shape.candidate)
    counters = (groups + knobs_of(shape.candidate).dynamic) * SEMAPHORE_BYTES
    sums = tiles * block * problem.padded_dim_qk * FP32_BYTES
    return sums + -(-semaphores // 16) * 16 + -(-counters // 16) * 16


def workspace_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of LSE and delta, sums of dQ, partial dK and dV, the list of packed blocks, sums for a bias table."""
    sums = dq_sum_bytes(problem, shapes(candidate)[0])
    listed = 0
    if problem.packed:
        blocks = (
            workspace.count_blocks(problem, shape.block_rows, by_queries=shape.by_queries)
            for shape in shapes(candidate)
        )
        listed = LISTED_BYTES * (max(blocks) + 1)  # and how many there are
    usual = workspace.backward_bytes(problem, head_splits(problem, candidate))
    used = usual + sums + listed
    of_bias = workspace.bias_sums_bytes(problem)
    if sums_bias(problem, candidate):
        keys = shapes(candidate)[0]
        key_blocks = -(-problem.seqlen_k // keys.block_rows)
        count = problem.heads_q * problem.batch * key_blocks * keys.knobs.warpgroups
        of_bias = FP32_BYTES * count * (2 * TYPICAL_BIAS_DISTANCE + 1)
    return -(-used // 16) * 16 + of_bias if of_bias else used
