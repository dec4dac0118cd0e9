"""One candidate's library: from the store, from a bundle, from the compiler, or what another compiler left.

What is at hand costs no look for a compiler where a bundle is installed: a process with prebuilt kernels starts none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from ..core.candidate import Candidate
from ..core.outcome import Outcome
from ..errors import BuildError, StoreError, ToolchainError
from ..settings import Settings, current
from . import installed
from .artifact import Artifact, BuildTarget
from .build import build
from .render import render
from .store import default_store
from .toolchain import driver_release, driver_runs, find_toolchain

logger = logging.getLogger(__name__)

# The most that a candidate may take to compile on one core, for the progress line.
BUILD_SECONDS = 25


def at_hand(
    candidate: Candidate, arch: str, *, settings: Settings | None = None
) -> Artifact | None:
    """A candidate's library for exactly this arch without any compiler: from the store, else from a bundle, or None.

    Args:
        candidate: what to look for.
        arch: compute capability, e.g. ``"80"``.
        settings: those in force by default.

    Raises:
        BundleError: a setting names a bundle that is none.
    """
    settings = settings or current()
    target = BuildTarget(arch=arch).of_family(candidate.family)
    artifacts = _ready(candidate, target, settings)
    return artifacts[0] if artifacts and artifacts[0].target.arch == target.arch else None


def _ready(candidate: Candidate, target: BuildTarget, settings: Settings) -> list[Artifact]:
    """The libraries of a kernel in the store and the bundles that the driver runs; a failing store is passed over."""
    identity = installed.identity_of(candidate, settings)
    try:
        stored = default_store(settings).find(candidate, identity, target)
    except StoreError as error:
        logger.warning("the kernel cache is passed over: %s", error)
        stored = []
    built = stored + installed.find(candidate, identity, target, settings)
    usable = [artifact for artifact in built if driver_runs(artifact.toolchain)]
    if built and not usable:
        logger.warning(
            "%s was built by CUDA %s, the driver here runs kernels of CUDA %d at most",
            built[0].path,
            built[0].toolchain["nvcc"],
            (driver_release() or (0, 0))[0],
        )
    return usable


def build_ahead(
    candidates: Iterable[Candidate], arch: str, *, settings: Settings | None = None
) -> None:
    """Build candidates that are not at hand, several at once; of what does not build, :func:`obtain` says why.

    Arguments are those of :func:`obtain`. Without a compiler it does nothing.

    Raises:
        ToolchainError, StoreError: the compiler does not run, or there is no writable cache.
        BundleError: a setting names a bundle that is none.
    """
    settings = settings or current()
    missing = [c for c in candidates if at_hand(c, arch, settings=settings) is None]
    try:
        toolchain = find_toolchain(settings)
    except ToolchainError:
        return
    if missing:
        logger.info("building %d kernels for sm_%s", len(missing), arch)
        kernels, store = [render(candidate) for candidate in missing], default_store(settings)
        build(kernels, BuildTarget(arch=arch), toolchain=toolchain, store=store, jobs=settings.jobs)


def obtain(candidate: Candidate, arch: str, *, settings: Settings | None = None) -> Artifact:
    """A candidate's library: from the store or a bundle, else built, with a log line that says so.

    Without a compiler, what another one made of the same source serves, for this arch or an older one.

    Args:
        candidate: what to build.
        arch: compute capability to build for, e.g. ``"80"``.
        settings: those in force by default.

    Raises:
        BuildError: it does not compile.
        ToolchainError, StoreError: there is no compiler, or no writable cache.
        BundleError: a setting names a bundle that is none.
    """
    settings = settings or current()
    if installed.bundles(settings):
        ready = at_hand(candidate, arch, settings=settings)
        if ready is not None:
            return ready
    kernel, store = render(candidate), default_store(settings)
    target = BuildTarget(arch=arch).of_family(candidate.family)
    try:
        toolchain = find_toolchain(settings)
    except ToolchainError as error:
        artifacts = _ready(candidate, target, settings)
        if not artifacts:
            raise ToolchainError(f"{candidate.name} has to be built first: {error}") from error
        return artifacts[0]
    result: Artifact | Outcome | None = store.get(kernel, target, toolchain)
    if result is None:
        logger.warning(
            "building %s for sm_%s: up to %d s, once; it is kept in %s (build ahead with `attention-autotuner warmup`)",
            candidate.name,
            target.arch,
            BUILD_SECONDS,
            store.root,
        )
        start = time.monotonic()
        result = build([kernel], target, toolchain=toolchain, store=store, jobs=settings.jobs)[0]
        logger.info("built %s in %.1f s", candidate.name, time.monotonic() - start)
    if not isinstance(result, Artifact):
        log = f"; log: {result.log}" if result.log else ""
        raise BuildError(f"{candidate.name} does not build: {result.reason}{log}")
    return result
