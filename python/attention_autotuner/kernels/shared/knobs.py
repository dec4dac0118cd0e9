"""Knobs that several kernels share: the order of CTAs, and consumer warpgroups beside a producer."""

from __future__ import annotations

from typing import ClassVar, Literal

from ...core.candidate import Family, KernelKnobs

CtaOrder = Literal["raster", "longest_first"]

CTA_ORDERS: tuple[str, ...] = ("raster", "longest_first")
ORDER_LABELS: dict[str, str] = {"raster": "raster", "longest_first": "lpt"}  # in candidates' names
RENAMED_ORDERS: dict[str, str] = {"rows_first": "raster", "heads_first": "longest_first"}


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


class Sm90Knobs(KernelKnobs):
    """Base of the knobs of family ``sm90``."""

    family: ClassVar[Family] = "sm90"


class Sm80Knobs(KernelKnobs):
    """Base of the knobs of family ``sm80``."""

    family: ClassVar[Family] = "sm80"
