"""Which backward candidates of retention, family ``sm90``, may exist: each pass obeys the forward kernel's rules.

They are the twins of the asserts in chunks_backward_sm90/traits.cuh.
"""

from __future__ import annotations

from ...core.candidate import Candidate
from ..chunks_sm90.resources import needs
from ..chunks_sm90.rules import CHUNK_SM90_PREDICATES
from ..shared.passes import Pass
from .resources import shapes_of


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The launches of a candidate that its knobs size; those for states of super-chunks take no more."""
    return tuple(
        Pass(
            kernel=candidate.kernel,
            subject=shape,
            rules=CHUNK_SM90_PREDICATES,
            needs_of=needs,
            prefix=f"{name}: ",
        )
        for name, shape in shapes_of(candidate).items()
    )
