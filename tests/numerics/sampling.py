"""A sample of a policy's candidates in which every value of every knob occurs, and the shapes that each is run on."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import asdict, dataclass, replace

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Direction, Problem

from .cases import Case, Layout

SAMPLE = 24
KNOBS = (
    "block_m", "block_n", "warps_m", "warps_n", "num_stages", "q_in_registers", "qk_ahead",
    "v_slices", "persistent", "cta_order", "ctas_per_sm",
)  # fmt: skip
PROBLEMS = (
    Problem(dim_qk=64, dim_v=64),
    Problem(dim_qk=128, dim_v=128, dtype="bf16"),
    Problem(dim_qk=256, dim_v=256),
    Problem(dim_qk=192, dim_v=128),
    Problem(dim_qk=256, dim_v=512, dtype="bf16"),
    Problem(dim_qk=80, dim_v=80),
    Problem(dim_qk=96, dim_v=256),
    Problem(dim_qk=128, dim_v=128, alignment_bytes=2),
)
# (batch, heads_q, heads_kv, seqlen_q, seqlen_k, mask, scale, lengths taken off the class's dims). The last has more
# tiles than a GPU holds CTAs, so that persistent kernels loop.
SHAPES: tuple[tuple[int, int, int, int, int, str, float | None, int], ...] = (
    (2, 4, 2, 1, 77, "none", None, 0),
    (2, 6, 3, 257, 391, "bottom_right", -0.11, 8),
    (1, 4, 1, 515, 130, "bottom_right", 0.3, 0),
    (16, 16, 8, 293, 203, "top_left", None, 8),
)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One place of a direction's sample; which candidate stands there depends on the GPU at hand."""

    index: int
    direction: Direction = "forward"

    def candidate(self, present: Policy) -> Candidate:
        """The candidate of this place."""
        return sample(present, self.direction)[self.index]


@functools.cache
def sample(
    policy: Policy, direction: Direction = "forward", size: int = SAMPLE, seed: int = 0
) -> tuple[Candidate, ...]:
    """Candidates that a policy offers, such that every value of every knob occurs and every problem's kernels do.

    Args:
        policy: whose.
        direction: of what.
        size: how many.
        seed: of the choice.
    """
    pool = _offered(policy, direction)
    random.Random(seed).shuffle(pool)
    wanted = {value for one in pool for value in _values(one)}
    chosen: dict[Candidate, None] = {}
    of_class: Counter[tuple[object, ...]] = Counter()
    while len(chosen) < min(size, len(pool)):
        # Narrow heads have most candidates: among equals, the class that has fewest in the sample is next.
        best = max(
            (one for one in pool if one not in chosen),
            key=lambda one: (len(wanted & _values(one)), -of_class[_class_of(one)]),
        )
        chosen[best] = None
        of_class[_class_of(best)] += 1
        wanted -= _values(best)
    return tuple(chosen)


def uncovered(policy: Policy, direction: Direction = "forward") -> set[tuple[str, object]]:
    """(knob, value) pairs that a policy offers somewhere and its sample lacks."""
    offered = {value for one in _offered(policy, direction) for value in _values(one)}
    return offered - {value for one in sample(policy, direction) for value in _values(one)}


def _offered(policy: Policy, direction: Direction) -> list[Candidate]:
    problems = (replace(problem, direction=direction) for problem in PROBLEMS)
    return [one for problem in problems for one in policy.legal(problem)]


def cases_of(one: Candidate) -> list[Case]:
    """The shapes a candidate is run on; tensors are unaligned where it is made for that."""
    cases = []
    for number, (batch, heads_q, heads_kv, seqlen_q, seqlen_k, mask, scale, off) in enumerate(
        SHAPES
    ):
        problem = Problem(
            direction=one.direction,
            dtype=one.dtype,
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            dim_qk=one.padded_dim_qk - off,
            dim_v=one.padded_dim_v - off,
            causal=mask != "none",
            alignment_bytes=one.copy_bytes,
        )
        if mask == "top_left":
            problem = replace(problem, causal_alignment="top_left")
        aligned = one.copy_bytes == 16
        gradient: Layout = "broadcast" if number % 2 else "transposed"
        cases.append(
            Case(
                problem=problem,
                scale=scale,
                inputs=("padded" if number % 2 else "transposed") if aligned else "unaligned",
                output="padded" if number % 2 else "dense",
                lse=number != 2,
                gradient=gradient if aligned else "unaligned",
            )
        )
    return cases


def _class_of(one: Candidate) -> tuple[object, ...]:
    return one.padded_dim_qk, one.padded_dim_v, one.copy_bytes


def _values(one: Candidate) -> set[tuple[str, object]]:
    """What a candidate shows of the knobs; slicing counts as such, as the slices' widths follow the head dim."""
    shown: set[tuple[str, object]] = {
        (field, getattr(one, field)) for field in ("copy_bytes", "dtype")
    }
    if one.direction == "forward":
        shown |= {(knob, getattr(one.knobs, knob)) for knob in KNOBS}
        return shown | {("k_sliced", one.knobs.k_slice < one.padded_dim_qk)}
    for name, knobs in one.knobs.passes.items():
        shown |= {(f"{name}.{knob}", value) for knob, value in asdict(knobs).items()}
    return shown | {("plan", one.knobs.plan), ("cta_order", one.knobs.cta_order)}
