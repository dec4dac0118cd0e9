"""Which problems are steps of decoding."""

from __future__ import annotations

from ..codegen.problem import Problem


def decodes(problem: Problem) -> bool:
    """Whether a call reads and writes states: retention forward by its recurrent form, or of a single token."""
    forward = (problem.op, problem.direction) == ("retention", "forward")
    return forward and (problem.form == "recurrent" or problem.seqlen_q == 1)
