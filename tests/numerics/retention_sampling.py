"""Samples of the candidates of retnet and retention: of each kind as many as show every value of every knob."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Form, Problem

from .retention_cases import RETENTION_FORMS, RetentionCase
from .retnet_cases import RetnetCase

MAX_SAMPLE = 12
SIDES = (64, 128)  # head dims of the sampled kernels, the second in bf16
_RETNET = Problem(op="retnet", mask="explicit")
_RETENTION = Problem(op="retention", causal=True)
_DECAY = replace(_RETNET, mask="decay", causal=True)
KINDS: dict[str, tuple[Problem, ...]] = {
    "retnet-forward": (_RETNET, _DECAY),
    "retnet-backward": tuple(replace(one, direction="backward") for one in (_RETNET, _DECAY)),
    **{f"retention-{form}": (replace(_RETENTION, form=form),) for form in RETENTION_FORMS},
    "retention-backward": (replace(_RETENTION, direction="backward"),),
}
"""Kind -> what its kernels solve, but for dims, dtype and alignment."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One place of a kind's sample; which candidate stands there, if any, depends on the GPU at hand."""

    kind: str
    index: int

    def kernels_of(self, present: Policy) -> list[Candidate]:
        """The candidate of this place, none where the sample is smaller."""
        return list(sample(present, self.kind))[self.index : self.index + 1]


PLACES = [Sampled(kind=kind, index=index) for kind in KINDS for index in range(MAX_SAMPLE)]


def offered(policy: Policy, kind: str) -> list[Candidate]:
    """All candidates of a kind that a policy offers for the sampled classes."""
    found: list[Candidate] = []
    for base in KINDS[kind]:
        for side, dtype, width in ((64, "fp16", 16), (128, "bf16", 16), (64, "fp16", 2)):
            problem = replace(
                base,
                dim_qk=side,
                dim_v=side,
                dtype=dtype,  # type: ignore[arg-type]  # a literal
                alignment_bytes=width,  # type: ignore[arg-type]  # a literal
            )
            found += policy.legal(problem)
    return found


@functools.cache
def sample(policy: Policy, kind: str, seed: int = 0) -> tuple[Candidate, ...]:
    """The fewest that were found to show every value of every knob; at most :data:`MAX_SAMPLE`."""
    pool = offered(policy, kind)
    random.Random(seed).shuffle(pool)
    shown = {one: frozenset(values(one)) for one in pool}
    wanted = set().union(*shown.values()) if shown else set()
    chosen: list[Candidate] = []
    while wanted and len(chosen) < MAX_SAMPLE:
        best = max(pool, key=lambda one: len(wanted & shown[one]))
        chosen.append(best)
        wanted -= shown[best]
    return tuple(chosen)


def uncovered(policy: Policy, kind: str) -> set[tuple[str, object]]:
    """(knob, value) pairs that a policy offers and its sample lacks."""
    every = {value for one in offered(policy, kind) for value in values(one)}
    return every - {value for one in sample(policy, kind) for value in values(one)}


def values(one: Candidate) -> Iterator[tuple[str, object]]:
    """What a candidate shows of the knobs, its mask, dtype and copy width; slices of K count as such."""
    yield from (("mask", one.mask), ("dtype", one.dtype), ("copy_bytes", one.copy_bytes))
    yield from _flattened("", asdict(one.knobs), one)


def _flattened(prefix: str, config: dict[str, Any], one: Candidate) -> Iterator[tuple[str, object]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flattened(f"{prefix}{name}.", value, one)
        elif name == "k_slice":
            yield f"{prefix}k_sliced", value < one.padded_dim_qk
        elif value is not None:
            yield f"{prefix}{name}", value


def cases_of(one: Candidate) -> list[RetentionCase | RetnetCase]:
    """What a candidate is run on; tensors are unaligned where it is made for that."""
    if one.op == "retnet":
        return list(_retnet_cases(one))
    return list(_retention_cases(one))


def _problem(one: Candidate, batch: int, heads: tuple[int, int], q: int, k: int) -> Problem:
    forms: dict[bool, Form] = {True: one.form, False: "auto"}
    return Problem(
        op=one.op,
        direction=one.direction,
        mask=one.mask,
        form=forms[one.op == "retention" and one.direction == "forward"],
        dtype=one.dtype,
        batch=batch,
        heads_q=heads[0],
        heads_kv=heads[1],
        seqlen_q=q,
        seqlen_k=k,
        dim_qk=one.padded_dim_qk,
        dim_v=one.padded_dim_v - 8,
        causal=one.mask != "explicit",
        alignment_bytes=one.copy_bytes,
    )


def _retention_cases(one: Candidate) -> Iterator[RetentionCase]:
    aligned = one.copy_bytes == 16
    for number, (batch, heads, seqlen) in enumerate(
        ((2, (4, 2), 1), (1, (6, 3), 391), (1, (2, 1), 2051), (8, (16, 8), 133))
    ):
        yield RetentionCase(
            problem=_problem(one, batch, heads, seqlen, seqlen),
            scale=(None, -0.3)[number % 2],
            initial=number != 2,
            final=number != 1,
            inputs=("transposed" if number % 2 else "padded") if aligned else "unaligned",
            gradient=("broadcast" if number % 2 else "dense") if aligned else "unaligned",
            output="padded" if number % 2 else "dense",
        )


def _retnet_cases(one: Candidate) -> Iterator[RetnetCase]:
    aligned = one.copy_bytes == 16
    for number, (batch, heads, seqlen_q, seqlen_k, causal) in enumerate(
        (
            (2, (4, 2), 1, 72, False),
            (2, (6, 3), 257, 392, True),
            (1, (4, 1), 515, 136, False),
            (8, (16, 8), 293, 200, True),
        )
    ):
        keys = seqlen_k if aligned else seqlen_k + 1
        problem = _problem(one, batch, heads, seqlen_q, keys)
        yield RetnetCase(
            problem=replace(problem, causal=causal or one.mask == "decay"),
            values=("normal", "retnet", "large", "zero_rows")[number],
            shared=number == 1,
            scale=(None, -0.3)[number % 2],
            r_clamp_max=40.0 if number == 1 else None,
            r_grad=number % 2 == 1,
            inputs=("transposed" if number % 2 else "padded") if aligned else "unaligned",
            gradient=("broadcast" if number % 2 else "dense") if aligned else "unaligned",
            output="padded" if number % 2 else "dense",
        )
