"""A tidy-up of the sources that changes no machine code, and a run of `records rekey` over it.

    python -m tests.tidy_up --jobs 2        # all shipped picks: builds some sixty kernels

works on copies: of templates and headers, and of the files of shipped picks. Status 0 says that every pick is valid.
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
from attention_autotuner.codegen.render import NAMESPACE, TEMPLATE

MOVED = "common/scalars.cuh"  # the header that gets another name and place
PLACE = "numbers.cuh"  # these


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


def _tidied(text: str) -> str:
    text = re.sub(rf"\bnamespace {NAMESPACE}\b", "namespace kernels_of_ours", text)
    text = re.sub(rf"\b{NAMESPACE}::", "kernels_of_ours::", text)
    text = re.sub(r"\b(column|token)\b", r"\1_of_tile", text)
    return text.replace(f'"{NAMESPACE}/{MOVED}"', f"<{NAMESPACE}/{PLACE}>")


def tidy_up(sources: Path) -> None:
    """Give all sources another namespace, other names for some variables, and a header another name and place."""
    headers = sources / "include" / NAMESPACE
    (headers / MOVED).rename(headers / PLACE)
    for path in (*sources.rglob("*.*h"), *sources.rglob("*.jinja")):
        path.write_text(_tidied(path.read_text(encoding="utf-8")), encoding="utf-8")
    template = sources / TEMPLATE
    head, start, rest = template.read_text(encoding="utf-8").partition("\nnamespace {\n")
    # The words of knobs are rendered with the usual name before them.
    alias = f"\nnamespace {NAMESPACE} = kernels_of_ours;\n"
    template.write_text(head + alias + start + rest, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Tidy up, rekey, and say what was carried over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="compilations at once")
    jobs = parser.parse_args(arguments).jobs
    status = 0
    with tempfile.TemporaryDirectory() as temporary, copied_sources(Path(temporary)) as sources:
        tidy_up(sources)
        for shipped in Path(str(files("attention_autotuner.tuned"))).glob("*.jsonl"):
            copy = shutil.copy(shipped, temporary)
            command(["records", "verify", "--file", copy])
            status |= command(["records", "rekey", "--file", copy, "--jobs", str(jobs)])
            status |= command(["records", "verify", "--file", copy])
    return status


if __name__ == "__main__":
    sys.exit(main())
