"""The forms that retention forward is computed in."""

from __future__ import annotations

from ...core.problem import Form, Problem

MAX_RECURRENT_SEQLEN = 64  # tokens up to which the recurrent form is worth a try unasked


def forms(problem: Problem) -> tuple[Form, ...]:
    """The forms that a problem's candidates may have."""
    if problem.form != "auto":
        return (problem.form,)
    if problem.packed:
        return ("chunkwise",)
    short = problem.seqlen_q <= MAX_RECURRENT_SEQLEN
    return ("parallel", "chunkwise", "recurrent") if short else ("parallel", "chunkwise")


def default_form(problem: Problem) -> Form:
    """The form of a problem that nobody tuned: its own, else chunkwise, or recurrent for one token."""
    if problem.form != "auto":
        return problem.form
    return "recurrent" if problem.goes_by_token else "chunkwise"
