"""The compiler's report of a kernel: registers, spills, stack and shared memory, from ``ptxas -v``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..core.report import CompilerReport, KernelReport

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for '?([^\s']+)'?")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_AT_MOST = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack_bytes": re.compile(r"(\d+) bytes cumulative stack size"),
    "static_smem_bytes": re.compile(r"(\d+) bytes smem"),
}
_COUNTS = (*_AT_MOST, "spill_store_bytes", "spill_load_bytes")
_WARNING = re.compile(r"\((C7\d{3})\)[:\s]*(.+)")


def parse_ptxas(text: str) -> CompilerReport:
    """Parse what ``ptxas -v`` printed among the other output of a compilation.

    The text is that of one translation unit and one architecture. A device function that was not inlined is counted to
    the entry function before it, with which ptxas compiled it.
    """
    counts: dict[str, dict[str, int]] = {}
    warnings: dict[str, None] = {}
    entry = ""
    for line in text.splitlines():
        if match := _WARNING.search(line):
            warnings[f"{match[1]}: {match[2].strip()}"] = None
        if match := _ENTRY.search(line):
            entry = match[1]
            counts.setdefault(entry, dict.fromkeys(_COUNTS, 0))
        elif match := _PROPERTIES.search(line):
            # Without an entry before it, the function belongs to no kernel (a separate compilation).
            entry = entry or match[1]
            counts.setdefault(entry, dict.fromkeys(_COUNTS, 0))
        elif entry and (match := _FRAME.search(line)):
            now, (stack, stores, loads) = counts[entry], map(int, match.groups())
            now["stack_bytes"] = max(now["stack_bytes"], stack)
            now["spill_store_bytes"] += stores
            now["spill_load_bytes"] += loads
        elif entry and _AT_MOST["registers"].search(line):
            for name, pattern in _AT_MOST.items():
                if match := pattern.search(line):
                    counts[entry][name] = max(counts[entry][name], int(match[1]))
    kernels = [KernelReport(name=name, loop_spills=None, **count) for name, count in counts.items()]
    return combine(kernels, warnings)


def combine(kernels: Iterable[KernelReport], warnings: Iterable[str]) -> CompilerReport:
    """The report of a unit from those of its kernels."""
    kernels = tuple(kernels)
    looked = [kernel.loop_spills for kernel in kernels if kernel.loop_spills is not None]
    return CompilerReport(
        **{name: max((getattr(k, name) for k in kernels), default=0) for name in _COUNTS},
        loop_spills=any(looked) if looked else None,
        kernels=kernels,
        warnings=tuple(warnings),
    )
