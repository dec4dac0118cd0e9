"""Reports of a compiler, of what a test names and nothing remarkable beside it."""

from __future__ import annotations

from typing import Any

from attention_autotuner.core.report import CompilerReport, KernelReport

PLAIN = {"registers": 128} | dict.fromkeys(
    ("spill_store_bytes", "spill_load_bytes", "stack_bytes", "static_smem_bytes"), 0
)


def compiler_report(*kernels: KernelReport, **counts: Any) -> CompilerReport:
    """A report of a unit with these kernels."""
    return CompilerReport(**PLAIN | counts, kernels=kernels, warnings=())


def kernel_report(name: str, **counts: Any) -> KernelReport:
    """A report of one kernel."""
    return KernelReport(name=name, **PLAIN | counts)
