"""Knobs of attention's forward kernel of family ``sm90``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...core.candidate import Service, knobs_as, launch_knob
from ...core.identity import LATER, later_words
from ...core.modifications import COMPILED
from ..shared.knobs import Sm90Knobs, Warpgroups
from ..shared.split_kv import check_splits, split_words

Mainloop = Literal["strict", "serial", "scores_first", "overlap", "overlap_flat"]
Output = Literal["through_q", "direct"]
Schedule = Literal["grid", "static", "dynamic"]

WARPGROUP_ROWS = 64  # queries of a tile for each warpgroup: of one wgmma
OUTPUT_LABELS: dict[Output, str] = {"through_q": "oq", "direct": "od"}  # in candidates' names


@dataclass(frozen=True, kw_only=True)
class AttentionForwardSm90Knobs(Warpgroups, Sm90Knobs):
    """Attention forward of family ``sm90``.

    Attributes:
        warpgroups: consumers; every one has 64 query rows. One is for few queries.
        block_n: key rows of one step of the main loop.
        mainloop: the order of scores, softmax and output of a warpgroup. ``strict``: one tile of keys after the other;
            ``serial``: the output of one tile and the scores of the next in flight together, the softmax alone;
            ``scores_first``: the same with the scores issued first, and modified while the output is in flight;
            ``overlap``: the softmax of the next tile while the output of one is in flight; ``overlap_flat``: the same
            across tiles of rows as well.
        optimistic: exponentials are taken with the maximum of the tile before, and again where that was too low.
        ping_pong: warpgroups issue their MMAs by turns.
        q_stages: shared-memory stages of Q; with two, that of the next tile of rows arrives early.
        k_stages: stages of K.
        v_stages: stages of V.
        mask_stages: stages of retnet's mask; 0 without one.
        v_slices: CTAs that share a tile of rows, each computing its part of the columns of V.
        exchange_stages: stages of P that the two slices of a tile of rows send each other, as a cluster in which each
            computes the scores of half of a step's keys; 0 where each computes all of them. K and V then go through
            one ring of the stages of both.
        kept_depth: columns of Q that stay in registers, so that shared memory is read less.
        output: ``through_q``: O leaves through the shared memory of its Q, by TMA; ``direct``: from registers.
        schedule: ``grid``: one CTA for each tile of rows; ``static``: CTAs stay and take every n-th tile; ``dynamic``:
            they claim the next one.
        pack_gqa: the rows of a tile are pairs of a query and a head, of the heads that share one of K and V.
        split_kv: CTAs may share the keys of a tile of rows; a second kernel combines their results.
        splits: CTAs that do, at most one for each tile of keys.

    Raises:
        ValueError: ``splits`` is none, or more than one without ``split_kv``.
    """

    kernel: ClassVar[str] = "attention_forward_sm90"
    serves: ClassVar[frozenset[Service]] = frozenset(
        {("attention", "forward", "softmax"), ("retnet", "forward", "masked")}
    )
    modifications: ClassVar[frozenset[str]] = frozenset(COMPILED)

    warpgroups: int
    block_n: int
    mainloop: Mainloop = field(metadata=later_words("scores_first"))
    optimistic: bool = True
    ping_pong: bool = False
    q_stages: int = 2
    k_stages: int = 2
    v_stages: int = 2
    mask_stages: int = 0
    v_slices: int = 1
    exchange_stages: int = field(default=0, metadata=LATER)
    kept_depth: int = field(default=0, metadata=LATER)
    output: Output = "through_q"
    schedule: Schedule = "dynamic"
    pack_gqa: bool = False
    split_kv: bool = False
    splits: int = launch_knob(1)

    def __post_init__(self) -> None:
        check_splits(self)

    @property
    def block_m(self) -> int:
        """Query rows of one CTA tile."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def score_keys(self) -> int:
        """Keys of a step whose scores one CTA computes."""
        return self.block_n // self.v_slices if self.exchange_stages else self.block_n

    @property
    def overlaps(self) -> bool:
        """True where the softmax runs beside MMAs of its own warpgroup."""
        return self.mainloop in ("overlap", "overlap_flat")

    @property
    def label(self) -> str:
        """This part of the candidate's name."""
        masked = self.mask_stages > 0 or self.v_slices > 1
        return "_".join(
            [
                f"g{self.warpgroups}n{self.block_n}",
                self.mainloop,
                "optimistic" if self.optimistic else "exact",
                "turns" if self.ping_pong else "free",
                f"q{self.q_stages}k{self.k_stages}v{self.v_stages}",
                *([f"m{self.mask_stages}v{self.v_slices}"] if masked else []),
                *([f"x{self.exchange_stages}"] if self.exchange_stages else []),
                *([f"k{self.kept_depth}"] if self.kept_depth else []),
                OUTPUT_LABELS[self.output],
                self.schedule,
                *split_words(self),
            ]
        )


knobs_of = knobs_as(AttentionForwardSm90Knobs)
