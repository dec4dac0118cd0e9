"""Build the kernels of the GPU tests on a machine without a GPU, for a machine with one.

    python -m tests.gpu.prebuild --output DIR -m smoke                # the smoke suite's kernels
    python -m tests.gpu.prebuild --output DIR --archive kernels.tar.xz
    python -m tests.gpu.prebuild --list -m smoke                      # print their names, build nothing
    pytest tests/gpu -m smoke --carried=DIR                           # on the machine with the GPU

:func:`tests.numerics.kernel_pool.needed` lists the kernels of the collected tests. ``--carried`` also takes kernels of
other compiler versions, see :func:`tests.numerics.kernel_pool.adopt`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from attention_autotuner.arch import Policy, resolve
from attention_autotuner.arch.resolution import native_arch
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.render import render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.resources import smem_bytes
from tests.numerics.kernel_pool import CARRIED, needed

FOLDER = Path(__file__).resolve().parent


class Collector:
    """A pytest plugin that keeps the collected items and deselects nothing."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep the items that the command line selects."""
        self.items = list(session.items)


def collect(paths: Sequence[str], marks: str) -> list[pytest.Item]:
    """The tests that pytest would run.

    Args:
        paths: files and folders.
        marks: an expression for ``-m``; empty for all tests.

    Raises:
        SystemExit: they cannot be collected.
    """
    collector = Collector()
    arguments = ["--collect-only", "-qq", "--no-header", "-p", "no:cacheprovider", "-W", "ignore"]
    arguments += ["-m", marks] if marks else []
    status = pytest.main([*arguments, *paths], plugins=[collector])
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"pytest collects nothing: status {int(status)}")
    return collector.items


def kernels(items: Sequence[pytest.Item], present: Policy) -> list[Candidate]:
    """The kernels of these tests that fit the GPU's shared memory."""
    limit = present.spec.smem_per_block_bytes
    return [candidate for candidate in needed(items, present) if smem_bytes(candidate) <= limit]


def pack(folder: Path, artifacts: Sequence[Artifact], archive: Path) -> None:
    """Write some of a store's kernels into one archive, which is small as libraries share most of their bytes."""
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for path in (
            folder.absolute() / CARRIED,
            *(artifact.path.parent for artifact in artifacts),
        ):
            tar.add(path, arcname=str(path.relative_to(folder.absolute())))


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect, build and pack; see the module. The status is 1 when a kernel does not build."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "paths", nargs="*", default=[str(FOLDER)], help="tests; by default this folder"
    )
    parser.add_argument("-m", dest="marks", default="", help="only tests with these marks")
    parser.add_argument("--device-type", default="H200", help="the GPU to build for (H200)")
    parser.add_argument("--output", type=Path, help="folder of the kernels")
    parser.add_argument("--archive", type=Path, help="also pack the kernels into this .tar.xz")
    parser.add_argument("--jobs", type=int, help="compilations at once")
    parser.add_argument("--list", action="store_true", help="print names and build nothing")
    options = parser.parse_args(arguments)
    if options.output is None and not options.list:
        parser.error("--output or --list is needed")
    present = resolve(options.device_type)
    items = collect(options.paths, options.marks)
    wanted = kernels(items, present)
    print(f"{len(items)} tests need {len(wanted)} kernels")
    for kind, count in Counter((c.op, c.direction, c.family, c.dtype) for c in wanted).items():
        print(f"{count:5} {' '.join(kind)}")
    if options.list:
        print(*(candidate.name for candidate in wanted), sep="\n")
        return 0
    start = time.monotonic()
    results = build(
        [render(candidate) for candidate in wanted],
        BuildTarget(arch=native_arch(present.spec.compute_capability)),
        toolchain=find_toolchain(),
        store=Store(options.output),
        jobs=options.jobs,
    )
    (options.output / CARRIED).write_text(
        json.dumps([candidate.config for candidate in wanted], indent=0), encoding="utf-8"
    )
    failed = [result for result in results if not isinstance(result, Artifact)]
    artifacts = [result for result in results if isinstance(result, Artifact)]
    print(f"built {len(artifacts)} in {time.monotonic() - start:.0f} s")
    for outcome in failed:
        print(f"{outcome.kind}: {outcome.reason} {outcome.log}")
    if options.archive is not None:
        pack(options.output, artifacts, options.archive)
        print(f"{options.archive}: {options.archive.stat().st_size / 2**20:.1f} MiB")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
