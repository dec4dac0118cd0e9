"""A refactoring of the sources that changes no machine code, and a run of `records rekey` over it.

    python -m tests.neutral_refactoring --jobs 2        # all shipped picks: builds some sixty kernels

works on copies of templates and headers and of the files of shipped picks. Status 0 means that every pick is valid.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from attention_autotuner import templates
from attention_autotuner.cli import main as command
from attention_autotuner.codegen.render import TEMPLATE
from attention_autotuner.core.cpp import NAMESPACE

MOVED = "common/scalars.cuh"  # the header that is moved
TARGET = "numbers.cuh"  # its new name and place


@contextmanager
def copied_sources(folder: Path) -> Iterator[Path]:
    """A copy of templates and headers, rendered and compiled in place of the package's."""
    copy = folder / "templates"
    usual = list(templates.__path__)
    shutil.copytree(usual[0], copy)
    templates.__path__ = [str(copy)]
    try:
        yield copy
    finally:
        templates.__path__ = usual


def _refactored(text: str) -> str:
    text = re.sub(rf"\bnamespace {NAMESPACE}\b", "namespace kernels_of_ours", text)
    text = re.sub(rf"\b{NAMESPACE}::", "kernels_of_ours::", text)
    text = re.sub(r"\b(column|token)\b", r"\1_of_tile", text)
    return text.replace(f'"{NAMESPACE}/{MOVED}"', f"<{NAMESPACE}/{TARGET}>")


def refactor(sources: Path) -> None:
    """Rename the namespace and some variables of all sources, and move a header."""
    headers = sources / "include" / NAMESPACE
    (headers / MOVED).rename(headers / TARGET)
    for path in (*sources.rglob("*.*h"), *sources.rglob("*.jinja")):
        path.write_text(_refactored(path.read_text(encoding="utf-8")), encoding="utf-8")
    template = sources / TEMPLATE
    head, start, rest = template.read_text(encoding="utf-8").partition("\nnamespace {\n")
    # The words of knobs are rendered with the usual name before them.
    alias = f"\nnamespace {NAMESPACE} = kernels_of_ours;\n"
    template.write_text(head + alias + start + rest, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Refactor, rekey, and print the records that were carried over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="compilations at once")
    jobs = parser.parse_args(arguments).jobs
    status = 0
    with tempfile.TemporaryDirectory() as temporary, copied_sources(Path(temporary)) as sources:
        refactor(sources)
        for shipped in Path(str(files("attention_autotuner.tuned"))).glob("*.jsonl"):
            copy = shutil.copy(shipped, temporary)
            command(["records", "verify", "--file", copy])
            status |= command(["records", "rekey", "--file", copy, "--jobs", str(jobs)])
            status |= command(["records", "verify", "--file", copy])
    return status


if __name__ == "__main__":
    sys.exit(main())
