"""A bundle: picks and their built kernels in one folder that needs no compiler, read-only once it is written.

Layout::

    index.json                    what is in it: kernels, and which of them serves which problem
    kernels/<name>.<digest16>/    as in the store

Python looks kernels up in it by their source (:mod:`.installed`), the C++ client picks and loads from it alone. The
index is written last and the folder renamed into place, so that a folder with an index is a whole bundle.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.candidate import Candidate
from ..core.identity import values_of
from ..core.outcome import Proof
from ..core.problem import Problem
from ..core.trust import check, harden, read_json
from ..errors import BundleError
from ..kernels.configs import candidate_from_config
from ..version import __version__
from . import entries
from .artifact import Artifact, BuildTarget
from .entries import DamagedError
from .files import sync_folder, sync_tree
from .render import abi_version, kernel_digest, render
from .source_digest import source_digest
from .tree import digest_of_tree

logger = logging.getLogger(__name__)

INDEX = "index.json"
SCHEMA = 1
FILES = (entries.SOURCE, entries.LIBRARY, entries.RECORD, entries.LOG)
# In the order in which they are asked; `predicted` picks are in bundles that earlier versions wrote.
LAYERS = ("record", "shipped", "predicted", "default")


@dataclass(frozen=True, kw_only=True)
class BundledKernel:
    """A kernel of a bundle.

    Attributes:
        candidate: what it was rendered from; picks have its launch knobs.
        kernel_digest: identity of its source.
        target: what it was compiled for.
        toolchain: what compiled it.
        folder: its entry, laid out as in the store.
        library_sha256: of its library.
        source_digest: see :mod:`.source_digest`; None where the bundle does not say.
    """

    candidate: Candidate
    kernel_digest: str
    target: BuildTarget
    toolchain: Mapping[str, str]
    folder: Path
    library_sha256: str
    source_digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class BundledPick:
    """Which kernel serves a problem.

    Attributes:
        problem: of the user's own pick bucketed, else with rounded lengths.
        candidate: of the kernel.
        layer: one of :data:`LAYERS`.
        gpu_name: where it was measured, if it was.
        median_us: what was measured, microseconds.
        estimate_us: what the cost model says, microseconds.
        proof: what verification has shown of the kernel; None where no proof was kept.
    """

    problem: Problem
    candidate: Candidate
    layer: str
    gpu_name: str | None = None
    median_us: float | None = None
    estimate_us: float | None = None
    proof: Proof | None = None

    def to_json(self, kernel: int) -> dict[str, Any]:
        """The pick as the index holds it, its kernel by number."""
        values = vars(self) | {"problem": values_of(self.problem), "kernel": kernel}
        values["proof"] = None if self.proof is None else asdict(self.proof)
        launch = self.candidate.launch_knobs
        values |= {"launch": launch} if launch else {}
        return {name: value for name, value in values.items() if name != "candidate"}


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle that was opened; its libraries are read when they are asked for.

    Attributes:
        root: the folder.
        arch: name of the policy whose picks it holds.
        package_version: of the package that made it.
        kernels: by number, as the index lists them.
        picks: in the order of the index.
        tree: digest of what the kernels' sources were made from, see :mod:`.tree`; None where it is not known.
    """

    root: Path
    arch: str
    package_version: str
    kernels: tuple[BundledKernel, ...]
    picks: tuple[BundledPick, ...]
    tree: str | None = None

    @cached_property
    def by_source(self) -> Mapping[str, tuple[BundledKernel, ...]]:
        """Kernels by the identity of their source: one for each target."""
        kernels: dict[str, tuple[BundledKernel, ...]] = {}
        for kernel in self.kernels:
            kernels[kernel.kernel_digest] = (*kernels.get(kernel.kernel_digest, ()), kernel)
        return kernels

    @cached_property
    def by_candidate(self) -> Mapping[Candidate, BundledKernel]:
        """Kernels by what they were rendered from."""
        return {kernel.candidate: kernel for kernel in self.kernels}

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the candidates that it has a kernel of."""
        return frozenset(kernel.candidate.name for kernel in self.kernels)

    def read(self, kernel: BundledKernel) -> Artifact | None:
        """A kernel's library, checked against its checksum; None, with a warning, for one that is damaged.

        Raises:
            UntrustedError: somebody untrusted owns it, or may change it.
        """
        try:
            artifact = entries.read_artifact(kernel.folder, sha256=kernel.library_sha256)
            if artifact.kernel_digest != kernel.kernel_digest:
                raise DamagedError(f"{entries.RECORD} is of another kernel than the index says")
        except (DamagedError, OSError) as error:
            logger.warning("the bundle's kernel %s cannot be used: %s", kernel.folder, error)
            return None
        return artifact


def open_bundle(root: Path) -> Bundle:
    """Open a bundle.

    Raises:
        BundleError: there is no index, or it is not of the schema and ABI that this package reads.
        UntrustedError: somebody untrusted owns it, or may change it.
    """
    check(root, root / INDEX)
    try:
        data = read_json(root / INDEX)
    except OSError as error:
        raise BundleError(f"{root} is no bundle: {INDEX} cannot be read: {error}") from error
    except ValueError as error:
        raise BundleError(f"{root / INDEX} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        schema = data.get("schema") if isinstance(data, dict) else data
        raise BundleError(f"{root / INDEX} must have schema {SCHEMA}, it has {schema!r}")
    try:
        if int(data["abi_version"]) // 1000 != abi_version() // 1000:
            raise BundleError(
                f"the kernels of {root} speak ABI {data['abi_version']}, this package {abi_version()}: export again"
            )
        kernels = tuple(_read_kernel(root, item) for item in data["kernels"])
        picks = tuple(_read_pick(item, kernels) for item in data["picks"])
        arch, version = str(data["arch"]), str(data["package_version"])
        tree = data.get("tree")
    except BundleError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BundleError(f"{root / INDEX} lacks or distorts a field: {error!r}") from error
    return Bundle(
        root=root, arch=arch, package_version=version, kernels=kernels, picks=picks, tree=tree
    )


def _read_kernel(root: Path, data: Mapping[str, Any]) -> BundledKernel:
    folder = (root / data["library"]).parent
    if not folder.is_relative_to(root) or ".." in folder.parts:
        raise ValueError(f"library {data['library']!r} is outside the bundle")
    return BundledKernel(
        candidate=candidate_from_config(data["candidate"]),
        kernel_digest=data["kernel_digest"],
        target=BuildTarget(**data["target"]),
        toolchain=dict(data["toolchain"]),
        folder=folder,
        library_sha256=data["library_sha256"],
        source_digest=data.get("source_digest"),
    )


def _read_pick(data: Mapping[str, Any], kernels: Sequence[BundledKernel]) -> BundledPick:
    if data["layer"] not in LAYERS:
        raise ValueError(f"layer must be one of {LAYERS}, got {data['layer']!r}")
    number = data["kernel"]
    if type(number) is not int or not 0 <= number < len(kernels):
        raise ValueError(f"kernel must be in 0..{len(kernels) - 1}, got {number!r}")
    measured = {name: data[name] for name in ("layer", "gpu_name", "median_us", "estimate_us")}
    candidate = kernels[number].candidate.launched(data.get("launch", {}))
    problem = Problem(**data["problem"])
    proof = None if data.get("proof") is None else Proof.from_json(data["proof"])
    return BundledPick(problem=problem, candidate=candidate, proof=proof, **measured)


def write_bundle(
    output: Path,
    *,
    arch: str,
    build_arch: str,
    artifacts: Mapping[Candidate, Artifact],
    picks: Sequence[BundledPick],
    environment: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Bundle:
    """Write a bundle: whole, or not at all.

    Args:
        output: the folder to make.
        arch: name of the policy.
        build_arch: compute capability that the kernels are for.
        artifacts: the built kernel of every pick's candidate.
        picks: what serves what; order matters between equals.
        environment: of the GPU, where one is present.
        force: replace a bundle that is there.

    Raises:
        BundleError: the folder exists, and is not a bundle that may be replaced.
        OSError: it cannot be written; nothing is left behind.
    """
    output = output.resolve()  # a link stays one
    check_output(output, force=force)
    staging = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
    staging.mkdir(parents=True)
    try:
        compiled = {candidate.compiled: artifact for candidate, artifact in artifacts.items()}
        kernels = [_copy(artifact, candidate, staging) for candidate, artifact in compiled.items()]
        numbers = {candidate: number for number, candidate in enumerate(compiled)}
        index = {
            "schema": SCHEMA,
            "abi_version": abi_version(),
            "package_version": __version__,
            "arch": arch,
            "build_arch": build_arch,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "environment": None if environment is None else dict(environment),
            "tree": digest_of_tree(),
            "kernels": kernels,
            "picks": [pick.to_json(numbers[pick.candidate.compiled]) for pick in picks],
        }
        (staging / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        harden(staging)
        sync_folder(staging)
        _move_in(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return open_bundle(output)


def check_output(output: Path, *, force: bool) -> None:
    """Refuse a folder that a bundle must not be written to, before anything is built for it.

    Raises:
        BundleError: it exists, and is neither empty nor, with ``force``, a bundle.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / INDEX).is_file():
        raise BundleError(f"{output} exists and is no bundle: name a folder that does not exist")
    if not force:
        raise BundleError(f"{output} holds a bundle already: add --force to replace it")


def _copy(artifact: Artifact, candidate: Candidate, root: Path) -> dict[str, Any]:
    """Copy a store's entry, and give its line of the index."""
    source = artifact.path.parent
    folder = root / entries.FOLDERS["built"] / source.name
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(source / name, folder / name)
    sync_tree(folder)
    record = entries.read_record(folder)
    rendered = render(candidate)
    is_present = kernel_digest(rendered) == artifact.kernel_digest
    return {
        "name": artifact.name,
        "library": (folder / entries.LIBRARY).relative_to(root).as_posix(),
        "library_sha256": record["library_sha256"],
        "library_bytes": record["library_bytes"],
        "digest": artifact.digest,
        "kernel_digest": artifact.kernel_digest,
        "source_digest": source_digest(rendered) if is_present else None,
        "target": asdict(artifact.target),
        "toolchain": artifact.toolchain,
        "candidate": candidate.config,
    }


def _move_in(staging: Path, output: Path) -> None:
    """Put a finished folder into place, and what was there out of it."""
    old = staging.with_name(f"{staging.name}.old")
    replaces = output.exists()
    if replaces:
        output.rename(old)
    try:
        staging.rename(output)
    except OSError:
        if replaces:
            old.rename(output)
        raise
    sync_folder(output.parent)
    shutil.rmtree(old, ignore_errors=True)
