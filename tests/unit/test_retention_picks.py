"""A pick matches its problem's operation, direction, mask and form; an earlier implementation compared dims alone."""

from __future__ import annotations

from dataclasses import replace

from attention_autotuner import settings
from attention_autotuner.arch import resolve
from attention_autotuner.core.problem import Problem
from attention_autotuner.serving import dispatch
from tests.numerics.retention_cases import RETENTION_FORMS

_MASKED = Problem(op="retnet", mask="explicit", causal=True)
_DECAYED = Problem(op="retention", causal=True)
ALIKE = (
    Problem(causal=True),
    _MASKED,
    replace(_MASKED, mask="decay"),
    *(replace(_DECAYED, form=form) for form in RETENTION_FORMS),
    replace(_MASKED, direction="backward"),
    replace(_MASKED, direction="backward", mask="decay"),
    replace(_DECAYED, direction="backward"),
)


def test_picks_of_one_shape_are_not_mixed() -> None:
    with settings.override(mode="off"):
        for name in ("A100", "RTX4090", "H100"):
            policy = resolve(name)
            for problem in (*ALIKE, *ALIKE):  # the second time from memory
                pick = dispatch.lookup(problem, policy).candidate
                assert (pick.op, pick.direction) == (problem.op, problem.direction)
                assert pick.mask == problem.mask
                assert pick.form == problem.form
                assert pick == policy.default(problem)
