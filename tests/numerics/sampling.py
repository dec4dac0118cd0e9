"""A sample of a policy's candidates in which every value of every knob occurs, and the shapes that they are run on."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import asdict, dataclass, replace

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Direction, Problem

from .cases import Case, Layout

Values = frozenset[tuple[str, object]]

SAMPLE = 32
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
    """One place of a direction's sample; its candidate depends on the present GPU."""

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
        policy: the policy that offers the candidates.
        direction: their direction.
        size: number of candidates.
        seed: seed of the choice.
    """
    pool = list(_offered(policy, direction).items())
    random.Random(seed).shuffle(pool)
    wanted = set().union(*(values for _, values in pool))
    chosen: list[Candidate] = []
    of_class: Counter[tuple[object, ...]] = Counter()
    while pool and len(chosen) < size:
        # Small head dims have most candidates: among equals, the class with the fewest in the sample is next.
        place = max(
            range(len(pool)),
            key=lambda i: (len(wanted & pool[i][1]), -of_class[_class_of(pool[i][0])]),
        )
        best, values = pool.pop(place)
        chosen.append(best)
        of_class[_class_of(best)] += 1
        wanted -= values
    return tuple(chosen)


def uncovered(policy: Policy, direction: Direction = "forward") -> set[tuple[str, object]]:
    """(knob, value) pairs that a policy offers somewhere and its sample lacks."""
    values = _offered(policy, direction)
    every = set().union(*values.values())
    return every.difference(*(values[candidate] for candidate in sample(policy, direction)))


@functools.cache
def _offered(policy: Policy, direction: Direction) -> dict[Candidate, Values]:
    """The candidates that a policy offers for the sampled problems, each with the values of its knobs."""
    problems = (replace(problem, direction=direction) for problem in PROBLEMS)
    return {
        candidate: frozenset(_values(candidate))
        for problem in problems
        for candidate in policy.legal(problem)
    }


def cases_of(candidate: Candidate) -> list[Case]:
    """The cases that a candidate is run on; tensors are unaligned for candidates of narrow copies."""
    cases = []
    for number, (batch, heads_q, heads_kv, seqlen_q, seqlen_k, mask, scale, off) in enumerate(
        SHAPES
    ):
        problem = Problem(
            direction=candidate.direction,
            dtype=candidate.dtype,
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            dim_qk=candidate.padded_dim_qk - off,
            dim_v=candidate.padded_dim_v - off,
            causal=mask != "none",
            alignment_bytes=candidate.copy_bytes,
        )
        if mask == "top_left":
            problem = replace(problem, causal_alignment="top_left")
        aligned = candidate.copy_bytes == 16
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


def _class_of(candidate: Candidate) -> tuple[object, ...]:
    return candidate.padded_dim_qk, candidate.padded_dim_v, candidate.copy_bytes


def _values(candidate: Candidate) -> set[tuple[str, object]]:
    """The values of a candidate's knobs; of the slices only that there are any, as their widths follow the head dim."""
    shown: set[tuple[str, object]] = {
        (field, getattr(candidate, field)) for field in ("copy_bytes", "dtype")
    }
    if candidate.family == "sm90":
        for name, value in asdict(candidate.knobs).items():
            fields = value if isinstance(value, dict) else {"": value}
            shown |= {(f"sm90.{name}.{field}", knob) for field, knob in fields.items()}
        return shown
    if candidate.direction == "forward":
        shown |= {(knob, getattr(candidate.knobs, knob)) for knob in KNOBS}
        return shown | {("k_sliced", candidate.knobs.k_slice < candidate.padded_dim_qk)}
    for name, knobs in candidate.knobs.passes.items():
        shown |= {(f"{name}.{knob}", value) for knob, value in asdict(knobs).items()}
    return shown | {("plan", candidate.knobs.plan), ("cta_order", candidate.knobs.cta_order)}
