"""One candidate's library: from the store, from the compiler, or what another compiler left in the store."""

from __future__ import annotations

import logging
import time

from ..errors import BuildError, ToolchainError
from ..settings import Settings, current
from .artifact import Artifact, BuildTarget
from .build import build
from .candidate import Candidate
from .outcome import Outcome
from .render import render
from .store import default_store
from .toolchain import find_toolchain

logger = logging.getLogger(__name__)

BUILD_SECONDS = (
    25  # the most that a candidate may take to compile on one core, for the progress line
)


def obtain(candidate: Candidate, arch: str, *, settings: Settings | None = None) -> Artifact:
    """A candidate's library: from the store, else built, with a log line that says so.

    Without a compiler, what another one made of the same source serves.

    Args:
        candidate: what to build.
        arch: compute capability to build for, e.g. ``"80"``.
        settings: those in force by default.

    Raises:
        BuildError: it does not compile.
        ToolchainError, StoreError: there is no compiler, or no writable cache.
    """
    settings = settings or current()
    kernel, target, store = render(candidate), BuildTarget(arch=arch), default_store(settings)
    try:
        toolchain = find_toolchain(settings)
    except ToolchainError as error:
        artifacts = store.find(kernel, target)
        if not artifacts:
            raise ToolchainError(f"{candidate.name} has to be built first: {error}") from error
        return artifacts[0]
    found: Artifact | Outcome | None = store.get(kernel, target, toolchain)
    if found is None:
        logger.warning(
            "building %s for sm_%s: up to %d s, once; it is kept in %s (build ahead with `attention-autotuner warmup`)",
            candidate.name,
            arch,
            BUILD_SECONDS,
            store.root,
        )
        start = time.monotonic()
        found = build([kernel], target, toolchain=toolchain, store=store, jobs=settings.jobs)[0]
        logger.info("built %s in %.1f s", candidate.name, time.monotonic() - start)
    if not isinstance(found, Artifact):
        log = f"; log: {found.log}" if found.log else ""
        raise BuildError(f"{candidate.name} does not build: {found.reason}{log}")
    return found
