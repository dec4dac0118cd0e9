"""The content-addressed store of built kernels.

Layout under its root::

    kernels/<name>.<digest16>/{kernel.cu,kernel.so,build.json,build.log}
    failed/<name>.<digest16>/{kernel.cu,build.json,build.log}
    building/<name>.<digest16>.lease   of the process that compiles it
    quarantine/   damaged entries, kept for a look until the next gc
    staging/      what is being written
    cmake/        what CMake found out about a toolchain

An entry is written in ``staging``, made durable and renamed into place, so that its existence is its validity; any
number of processes may do so at once, and losing the race to publish is success. ``build.json`` holds the library's
checksum, and an entry that does not match it is moved to ``quarantine`` with a logged warning, to be built again.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.candidate import Candidate
from ..core.leases import Lease
from ..core.outcome import Outcome, outcome_from_json
from ..core.trust import check, file_sha256, harden, make_folder
from ..errors import StoreError, UntrustedError
from ..settings import Settings, current
from . import entries
from .artifact import Artifact, BuildTarget, artifact_digest
from .entries import DamagedError, Entry
from .files import store_errors, sync_folder, sync_tree
from .render import RenderedKernel
from .toolchain import Toolchain

logger = logging.getLogger(__name__)

# No build takes a day; what is older was left by a killed process.
STALE_STAGING_SECONDS = 24 * 3600.0
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}")  # staged, or on its way to be removed


class Store:
    """Built kernels in a folder; see the module for its layout and guarantees.

    Attributes:
        root: the folder; created by the first write.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).expanduser().absolute()

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def path(self, digest: str, name: str) -> Path:
        """The folder of a built kernel, whether it exists or not."""
        return self.root / entries.FOLDERS["built"] / entries.entry_name(name, digest)

    def failed_path(self, digest: str, name: str) -> Path:
        """The folder of a remembered failure, whether it exists or not."""
        return self.root / entries.FOLDERS["failed"] / entries.entry_name(name, digest)

    def get(
        self, kernel: RenderedKernel, target: BuildTarget, toolchain: Toolchain
    ) -> Artifact | Outcome | None:
        """The stored artifact or remembered failure of a kernel, or None where there is neither.

        Raises:
            StoreError: the folder exists and cannot be read.
        """
        digest = artifact_digest(kernel, target, toolchain)
        return self.lookup(kernel.name, digest, toolchain.compiler_stamp)

    def lookup(self, name: str, digest: str, compiler: str = "") -> Artifact | Outcome | None:
        """:meth:`get` by name and artifact digest; failures of other files of a compiler are passed over."""
        folder = self.path(digest, name)
        with store_errors(folder):
            artifact = self._open(folder, digest)
            if artifact is not None:
                # Last use, for gc. A store that is shared read-only serves all the same.
                with contextlib.suppress(OSError):
                    os.utime(folder / entries.RECORD)
                return artifact
            return self._open_failure(self.failed_path(digest, name), digest, compiler)

    def lease(self, digest: str, name: str) -> Lease:
        """The lease of the process that compiles a kernel; others wait and take what it publishes."""
        folder = self.root / "building"
        check(self.root, folder)
        return Lease(folder / f"{entries.entry_name(name, digest)}.lease")

    def find(self, candidate: Candidate, identity: str, target: BuildTarget) -> list[Artifact]:
        """Artifacts of a candidate, of this kernel digest and target, from any toolchain, the latest used first.

        For machines without a compiler: what another compiler made of the same source still serves.

        Raises:
            StoreError: the folder exists and cannot be read.
        """
        name, target = candidate.compiled.name, target.of_family(candidate.family)
        folders = self.root / entries.FOLDERS["built"]
        with store_errors(folders):
            artifacts = [
                (path.joinpath(entries.RECORD).stat().st_mtime, artifact)
                for path in folders.glob(glob.escape(entries.entry_name(name, "")) + "*")
                if (artifact := self._open(path)) is not None
                and artifact.kernel_digest == identity
                and artifact.target == target
            ]
        return [
            artifact for _, artifact in sorted(artifacts, key=lambda item: item[0], reverse=True)
        ]

    def _open(self, folder: Path, digest: str | None = None) -> Artifact | None:
        """An entry that is whole; a damaged one is quarantined and is then none."""
        try:
            artifact = entries.read_artifact(folder)
            if digest is not None and artifact.digest != digest:
                raise DamagedError(f"it holds the artifact {artifact.digest}, not {digest}")
        except DamagedError as error:
            self._set_aside(folder, error)
            return None
        return artifact

    def _open_failure(self, folder: Path, digest: str, compiler: str) -> Outcome | None:
        try:
            record = entries.read_record(folder)
            if record.get("digest") != digest or not isinstance(record.get("reason"), str):
                raise DamagedError(f"{entries.RECORD} lacks its reason or is of another artifact")
            failure = outcome_from_json({"kind": "build_failed", **record})
        except (DamagedError, ValueError) as error:
            self._set_aside(folder, DamagedError(str(error)))
            return None
        if compiler and record.get("compiler", compiler) != compiler:
            return None
        return replace(failure, log=str(folder / entries.LOG))

    def _set_aside(self, folder: Path, error: DamagedError) -> None:
        """Quarantine a damaged entry; one that was moved away since, or cannot be moved, is passed over."""
        if folder.is_dir():
            try:
                self.quarantine(folder, str(error))
            except StoreError as reason:
                logger.warning(
                    "damaged kernel cache entry %s passed over: %s; %s", folder, error, reason
                )

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A fresh private folder on the store's file system, removed at the end unless it was renamed away.

        Raises:
            StoreError: it cannot be created, or others could change what is in it.
        """
        folder = self.root / "staging" / f".{uuid.uuid4().hex}"
        check(self.root, folder.parent)
        with store_errors(folder):
            make_folder(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, *, source: str, library: Path, log: str, artifact: Artifact) -> Artifact:
        """Store a built kernel; where another process was faster, its entry is the answer.

        Args:
            source: text of the translation unit.
            library: the shared library, copied from wherever it was linked.
            log: what the compiler printed.
            artifact: its description; ``path`` is set here.

        Raises:
            StoreError: the store cannot be written; nothing is left behind.
        """
        folder = self.path(artifact.digest, artifact.name)
        with store_errors(folder), self.staging() as staging:
            shutil.copy2(library, staging / entries.LIBRARY)
            checks = {
                "library_bytes": (staging / entries.LIBRARY).stat().st_size,
                "library_sha256": file_sha256(staging / entries.LIBRARY),
                "created": time.time(),
            }
            _write_entry(staging, source, log, artifact.to_json() | checks)
            while not self.move_in(staging, folder):
                existing = self._open(folder, artifact.digest)
                if existing is not None:
                    return existing
                self.discard(folder)  # damaged, and still there
        self.forget_failure(artifact.digest, artifact.name)
        return replace(artifact, path=folder / entries.LIBRARY)

    def publish_failure(
        self, *, source: str, log: str, failure: Outcome, digest: str, name: str, compiler: str = ""
    ) -> Outcome:
        """Remember that a kernel does not compile, with its log; the answer has the path of that.

        Args:
            source: text of the translation unit.
            log: what the compiler printed.
            failure: why.
            digest: of the artifact that there is none of.
            name: of the candidate.
            compiler: :attr:`.Toolchain.compiler_stamp`.

        Raises:
            StoreError: the store cannot be written; nothing is left behind.
        """
        folder = self.failed_path(digest, name)
        with store_errors(folder), self.staging() as staging:
            said = {"name": name, "digest": digest, "compiler": compiler}
            _write_entry(staging, source, log, said | failure.to_json())
            while not self.move_in(staging, folder):
                self.discard(folder)
        return replace(failure, log=str(folder / entries.LOG))

    def forget_failure(self, digest: str, name: str) -> None:
        """Remove a remembered failure, if there is one."""
        folder = self.failed_path(digest, name)
        with store_errors(folder):
            self.discard(folder)

    def move_in(self, staging: Path, folder: Path) -> bool:
        """Make a staged folder durable and rename it into place; False where the place is taken."""
        harden(staging)
        sync_tree(staging)
        make_folder(folder.parent)
        try:
            staging.rename(folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        sync_folder(folder.parent)
        return True

    def discard(self, folder: Path) -> None:
        """Remove an entry: out of sight in one step, then file by file; needs no free space."""
        hidden = folder.with_name(f".{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            folder.rename(hidden)
            hidden.unlink() if hidden.is_symlink() else shutil.rmtree(hidden)

    def quarantine(self, folder: Path, reason: str) -> None:
        """Move a damaged entry aside, so that it is built again.

        Raises:
            StoreError: it cannot be moved.
        """
        parent = self.root / entries.FOLDERS["quarantined"]
        with store_errors(folder):
            make_folder(parent)
            moved = parent / f"{folder.name}.{time.time_ns()}"
            try:
                folder.rename(moved)
            except FileNotFoundError:
                return  # another process was faster
        logger.warning("damaged kernel cache entry %s: %s; moved to %s", folder, reason, moved)

    def ls(self) -> list[Entry]:
        """Every entry, in order of state and name."""
        with store_errors(self.root):
            return [
                entry
                for state, folder in entries.FOLDERS.items()
                if (self.root / folder).is_dir()
                for path in sorted((self.root / folder).iterdir())
                if (entry := entries.describe(path, state)) is not None
            ]

    def rm(self, pattern: str, alias: Callable[[str], str] = str) -> list[Entry]:
        """Remove the entries whose candidate name or ``<name>.<digest16>`` matches a shell pattern.

        Args:
            pattern: of the whole name.
            alias: another name of a candidate that may match in its place.

        Returns:
            What was removed.
        """
        matches = re.compile(fnmatch.translate(pattern)).match
        chosen = [e for e in self.ls() if any(map(matches, (e.name, e.path.name, alias(e.name))))]
        return self._remove(chosen)

    def verify(self) -> list[tuple[Entry, str]]:
        """Check every built entry against its record; damaged and untrusted ones are quarantined and returned.

        Raises:
            UntrustedError: the whole store is not to be trusted.
        """
        check(self.root, self.root / entries.FOLDERS["built"])
        damaged = []
        for entry in self.ls():
            if entry.state != "built":
                continue
            with store_errors(entry.path):
                try:
                    artifact = entries.read_artifact(entry.path)
                    if entries.entry_name(artifact.name, artifact.digest) != entry.path.name:
                        raise DamagedError(f"it holds {artifact.name}.{artifact.digest[:16]}")
                except (DamagedError, UntrustedError) as error:
                    self.quarantine(entry.path, str(error))
                    damaged.append((entry, str(error)))
        return damaged

    def gc(
        self, *, max_bytes: int | None = None, max_age_seconds: float | None = None
    ) -> list[Entry]:
        """Remove quarantined entries, what killed processes left, and what exceeds the limits.

        Args:
            max_bytes: keep at most this much, the least recently used going first.
            max_age_seconds: remove what was not used for longer.

        Returns:
            What was removed.
        """
        now = time.time()
        with store_errors(self.root):
            for folder in ("staging", "cmake", *entries.FOLDERS.values()):
                # Names that this class gives: the folder may hold what is not ours.
                for path in self.root.glob(f"{folder}/*"):
                    with contextlib.suppress(FileNotFoundError):  # its process was still alive
                        stale = now - path.stat().st_mtime > STALE_STAGING_SECONDS
                        if stale and _TEMPORARY.fullmatch(path.name):
                            shutil.rmtree(path)
        by_use = sorted(self.ls(), key=lambda entry: entry.last_used)
        chosen = [
            entry
            for entry in by_use
            if entry.state == "quarantined"
            or (max_age_seconds is not None and now - entry.last_used > max_age_seconds)
        ]
        kept = [entry for entry in by_use if entry not in chosen]
        while max_bytes is not None and sum(entry.size_bytes for entry in kept) > max_bytes:
            chosen.append(kept.pop(0))
        return self._remove(chosen)

    def _remove(self, entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            with store_errors(entry.path):
                self.discard(entry.path)
        return entries


def _write_entry(folder: Path, source: str, log: str, record: dict[str, Any]) -> None:
    """Write an entry's text files."""
    (folder / entries.SOURCE).write_text(source, encoding="utf-8")
    (folder / entries.LOG).write_text(log, encoding="utf-8")
    text = json.dumps({"schema": entries.SCHEMA, **record}, indent=2)
    (folder / entries.RECORD).write_text(text, encoding="utf-8")


def default_store(settings: Settings | None = None) -> Store:
    """The store in the configured cache folder."""
    return Store((settings or current()).cache_dir)
