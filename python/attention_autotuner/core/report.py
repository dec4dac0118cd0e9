"""A compiler's report of the resources that kernels take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_SERIALIZED = re.compile(r"C75\d\d: .*wgmma\.mma_async instructions are serialized")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Resources that machine code takes.

    Attributes:
        registers: 32-bit registers per thread.
        spill_store_bytes, spill_load_bytes: static count of spill traffic per thread.
        stack_bytes: local-memory stack per thread, callees included.
        static_smem_bytes: statically allocated shared memory per CTA.
        loop_spills: True where a main loop touches local memory; None where no disassembler looked.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_smem_bytes: int
    loop_spills: bool | None = None


@dataclass(frozen=True, kw_only=True)
class KernelReport(Counts):
    """One ``__global__`` function, together with the device functions compiled for it that were not inlined.

    Attributes:
        name: mangled name.
    """

    name: str


@dataclass(frozen=True, kw_only=True)
class CompilerReport(Counts):
    """The counts of one translation unit, each the maximum over its kernels, and each kernel by itself.

    Attributes:
        kernels: each kernel, in the order of compilation.
        warnings: performance warnings with their code, e.g. ``C7510``.
    """

    kernels: tuple[KernelReport, ...]
    warnings: tuple[str, ...]

    @property
    def serialized(self) -> str:
        """The warning that MMAs which should overlap wait for one another; empty where there is none."""
        return next((text for text in self.warnings if _SERIALIZED.match(text)), "")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CompilerReport:
        """Rebuild a report from its fields.

        Raises:
            TypeError, KeyError: a field is missing or unknown.
        """
        kernels = tuple(KernelReport(**kernel) for kernel in data["kernels"])
        return cls(**{**data, "kernels": kernels, "warnings": tuple(data["warnings"])})
