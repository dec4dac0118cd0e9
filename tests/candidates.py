"""Candidates for tests, written as one flat list of what matters."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from attention_autotuner.codegen.candidate import Candidate
from attention_autotuner.codegen.knobs import ForwardKnobs

_FORWARD = {field.name for field in fields(ForwardKnobs)}
PLAIN = Candidate(
    family="sm80",
    dtype="fp16",
    class_qk=128,
    class_v=128,
    knobs=ForwardKnobs(block_m=128, block_n=64, warps_m=4, num_stages=2, k_slice=128),
)


def forward(base: Candidate = PLAIN, **changes: Any) -> Candidate:
    """A forward candidate like ``base`` but for fields of the candidate or of its knobs."""
    knobs = {name: value for name, value in changes.items() if name in _FORWARD}
    rest = {name: value for name, value in changes.items() if name not in _FORWARD}
    return replace(base, knobs=replace(base.forward, **knobs), **rest)
