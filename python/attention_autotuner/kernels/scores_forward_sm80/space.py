"""The forward candidates that a policy offers, in a fixed order, and the one that needs no tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ...arch.spec import ArchSpec
from ...core.candidate import Candidate, Rejection
from ...core.problem import Problem, Score
from ..chunks_sm80.knobs import ChunkPass
from ..chunks_sm80.space import ChunkPasses
from ..shared.engine import residency
from ..shared.estimates import expected_usage
from ..shared.forms import default_form, forms
from ..shared.knobs import CtaOrder
from ..shared.passes import check_passes, first_legal, points_of
from ..shared.split_kv import keys_should_split, reads_caches, rows_of_group, split_counts
from .knobs import ForwardKnobs
from .resources import keys_stream, needs
from .rules import (
    MIN_SHARED_P_COLUMNS,
    MIN_SLICE_COLUMNS,
    PRUNING_PREDICATES,
    narrow_slices,
    passes_of,
)


@dataclass(frozen=True, kw_only=True)
class ForwardSpace:
    """The values each knob may take; their product, less what :mod:`.legality` rejects, is what a policy offers.

    Attributes:
        tiles: (block_m, warps_m) pairs.
        block_n: key rows of a step.
        warps_n: warps along keys and value columns.
        num_stages: K/V stages.
        k_slice: columns of K per step; 0 stands for all of them.
        v_slices: CTAs that share a row block.
        schedules: (persistent, cta_order) pairs.
        ctas_per_sm: launch bounds.
    """

    tiles: tuple[tuple[int, int], ...] = ((128, 4), (64, 4), (128, 8), (64, 2), (192, 6), (256, 8))
    block_n: tuple[int, ...] = (64, 128, 32, 96, 48)
    warps_n: tuple[int, ...] = (1, 2)
    num_stages: tuple[int, ...] = (1, 2, 3)
    k_slice: tuple[int, ...] = (0, 64, 32)
    v_slices: tuple[int, ...] = (1, 2, 4)
    schedules: tuple[tuple[bool, CtaOrder], ...] = (
        (False, "raster"),
        (False, "longest_first"),
        (True, "longest_first"),
    )
    ctas_per_sm: tuple[int, ...] = (1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class ForwardPreference:
    """One row of a policy's default table.

    Attributes:
        up_to: both padded head dims are at most this.
        block_m, block_n, warps_m, num_stages, q_in_registers, ctas_per_sm: the knobs of these names.
        above: both padded head dims are more than this.
        scores: the score modifications that the row is for.
    """

    up_to: int
    block_m: int
    block_n: int
    warps_m: int
    num_stages: int
    q_in_registers: bool = False
    ctas_per_sm: int = 1
    above: int = 0
    scores: tuple[Score, ...] = ("softmax", "masked", "decayed")

    def covers(self, problem: Problem) -> bool:
        """True for a problem of its head dims and score modification."""
        dims = (problem.padded_dim_qk, problem.padded_dim_v)
        return self.above < min(dims) and max(dims) <= self.up_to and problem.score in self.scores


# Tried in order, the first legal row whose `up_to` covers both padded head dims wins. Which rows lead was measured on
# an H200 (docs/kernel_log.md); the smaller ones are for GPUs with less shared memory and follow FlashAttention-2's
# choices.
FORWARD_PREFERENCES: tuple[ForwardPreference, ...] = (
    ForwardPreference(up_to=64, block_m=128, block_n=128, warps_m=4, num_stages=2),
    ForwardPreference(up_to=64, block_m=128, block_n=64, warps_m=4, num_stages=1),
    ForwardPreference(up_to=128, block_m=128, block_n=64, warps_m=4, num_stages=1),
    ForwardPreference(up_to=128, block_m=128, block_n=32, warps_m=4, num_stages=2),
    ForwardPreference(up_to=128, block_m=128, block_n=32, warps_m=4, num_stages=1),
    ForwardPreference(
        up_to=256, block_m=64, block_n=32, warps_m=4, num_stages=2, q_in_registers=True
    ),
    ForwardPreference(up_to=256, block_m=64, block_n=64, warps_m=4, num_stages=1),
    ForwardPreference(up_to=256, block_m=64, block_n=32, warps_m=4, num_stages=1),
    ForwardPreference(up_to=512, block_m=128, block_n=64, warps_m=8, num_stages=2),
    ForwardPreference(up_to=512, block_m=64, block_n=64, warps_m=4, num_stages=1),
    ForwardPreference(up_to=512, block_m=64, block_n=32, warps_m=4, num_stages=1),
)

LEAST_BLOCK_N = 32

# Few queries: (block_m, warps_m, warps_n), keys of a step, stages, in the order of the default's choice, whose tile is
# the first that holds the rows of a group. Two stages of several CTAs have as many bytes on their way as more of one.
STREAM_TILES: tuple[tuple[int, int, int], ...] = (
    (16, 1, 4),
    (16, 1, 2),
    (32, 2, 2),
    (32, 2, 1),
    (64, 4, 1),
    (128, 4, 1),
)
STREAM_BLOCKS = (64, 128, 32)
STREAM_STAGES = (2, 3, 4)
FEW_ROWS = 64  # more fill tiles of usual kernels
NEAR_ROWS = 4  # times the rows of a tile, or of a group, that the other may be

# Retention's parallel form where it is one of several; where it is the only one it has all that attention has.
AUTO_ROWS = ForwardSpace(
    tiles=((128, 4), (64, 4), (128, 8)),
    block_n=(64, 32),
    num_stages=(2, 1),
    k_slice=(0,),
    schedules=((False, "longest_first"),),
    ctas_per_sm=(1, 2),
)
SPACES: dict[str, ForwardSpace] = {}  # by the spec's name; the others have the values above
# Likewise. On an RTX 4090 the recorded searches (tests/recorded_searches.py) have this tile 8.6 % ahead of the general
# row's at head dim 128, and the cost model sides with them; see docs/cost_model.md.
PREFERENCES: dict[str, tuple[ForwardPreference, ...]] = {
    "RTX4090": (
        ForwardPreference(
            above=112,
            up_to=128,
            block_m=128,
            block_n=32,
            warps_m=8,
            num_stages=1,
            ctas_per_sm=2,
            scores=("softmax",),
        ),
        *FORWARD_PREFERENCES,
    )
}


def points(problem: Problem, spec: ArchSpec) -> Iterator[ForwardKnobs | Rejection]:
    """Every point of the space, as knobs or as the rejection that says why not.

    Points that differ only in a knob the problem has no use for (slices of a narrow head, say) appear once.
    """
    space = SPACES.get(spec.name, ForwardSpace())
    if not problem.semantics.carries_state:
        yield from _row_points(problem, space, spec)
        if _may_stream(problem, spec):
            yield from _streaming(problem, spec)
        return
    if "parallel" not in forms(problem):
        return
    passes = ChunkPasses(problem, spec)
    states = _states(problem, passes)
    if states is None:
        yield from passes.rejections()
        return
    rows = space if problem.form == "parallel" else AUTO_ROWS
    yield from _row_points(problem, rows, spec, *states)


def _block_n(block_n: int, problem: Problem) -> int:
    """The keys of a step by default: windows and what bends scores take registers that wide steps do not leave."""
    return max(block_n // 2, LEAST_BLOCK_N) if problem.compiled_modifications else block_n


def default(problem: Problem, spec: ArchSpec) -> ForwardKnobs | None:
    """The first row of the default table that is legal, or None."""
    chunk, states = None, None
    if (stream := _default_stream(problem, spec)) is not None:
        return stream
    if problem.semantics.carries_state:
        if default_form(problem) != "parallel":
            return None
        chosen_states = _states(problem, ChunkPasses(problem, spec))
        if chosen_states is None:
            return None
        chunk, states = chosen_states
    v_slices = _v_slices(problem, SPACES.get(spec.name, ForwardSpace()))
    rows = PREFERENCES.get(spec.name, FORWARD_PREFERENCES)
    preferred = (
        ForwardKnobs(
            block_m=row.block_m,
            block_n=_block_n(row.block_n, problem),
            warps_m=row.warps_m,
            num_stages=row.num_stages,
            k_slice=problem.padded_dim_qk,
            v_slices=slices,
            cta_order="longest_first" if problem.causal else "raster",
            q_in_registers=row.q_in_registers,
            ctas_per_sm=row.ctas_per_sm,
            chunk=chunk,
            states=states,
        )
        for row in rows
        if row.covers(problem)
        for slices in v_slices
    )
    return first_legal(problem, spec, preferred, passes_of, PRUNING_PREDICATES)


def _row_points(
    problem: Problem,
    space: ForwardSpace,
    spec: ArchSpec,
    chunk: int | None = None,
    states: ChunkPass | None = None,
) -> Iterator[ForwardKnobs | Rejection]:
    """The points of the kernel over blocks of rows, each with the same pass for the states."""
    k_slices = [s or problem.padded_dim_qk for s in space.k_slice if s < problem.padded_dim_qk]
    v_slices = _v_slices(problem, space)
    warps_n = [w for w in space.warps_n if w == 1 or problem.padded_dim_v >= MIN_SHARED_P_COLUMNS]
    for (block_m, warps_m), block_n, n, stages, k, v, ctas in product(
        space.tiles, space.block_n, warps_n, space.num_stages, k_slices, v_slices, space.ctas_per_sm
    ):
        for q_in_registers, qk_ahead in product((False, True), repeat=2):
            if qk_ahead and (stages != 2 or k != problem.padded_dim_qk or n > 1):
                continue  # not a point of the space: see qk_ahead_needs_two_whole_stages
            knobs = ForwardKnobs(
                block_m=block_m,
                block_n=block_n,
                warps_m=warps_m,
                warps_n=n,
                num_stages=stages,
                q_in_registers=q_in_registers,
                qk_ahead=qk_ahead,
                k_slice=k,
                v_slices=v,
                ctas_per_sm=ctas,
                chunk=chunk,
                states=states,
            )
            candidate = Candidate.of(problem, knobs)
            rejection = check_passes(candidate, passes_of, spec, PRUNING_PREDICATES)
            if rejection is not None:
                yield rejection
                continue
            for persistent, order in space.schedules:
                if problem.packed and persistent:
                    continue  # see packed_tiles_are_dispatched
                yield replace(knobs, persistent=persistent, cta_order=order)


def _may_stream(problem: Problem, spec: ArchSpec) -> bool:
    """True where queries are few, or their tiles leave SMs idle beside long keys: a chunk of a prompt of few heads."""
    if problem.score != "softmax":
        return False
    listed = problem.spanned or problem.packed
    chunk = not listed and keys_should_split(problem, STREAM_TILES[-1][0], spec)
    return chunk or keys_stream(problem)


def _streaming(problem: Problem, spec: ArchSpec) -> Iterator[ForwardKnobs | Rejection]:
    """Few queries, whose time is that of reading K and V: rows of all heads of a group, keys split among CTAs."""
    rows = rows_of_group(problem)
    v_slices = narrow_slices(problem.padded_dim_v) or 1
    for (block_m, warps_m, warps_n), block_n, stages in product(
        STREAM_TILES, STREAM_BLOCKS, STREAM_STAGES
    ):
        near = max(STREAM_TILES[0][0], rows) * NEAR_ROWS, NEAR_ROWS * block_m
        if block_m > near[0] or min(rows, STREAM_TILES[-1][0]) > near[1]:
            continue
        knobs = ForwardKnobs(
            block_m=block_m,
            block_n=block_n,
            warps_m=warps_m,
            warps_n=warps_n,
            num_stages=stages,
            k_slice=problem.padded_dim_qk,
            v_slices=v_slices,
            cta_order="longest_first" if problem.causal else "raster",
            pack_gqa=problem.heads_q > problem.heads_kv,
            split_kv=True,
        )
        for point in points_of(problem, spec, [knobs], passes_of, PRUNING_PREDICATES):
            if isinstance(point, Rejection):
                yield point
                continue
            for splits in split_counts(problem, point, _slots(problem, point, spec)):
                yield replace(point, splits=splits)


def _slots(problem: Problem, knobs: ForwardKnobs, spec: ArchSpec) -> int:
    """CTAs that the GPU holds at a time."""
    kernel = needs(Candidate.of(problem, knobs))
    usage = expected_usage(kernel, spec)
    placed = residency(spec, usage, threads=kernel.threads, ctas=1, filled=False)
    return spec.num_sms if placed is None else placed.slots


def _default_stream(problem: Problem, spec: ArchSpec) -> ForwardKnobs | None:
    """The first streaming point whose tile holds the rows, and of whose CTAs an SM holds two, or else one.

    The largest legal tile where none holds them; None where queries or their tiles are many. What a chunk of few heads
    gains was not measured: by the cost model it takes 0.14 of the time with 512 queries of 4 heads on 32k keys.
    """
    rows = rows_of_group(problem)
    few = min(rows, problem.seqlen_q + 1) <= FEW_ROWS
    largest = STREAM_TILES[-1][0]
    if not _may_stream(problem, spec) or (problem.packed and not reads_caches(problem)):
        return None
    if not few and not keys_should_split(problem, largest, spec):
        return None
    points = [p for p in _streaming(problem, spec) if not isinstance(p, Rejection)]
    largest = max((p.block_m for p in points), default=largest)
    suited = [p for p in points if p.block_m >= min(rows, largest)]
    doubled = (p for p in suited if _slots(problem, p, spec) >= 2 * spec.num_sms)
    return next(doubled, next(iter(suited), None))


def _v_slices(problem: Problem, space: ForwardSpace) -> list[int]:
    """The space's slices that leave columns enough, and those that a padded head dim needs which has no such."""
    enough = [s for s in space.v_slices if s == 1 or problem.padded_dim_v // s >= MIN_SLICE_COLUMNS]
    narrow = narrow_slices(problem.padded_dim_v)
    return enough if narrow is None else [*enough, narrow]


def _states(problem: Problem, passes: ChunkPasses) -> tuple[int, ChunkPass] | None:
    """The chunk and the pass that every parallel candidate gives the states: they are no part of its usual work."""
    for chunk in passes.chunk_order(problem.padded_dim_qk):
        states = passes.first("states", chunk)
        if states is not None:
            return chunk, states
    return None
