"""Bundles of this Python: the one that a setting names, and the kernel packages that are installed.

A kernel package is a module ``attention_autotuner_kernels_<gpu>`` that holds a bundle and no code. Its name is fixed,
so that a look costs one ``find_spec`` for each GPU that has a spec here, once per process, and no scan of metadata.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from pathlib import Path

from ..arch.probe import probe
from ..arch.resolution import names, plain_name
from ..core.candidate import Candidate
from ..core.memo import Table, remembered
from ..errors import BundleError, UnsupportedArchitectureError
from ..settings import Settings
from ..version import __version__
from .artifact import Artifact, BuildTarget
from .bundle import Bundle, BundledKernel, open_bundle
from .render import kernel_digest, render
from .tree import present_tree
from .wheels import package_folders

logger = logging.getLogger(__name__)

PACKAGE_PREFIX = "attention_autotuner_kernels_"


def package_name(gpu: str) -> str:
    """The module that holds the kernels for a GPU, by the name of its spec."""
    return PACKAGE_PREFIX + plain_name(gpu).lower()


def bundles(settings: Settings) -> tuple[Bundle, ...]:
    """The bundles to look kernels up in: the setting's, then those installed.

    Raises:
        BundleError: the setting names a folder that is none. An installed one that cannot be read is logged and left
            out.
    """
    by_setting = () if settings.bundle is None else (named(settings.bundle),)
    return by_setting + packages()


@remembered("bundles.named")
def named(folder: Path) -> Bundle:
    """The bundle that the setting names, opened once.

    Raises:
        BundleError: it cannot be read.
    """
    try:
        return open_bundle(folder)
    except BundleError as error:
        raise BundleError(f"ATTENTION_AUTOTUNER_BUNDLE: {error}") from error


@remembered("bundles.installed")
def packages() -> tuple[Bundle, ...]:
    """The bundles of installed kernel packages, looked for once."""
    names_here = dict.fromkeys(package_name(gpu) for gpu in (*names(), *present()))
    folders = [folder for name in names_here for folder in package_folders(name)]
    opened = (_open_installed(folder) for folder in folders)
    return tuple(bundle for bundle in opened if bundle is not None)


def _open_installed(folder: Path) -> Bundle | None:
    try:
        return open_bundle(folder)
    except BundleError as error:
        logger.warning("the installed kernels in %s are not used: %s", folder, error)
        return None


def present() -> tuple[str, ...]:
    """The GPUs at hand, each kind once: they may have no spec here but a package of their own."""
    gpus: list[str] = []
    with contextlib.suppress(UnsupportedArchitectureError):  # there are no more
        for device in itertools.count():
            gpus.append(probe(device).name)  # noqa: PERF401  # those before the error count
    return tuple(dict.fromkeys(gpus))


def known_here(candidate: Candidate, settings: Settings) -> BundledKernel | None:
    """The kernel of a bundle that was made from the very files of this package, where one has a candidate's.

    Raises:
        BundleError: see :func:`bundles`.
    """
    for bundle in bundles(settings):
        kernel = bundle.by_candidate.get(candidate.compiled) if bundle.tree is not None else None
        if (
            kernel is not None
            and kernel.source_digest is not None
            and bundle.tree == present_tree()
        ):
            return kernel
    return None


def identity_of(candidate: Candidate, settings: Settings) -> str:
    """The kernel digest of a candidate, taken from a bundle where one knows it.

    Raises:
        BundleError: see :func:`bundles`.
    """
    known = known_here(candidate, settings)
    return kernel_digest(render(candidate)) if known is None else known.kernel_digest


def find(
    candidate: Candidate, identity: str, target: BuildTarget, settings: Settings
) -> list[Artifact]:
    """A kernel's libraries in the bundles, those for the very target first.

    One for an older target serves too: its machine code within a major capability, its PTX beyond.

    Args:
        candidate: of the kernel.
        identity: its kernel digest: its source must be the very same.
        target: the device's own.
        settings: that may name a bundle.

    Raises:
        BundleError: see :func:`bundles`.
    """
    artifacts: list[Artifact] = []
    name = candidate.compiled.name
    for bundle in bundles(settings):
        same = bundle.by_source.get(identity, ())
        if not same and name in bundle.names:
            _warn_of_stale(bundle, name)
        readable = (bundle.read(entry) for entry in same if runs_on(entry.target, target))
        artifacts += filter(None, readable)
    return sorted(artifacts, key=lambda artifact: artifact.target.arch != target.arch)


def runs_on(built: BuildTarget, device: BuildTarget) -> bool:
    """True where code that was built for one target runs on a device of another."""
    if not (built.arch.isdigit() and device.arch.isdigit()):
        return built.arch == device.arch
    old, new = int(built.arch), int(device.arch)
    return old <= new if built.ptx or old // 10 == new // 10 else False


STALE: Table[Path, str] = Table("notices.stale_bundles")
"""Bundles that a warning was logged of -> the version of their kernels."""


def _warn_of_stale(bundle: Bundle, name: str) -> None:
    if bundle.root in STALE:
        return
    STALE.remember(bundle.root, bundle.package_version)
    logger.warning(
        "kernels of %s are passed over: it is of version %s, and its %s was made of other sources than those of "
        "version %s here; install kernels of the same version, or export them again",
        bundle.root,
        bundle.package_version,
        name,
        __version__,
    )
