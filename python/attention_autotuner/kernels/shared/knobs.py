"""Knobs that several kernels share: the order of CTAs, and consumer warpgroups beside a producer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ...core.candidate import Family, KernelKnobs, Service

CtaOrder = Literal["raster", "longest_first"]

ORDER_LABELS: dict[str, str] = {"raster": "raster", "longest_first": "lpt"}  # in candidates' names
RENAMED_ORDERS: dict[str, str] = {"rows_first": "raster", "heads_first": "longest_first"}

SCORE_GRADIENTS: frozenset[Service] = frozenset(
    {
        ("attention", "backward", "softmax"),
        ("retnet", "backward", "masked"),
        ("retnet", "backward", "decayed"),
    }
)
"""Backward of all that has scores, which kernels of both families serve."""


class Warpgroups:
    """Consumer warpgroups, beside which every kernel of family ``sm90`` has one more, the producer.

    Attributes:
        warpgroups: the consumers.
    """

    warpgroups: int

    @property
    def num_threads(self) -> int:
        """Threads of one CTA."""
        return 128 * (1 + self.warpgroups)


class PlannedPasses:
    """Knobs of a kernel of several passes, each a field.

    Attributes:
        pass_names: the fields, in the order in which the passes run; those that are None are left out.
    """

    pass_names: ClassVar[tuple[str, ...]]

    @property
    def passes(self) -> Mapping[str, Any]:
        """The passes by name, in the order they run."""
        named = ((name, getattr(self, name)) for name in self.pass_names)
        return {name: knobs for name, knobs in named if knobs is not None}

    @property
    def num_threads(self) -> int:
        """Threads of one CTA of the widest pass."""
        threads: int = max(knobs.num_threads for knobs in self.passes.values())
        return threads

    @property
    def pass_labels(self) -> list[str]:
        """The parts of a candidate's name that are of its passes."""
        return [f"{name}_{knobs.label}" for name, knobs in self.passes.items()]


class Sm90Knobs(KernelKnobs):
    """Base of the knobs of family ``sm90``."""

    family: ClassVar[Family] = "sm90"


class Sm80Knobs(KernelKnobs):
    """Base of the knobs of family ``sm80``."""

    family: ClassVar[Family] = "sm80"
