"""Build kernels: look them up in the store, compile the misses in one CMake + Ninja batch, publish each.

One failing kernel stops no other, and what is built when a batch is interrupted stays built.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from typing import Any

from ..core.leases import POLL_SECONDS
from ..core.outcome import BuildFailed, Outcome, OutOfMemory, Postponed, TimedOut
from ..core.report import CompilerReport
from ..errors import ToolchainError
from ..kernels.registry import kernel_of
from .artifact import Artifact, BuildTarget, artifact_digest
from .code_digest import code_digest, host_digest
from .entries import SOURCE
from .files import storage_error, store_errors
from .jobs import job_count
from .project import Project, Step, configure, launched
from .render import RenderedKernel, kernel_digest
from .report import combine, parse_ptxas
from .sass import add_loop_spills, main_loops
from .store import Store
from .toolchain import Toolchain, find_disassembler
from .tools import STOP_POLL_SECONDS, Stop, StoppedError, clean_environment

logger = logging.getLogger(__name__)

__all__ = ["Artifact", "BuildTarget", "Progress", "artifact_digest", "build"]

Progress = Callable[[int, int, str, float], None]
"""Called after each kernel with (done, total, name, seconds that it took); total counts the store's misses."""

_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
_NO_MEMORY = re.compile(
    r"died due to signal 9|\bKilled\b|[Oo]ut of memory|virtual memory exhausted|Cannot allocate memory"
    r"|std::bad_alloc"
)
_ERROR_LINE = re.compile(
    r"^.*\b(?:error|fatal|undefined reference)\b.*$", re.MULTILINE | re.IGNORECASE
)
_NINJA_BROKE = re.compile(r"ninja: (?:error|fatal)|^Traceback", re.MULTILINE)
_STOP_SECONDS = 10.0
COMPILE_SECONDS = 300.0  # the slowest of our kernels takes half a minute on one of a few busy cores


def _inspect(
    log: str, library: Path, disassembler: Path | None, *, persistent: bool
) -> CompilerReport:
    """The compiler's report, with spills in main loops where they can be known."""
    report = parse_ptxas(log)
    if report.stack_bytes + report.spill_store_bytes + report.spill_load_bytes == 0:
        # No local memory at all: nothing to look for.
        kernels = [replace(kernel, loop_spills=False) for kernel in report.kernels]
        return combine(kernels, report.warnings)
    if disassembler is None:
        return report
    try:
        return add_loop_spills(report, main_loops(library, disassembler, persistent=persistent))
    except ToolchainError as error:
        logger.warning("spills in main loops stay unknown: %s", error)
        return report


def _digests(batch: Project, name: str, library: Path) -> dict[str, Any]:
    """The digests of a target's machine code, by their fields; empty where they cannot be known."""
    if batch.disassembler is None:
        return {}
    try:
        compiled = batch.object_file(name)
        return {
            "code_digest": code_digest(compiled, library, batch.disassembler),
            "host_digest": host_digest(compiled),
        }
    except ToolchainError as error:
        logger.warning("the digest of the machine code stays unknown: %s", error)
        return {}


def _classify(
    batch: Project, name: str, kernel: RenderedKernel, digest: str, step: Step, log: str
) -> Outcome:
    """The outcome of a step that failed; it is remembered, unless memory was short.

    Raises:
        StoreError: the disk is full.
    """
    if _NO_SPACE.search(step.log):
        raise storage_error(batch.store.root, ENOSPC)
    if not step.timed_out and (step.returncode == -signal.SIGKILL or _NO_MEMORY.search(step.log)):
        peak = step.peak_bytes / 2**30
        return OutOfMemory(
            reason=f"the compiler was killed or found no memory (it had used {peak:.1f} GiB); "
            "set ATTENTION_AUTOTUNER_JOBS to a smaller number"
        )
    if step.returncode == 127:
        raise ToolchainError(f"the compiler is gone: {step.log.strip()}")
    # The source has a private name in the batch; with the log it is kept as kernel.cu.
    source = f"{batch.sources}/{name}.cu"
    line = _ERROR_LINE.search(step.log)
    failure: Outcome
    if step.timed_out:
        failure = TimedOut(reason=f"it compiled for longer than {batch.timeout_seconds:g} s")
    elif line:
        failure = BuildFailed(reason=line[0].strip().replace(source, SOURCE)[:400])
    elif step.returncode < 0:
        crash = signal.Signals(-step.returncode).name
        failure = BuildFailed(reason=f"the compiler crashed ({crash})")
    else:
        failure = BuildFailed(reason=f"the compiler ended with status {step.returncode}")
    return batch.store.publish_failure(
        source=kernel.text,
        log=log.replace(source, SOURCE),
        failure=failure,
        digest=digest,
        name=kernel.name,
        compiler=batch.toolchain.compiler_stamp,
    )


def _finish(
    batch: Project, name: str, kernel: RenderedKernel, digest: str
) -> tuple[Artifact | Outcome, float] | None:
    """Publish a target that is done, with the seconds it took; None while it is not."""
    compiled = batch.step(name, "compile")
    if compiled is None:
        return None
    if compiled.returncode != 0:
        outcome = _classify(batch, name, kernel, digest, compiled, compiled.log)
        return outcome, compiled.seconds
    linked = batch.step(name, "link")
    if linked is None:
        return None
    log = compiled.log + linked.log
    seconds = compiled.seconds + linked.seconds
    if linked.returncode != 0:
        return _classify(batch, name, kernel, digest, linked, log), seconds
    if artifact_digest(kernel, batch.target, batch.toolchain) != digest:
        # Only where somebody edits the headers: what was compiled is not what the digest stands for.
        return BuildFailed(reason="a header changed while it compiled; build it again"), seconds
    library = batch.build / f"{name}.so"
    artifact = Artifact(
        name=kernel.name,
        digest=digest,
        path=library,
        report=_inspect(
            compiled.log,
            library,
            batch.disassembler,
            persistent=kernel_of(kernel.candidate).describe(kernel.candidate).persistent,
        ),
        kernel_digest=kernel_digest(kernel),
        **_digests(batch, name, library),
        target=batch.target.of_family(kernel.candidate.family),
        toolchain=batch.toolchain.identity(),
        build_seconds=seconds,
        build_peak_bytes=max(compiled.peak_bytes, linked.peak_bytes),
    )
    published = batch.store.publish(source=kernel.text, library=library, log=log, artifact=artifact)
    return published, seconds


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End Ninja, which passes the signal on to what it runs."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _run_ninja(
    batch: Project,
    pending: dict[str, tuple[str, RenderedKernel]],
    jobs: int,
    report: Callable[[str, Artifact | Outcome, float], None],
    stop: Stop,
) -> None:
    """Compile targets (name -> digest, kernel).

    Each is reported, and taken out of ``pending``, as soon as it is done; what ``stop`` ends is left there.
    """

    def collect() -> None:
        for name, (digest, kernel) in list(pending.items()):
            finished = _finish(batch, name, kernel, digest)
            if finished is not None:
                del pending[name]
                report(digest, *finished)

    command = launched("--bound", str(os.getpid()), str(batch.toolchain.ninja))
    command += ["-C", batch.build]
    command += ["-k", "0", "-j", str(jobs), *pending]
    try:
        process = subprocess.Popen(
            command,
            env=clean_environment(batch.temporary),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to us alone, and we end it in order
        )
    except OSError as error:
        raise ToolchainError(f"cannot run {batch.toolchain.ninja}: {error}") from error
    assert process.stdout is not None
    output = b""
    with process:
        try:
            while not stop():
                if select.select([process.stdout], [], [], STOP_POLL_SECONDS)[0]:
                    printed = os.read(process.stdout.fileno(), 1 << 16)
                    if not printed:
                        process.wait()
                        break
                    output += printed
                    collect()
            collect()
        finally:
            _stop(process)
    if stop():
        return
    # What is left has no record of its step.
    text = output.decode(errors="replace")
    if pending and _NO_SPACE.search(text):
        raise storage_error(batch.store.root, ENOSPC)
    if pending and (process.returncode == 0 or _NINJA_BROKE.search(text)):
        raise ToolchainError(f"Ninja cannot build {', '.join(pending)}:\n{text[-3000:]}")
    for name, (digest, _) in list(pending.items()):
        del pending[name]
        report(
            digest, OutOfMemory(reason="the compiler was killed together with its launcher"), 0.0
        )


def _compile(
    misses: dict[str, RenderedKernel],
    batch: Project,
    jobs: int | None,
    report: Callable[[str, Artifact | Outcome, float], None],
    stop: Stop,
) -> None:
    """Compile kernels by digest, the first of them first; those that ``stop`` ends are not reported."""
    starved: dict[str, tuple[str, RenderedKernel]] = {}
    digits = len(str(len(misses)))  # CMake, and so Ninja, takes targets by their names
    targets = {f"k{number:0{digits}}": item for number, item in enumerate(misses.items())}
    with store_errors(batch.root):
        for folder in (batch.sources, batch.logs, batch.temporary):
            folder.mkdir(parents=True)
        for name, (_, kernel) in targets.items():
            (batch.sources / f"{name}.cu").write_text(kernel.text, encoding="utf-8")
            target = batch.target.of_family(kernel.candidate.family)
            if target != batch.target:
                architecture = batch.sources / f"{name}.architecture"
                architecture.write_text(f"{target.cmake_architecture}\n", encoding="ascii")
    at_once = job_count(len(misses), jobs)
    configure(batch, jobs=at_once, stop=stop)
    names = {digest: name for name, (digest, _) in targets.items()}

    def first(digest: str, result: Artifact | Outcome, seconds: float) -> None:
        if isinstance(result, OutOfMemory) and at_once > 1:
            # Memory may suffice for one at a time.
            starved[names[digest]] = (digest, misses[digest])
        else:
            report(digest, result, seconds)

    _run_ninja(batch, dict(targets), at_once + 1, first, stop)  # one more, which only links
    if starved and not stop():
        for name in starved:
            for path in batch.logs.glob(f"{name}.*"):
                path.unlink()
        _run_ninja(batch, starved, 1, report, stop)


def build(
    kernels: Sequence[RenderedKernel],
    target: BuildTarget,
    *,
    toolchain: Toolchain,
    store: Store,
    jobs: int | None = None,
    progress: Progress | None = None,
    timeout_seconds: float | None = COMPILE_SECONDS,
    retry_failed: bool = False,
    stop: Stop = lambda: False,
) -> list[Artifact | Outcome]:
    """Build kernels, taking from the store what it has.

    Args:
        kernels: what to build; the same kernel twice is built once.
        target: what to compile for.
        toolchain: what to compile with.
        store: where artifacts and failures are kept.
        jobs: compilations at once; by default as many as cores and free memory allow.
        progress: called as kernels are done, in this thread.
        timeout_seconds: limit for each compilation and each link; None for no limit.
        retry_failed: compile again what is remembered to have failed.
        stop: asked every now and then; once it is true, compilers are ended.

    A kernel that another process compiles is waited for and taken from the store.

    Returns:
        For each kernel, in order: its artifact, or ``BuildFailed`` or ``TimedOut`` (remembered for this compiler, with
        the path of its log; without a log only where a header changed meanwhile), ``OutOfMemory`` (not remembered:
        another time it may succeed), or ``Postponed`` where it was stopped.

    Raises:
        ToolchainError: a tool is gone or cannot be set up.
        StoreError: the store cannot be written, or its disk is full; what was published before stays.
        BuildError: a kernel includes a header of ours that does not exist.
    """
    digests = [artifact_digest(kernel, target, toolchain) for kernel in kernels]
    stamp = toolchain.compiler_stamp
    results: dict[str, Artifact | Outcome] = {}
    misses: dict[str, RenderedKernel] = {}
    for digest, kernel in zip(digests, kernels, strict=True):
        known = store.lookup(kernel.name, digest, stamp)
        if isinstance(known, Outcome) and retry_failed:
            store.forget_failure(digest, kernel.name)
            known = None
        if known is None:
            misses[digest] = kernel
        else:
            results[digest] = known
    if misses and not toolchain.nvcc.exists():
        raise ToolchainError(f"the compiler {toolchain.nvcc} is gone")
    total, done = len(misses), 0
    leases = {digest: store.lease(digest, kernel.name) for digest, kernel in misses.items()}

    def report(digest: str, result: Artifact | Outcome, seconds: float) -> None:
        nonlocal done
        results[digest] = result
        leases[digest].release()
        name, done = misses.pop(digest).name, done + 1
        if progress is not None:
            progress(done, total, name, seconds)

    def claimed() -> dict[str, RenderedKernel]:
        """The kernels that are this process's to compile; those that another one has finished are reported."""
        mine = {}
        for digest, kernel in list(misses.items()):
            is_free = leases[digest].attempt()
            known = store.lookup(kernel.name, digest, stamp)
            if known is not None:
                report(digest, known, 0.0)
            elif is_free:
                mine[digest] = kernel
        return mine

    try:
        while misses and not stop():
            with store_errors(store.root):
                mine = claimed()
            if not mine:
                time.sleep(POLL_SECONDS[1] if misses else 0.0)
                continue
            with store.staging() as root:
                batch = Project(
                    root=root,
                    target=target,
                    toolchain=toolchain,
                    store=store,
                    timeout_seconds=timeout_seconds or 0.0,
                    disassembler=find_disassembler(),
                )
                _compile(mine, batch, jobs, report, stop)
    except StoppedError:
        pass
    finally:
        for lease in leases.values():
            lease.release()
    postponed = Postponed(reason="the budget ended before it was compiled")
    return [results.get(digest, postponed) for digest in digests]
