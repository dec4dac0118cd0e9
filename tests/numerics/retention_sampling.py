"""Samples of the candidates of retnet and retention, in which every value of every knob occurs."""

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

MAX_SAMPLE = 22
SIDES = (64, 128)  # head dims of the sampled kernels, the second in bf16
_RETNET = Problem(op="retnet", mask="explicit")
_RETENTION = Problem(op="retention", causal=True)
_DECAY = replace(_RETNET, mask="decay", causal=True)
KINDS: dict[str, tuple[Problem, ...]] = {
    "retnet-forward": (_RETNET, _DECAY),
    "retnet-backward": tuple(
        replace(candidate, direction="backward") for candidate in (_RETNET, _DECAY)
    ),
    **{f"retention-{form}": (replace(_RETENTION, form=form),) for form in RETENTION_FORMS},
    "retention-backward": (replace(_RETENTION, direction="backward"),),
}
"""Kind -> the problems of its kernels, apart from dims, dtype and alignment."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One place of a kind's sample; its candidate, if any, depends on the present GPU."""

    kind: str
    index: int

    def kernels_of(self, present: Policy) -> list[Candidate]:
        """The candidate of this place; empty where the sample is smaller."""
        return list(sample(present, self.kind))[self.index : self.index + 1]


PLACES = [Sampled(kind=kind, index=index) for kind in KINDS for index in range(MAX_SAMPLE)]


@functools.cache
def offered(policy: Policy, kind: str) -> dict[Candidate, frozenset[tuple[str, object]]]:
    """All candidates of a kind that a policy offers for the sampled classes, each with the values of its knobs."""
    candidates: list[Candidate] = []
    for base in KINDS[kind]:
        for side, dtype, width in ((64, "fp16", 16), (128, "bf16", 16), (64, "fp16", 2)):
            problem = replace(
                base,
                dim_qk=side,
                dim_v=side,
                dtype=dtype,  # type: ignore[arg-type]  # a literal
                alignment_bytes=width,  # type: ignore[arg-type]  # a literal
            )
            candidates += policy.legal(problem)
    return {candidate: frozenset(values(candidate)) for candidate in candidates}


@functools.cache
def sample(policy: Policy, kind: str, seed: int = 0) -> tuple[Candidate, ...]:
    """A small set of candidates in which every value of every knob occurs; at most :data:`MAX_SAMPLE`."""
    pool = list(offered(policy, kind).items())
    random.Random(seed).shuffle(pool)
    wanted = set().union(*(shown for _, shown in pool))
    chosen: list[Candidate] = []
    while wanted and len(chosen) < MAX_SAMPLE:
        best, shown = max(pool, key=lambda pair: len(wanted & pair[1]))
        chosen.append(best)
        wanted -= shown
    return tuple(chosen)


def uncovered(policy: Policy, kind: str) -> set[tuple[str, object]]:
    """(knob, value) pairs that a policy offers and its sample lacks."""
    shown = offered(policy, kind)
    every = set().union(*shown.values())
    return every.difference(*(shown[candidate] for candidate in sample(policy, kind)))


def values(candidate: Candidate) -> Iterator[tuple[str, object]]:
    """The values of a candidate's knobs, mask, dtype and copy width; of the slices of K, only that there are any."""
    yield from (
        ("mask", candidate.mask),
        ("dtype", candidate.dtype),
        ("copy_bytes", candidate.copy_bytes),
    )
    yield from _flattened("", asdict(candidate.knobs), candidate)


def _flattened(
    prefix: str, config: dict[str, Any], candidate: Candidate
) -> Iterator[tuple[str, object]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flattened(f"{prefix}{name}.", value, candidate)
        elif name == "k_slice":
            yield f"{prefix}k_sliced", value < candidate.padded_dim_qk
        elif value is not None:
            yield f"{prefix}{name}", value


def cases_of(candidate: Candidate) -> list[RetentionCase | RetnetCase]:
    """The cases that a candidate is run on; tensors are unaligned for candidates of narrow copies."""
    if candidate.op == "retnet":
        return list(_retnet_cases(candidate))
    return list(_retention_cases(candidate))


def _problem(candidate: Candidate, batch: int, heads: tuple[int, int], q: int, k: int) -> Problem:
    forms: dict[bool, Form] = {True: candidate.form, False: "auto"}
    return Problem(
        op=candidate.op,
        direction=candidate.direction,
        mask=candidate.mask,
        form=forms[candidate.op == "retention" and candidate.direction == "forward"],
        dtype=candidate.dtype,
        batch=batch,
        heads_q=heads[0],
        heads_kv=heads[1],
        seqlen_q=q,
        seqlen_k=k,
        dim_qk=candidate.padded_dim_qk,
        dim_v=candidate.padded_dim_v - 8,
        causal=candidate.mask != "explicit",
        alignment_bytes=candidate.copy_bytes,
    )


def _retention_cases(candidate: Candidate) -> Iterator[RetentionCase]:
    aligned = candidate.copy_bytes == 16
    for number, (batch, heads, seqlen) in enumerate(
        ((2, (4, 2), 1), (1, (6, 3), 391), (1, (2, 1), 2051), (8, (16, 8), 133))
    ):
        yield RetentionCase(
            problem=_problem(candidate, batch, heads, seqlen, seqlen),
            scale=(None, -0.3)[number % 2],
            initial=number != 2,
            final=number != 1,
            inputs=("transposed" if number % 2 else "padded") if aligned else "unaligned",
            gradient=("broadcast" if number % 2 else "dense") if aligned else "unaligned",
            output="padded" if number % 2 else "dense",
        )


def _retnet_cases(candidate: Candidate) -> Iterator[RetnetCase]:
    aligned = candidate.copy_bytes == 16
    for number, (batch, heads, seqlen_q, seqlen_k, causal) in enumerate(
        (
            (2, (4, 2), 1, 72, False),
            (2, (6, 3), 257, 392, True),
            (1, (4, 1), 515, 136, False),
            (8, (16, 8), 293, 200, True),
        )
    ):
        keys = seqlen_k if aligned else seqlen_k + 1
        problem = _problem(candidate, batch, heads, seqlen_q, keys)
        yield RetnetCase(
            problem=replace(problem, causal=causal or candidate.mask == "decay"),
            values=("normal", "retnet", "large", "zero_rows")[number],
            shared=number == 1,
            scale=(None, -0.3)[number % 2],
            r_clamp_max=40.0 if number == 1 else None,
            r_grad=number % 2 == 1,
            inputs=("transposed" if number % 2 else "padded") if aligned else "unaligned",
            gradient=("broadcast" if number % 2 else "dense") if aligned else "unaligned",
            output="padded" if number % 2 else "dense",
        )
