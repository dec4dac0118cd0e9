"""Names of candidates for people: short ones of one problem's candidates, and their knobs as cells of a table."""

from __future__ import annotations

import re

from ..core.candidate import Candidate
from ..core.problem import Problem
from ..kernels.registry import KERNELS, kernel_of

# Operation, direction, mask, family and dtype; the padded head dims; the knobs; the width of copies.
_NAME = re.compile(r"\b[a-z0-9_]+_sm\d+_[a-z0-9]+_d(\d+)x\d+_(\w+)_c\d+\b")
# Knobs at their usual values: as a part of their own, and among those of one pass.
_USUAL = re.compile(r"_(?:v1|b1|qsmem|inorder|grid)(?=_|$)")
_USUAL_OF_PASS = re.compile(r"(?<=\d)(?:q1|v1|b1)(?=[a-z_]|$)")


def short_names(text: str) -> str:
    """A text with short names for candidates.

    A short name is the knobs' part of the name without those at their usual values, and without what the problem says
    already: ``m128n64_w4x1_s2_heads``. It is unique among the candidates of a problem.
    """
    return _NAME.sub(_short, text)


def _short(name: re.Match[str]) -> str:
    knobs = re.sub(rf"_k{name[1]}(?=_|$)", "", name[2])  # K is not sliced
    return _USUAL_OF_PASS.sub("", _USUAL.sub("", knobs))


def knob_headings(problem: Problem) -> list[str]:
    """The columns of :func:`knobs`, for the candidates of a problem."""
    serving = (kernel for kernel in KERNELS.values() if kernel.serves_problem(problem))
    return list(dict.fromkeys(name for kernel in serving for name in kernel.columns(problem)))


def knobs(candidate: Candidate) -> list[str]:
    """A candidate's knobs as cells under :func:`knob_headings`."""
    return list(kernel_of(candidate).describe(candidate).cells.values())
