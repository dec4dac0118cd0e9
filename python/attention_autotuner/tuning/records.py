"""Where the user's own tuning records live: a folder that any number of processes may tune into at once.

Layout: ``<root>/<arch>/<gpu>/<problem>.<digest16>.json``, one file per bucketed problem. A file is replaced atomically
under a lock beside it, and merged with what another process wrote meanwhile. A damaged file is moved to
``<root>/quarantine`` with a warning and counts as a miss.

What a lookup compares is in :mod:`.lookup`; the picks that come with the package are in :mod:`.shipped`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..codegen.files import write_json
from ..core.identity import digest16, slug
from ..core.problem import Problem
from ..core.trust import make_folder, read_json
from ..errors import RecordError, StoreError
from .environment import HARD_FIELDS
from .locking import locked, storing
from .lookup import Document, Hit, Query, by_distance, compare
from .record_schema import READ, TuningRecord
from .validity import Miss, misfit

JOURNALS = (".jsonl", ".step.jsonl")
"""Suffixes of the journals beside a record: of its search, and of whole steps with its problem."""

LOGGER = logging.getLogger(__name__)


Change = Callable[[TuningRecord], TuningRecord | None]


@dataclass(frozen=True, kw_only=True)
class KeptRecord:
    """A record as it is kept, for those who look after records: the user's own, or a file of shipped picks.

    Attributes:
        key: names it among the others of its place; for the user's own, the file.
        problem: what it is of, as :meth:`Problem.describe` says it; empty where that cannot be read.
        record: what it says; None where it cannot be read as a record.
        reason: why not, or, where its pick's kernel has other knobs now, which these were.
        field: the field that ``reason`` is about; empty where there is none.
    """

    key: str
    problem: str
    record: TuningRecord | None
    reason: str = ""
    field: str = ""


def kept_record(key: str, document: Document) -> KeptRecord:
    """A record as it is kept, from its JSON form."""
    try:
        problem = Problem(**document["problem"]).describe()
    except (KeyError, TypeError, ValueError):
        problem = ""
    record, field, reason = None, "", ""
    try:
        missed = misfit(document)
        if missed is not None:
            field = missed.field
            reason = f"{field} is {missed.recorded}, wanted {missed.expected}"
        if field == "schema":
            reason = f"schema {document.get('schema')}"
        else:
            record = TuningRecord.from_json(document)
    except RecordError as error:
        if not field:  # other knobs are reason enough for a pick that cannot be read
            field, reason = "record", str(error)
    return KeptRecord(key=key, problem=problem, record=record, reason=reason, field=field)


class RecordStore:
    """The user's own records.

    Args:
        root: folder of the records; made on the first write.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, problem: Problem, arch: str, gpu_name: str | None) -> Path:
        """The file that holds, or would hold, a problem's record."""
        bucketed = problem.bucketed()
        name = f"{slug(bucketed.describe())}.{digest16(bucketed, arch)}.json"
        return self.root / slug(arch) / slug(gpu_name or "unknown") / name

    def find(self, query: Query) -> Hit | Miss:
        """The record of a problem: its own bucket's, else the nearest one's, else why not."""
        gpu = query.environment.gpu_name
        path = self.path(query.problem, query.arch, gpu)
        others = sorted(path.parent.parent.glob(f"*/{path.name}"))
        if gpu is None and others:
            path = others[0]  # without a GPU any GPU's record may be looked at
        answer = next(self._answers([path], query), None)
        if isinstance(answer, Hit):
            return answer
        near = by_distance(self._documents(sorted(path.parent.glob("*.json"))), query)
        hits = (self._compare(place, document, query) for place, document in near)
        hit = next((hit for hit in hits if isinstance(hit, Hit)), None)
        if hit is not None:
            return hit
        if answer is None:
            # The same problem on another GPU is worth naming as the reason.
            misses = self._answers(others, query)
            answer = next((miss for miss in misses if isinstance(miss, Miss)), None)
        described = query.problem.bucketed().describe()
        return answer or Miss(field="problem", expected=described, recorded="no record")

    def put(self, record: TuningRecord) -> TuningRecord:
        """Write a record, merged with the entries that are there already.

        Entries of the same candidate are replaced; those whose kernel source changed since are dropped by the next
        search, which compares digests.

        Returns:
            The record as written.

        Raises:
            StoreError: the folder cannot be made, locked or written.
        """

        def combined(old: TuningRecord, new: TuningRecord) -> TuningRecord:
            nonlocal record
            record = merge(old, new)
            return record

        self.combine(record, combined)
        return record

    def combine(
        self, record: TuningRecord, how: Callable[[TuningRecord, TuningRecord], TuningRecord]
    ) -> bool:
        """Write what becomes of a record and the one that is there already; a damaged one is replaced.

        Args:
            record: the record.
            how: takes the one that is there, and the record.

        Returns:
            Whether the file changed.

        Raises:
            StoreError: the folder cannot be made, locked or written.
        """
        path = self.path(record.problem, record.arch, record.environment.gpu_name)
        with locked(path):
            document = self._read(path)
            if document is not None and document.get("schema") in READ:
                with suppress(RecordError):  # damaged: replaced by what is known now
                    record = how(TuningRecord.from_json(document), record)
            if document == record.to_json():
                return False
            write_json(path, record.to_json())
        return True

    def count(self) -> int:
        """The number of files, whether or not they can be read."""
        return sum(1 for _ in self.root.glob("*/*/*.json"))

    def kept(self) -> Iterator[KeptRecord]:
        """Every file, whatever its schema, in the order of its path."""
        for path, document in self._documents(sorted(self.root.glob("*/*/*.json"))):
            yield kept_record(str(path), document)

    def records(self) -> Iterator[tuple[Path, TuningRecord]]:
        """Every readable record of the present schema, in the order of its path; a damaged one is set aside."""
        for kept in self.kept():
            if kept.field == "record":
                self._quarantine(Path(kept.key), kept.reason)
            elif kept.record is not None and not kept.field:
                yield Path(kept.key), kept.record

    def rewrite(self, keys: Collection[str], change: Change) -> int:
        """Replace records by what becomes of them as they are under the lock, each whole or not at all.

        Args:
            keys: of :class:`KeptRecord`.
            change: the new record; None leaves the file as it is.

        Returns:
            How many were written.

        Raises:
            RecordError: a record was damaged meanwhile.
            StoreError: the folder cannot be locked or written.
        """
        written = 0
        for path in map(Path, keys):
            with locked(path):
                document = self._read(path)
                record = None if document is None else change(TuningRecord.from_json(document))
                if record is not None:
                    write_json(path, record.to_json())
                    written += 1
        return written

    def remove(self, keys: Collection[str]) -> None:
        """Remove records, each with its journal, so that the next search begins with nothing.

        Raises:
            StoreError: a file cannot be removed.
        """
        with storing("remove tuning records"):
            for key in keys:
                Path(key).unlink(missing_ok=True)
                for suffix in JOURNALS:
                    Path(key).with_suffix(suffix).unlink(missing_ok=True)

    def _documents(self, paths: Iterable[Path]) -> Iterator[tuple[Path, Document]]:
        for path in paths:
            document = self._read(path)
            if document is not None:
                yield path, document

    def _answers(self, paths: Iterable[Path], query: Query) -> Iterator[Hit | Miss]:
        for path, document in self._documents(paths):
            yield self._compare(path, document, query)

    def _compare(self, path: Path, document: Document, query: Query) -> Hit | Miss:
        try:
            return compare(document, query, "record")
        except RecordError as error:
            self._quarantine(path, str(error))
            return Miss(field="record", expected="a readable record", recorded=str(error))

    def _read(self, path: Path) -> Document | None:
        """A file's JSON object; None when there is none. What cannot be parsed is set aside."""
        try:
            document = read_json(path)
            if not isinstance(document, dict):
                raise ValueError(f"a record is a JSON object, got {type(document).__name__}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"cannot read the tuning record {path}: {error}") from error
        except ValueError as error:  # of the encoding and of JSON, too
            self._quarantine(path, str(error))
            return None
        return document

    def _quarantine(self, path: Path, reason: str) -> None:
        target = self.root / "quarantine" / f"{path.name}.{digest16(str(path), os.getpid())}"
        try:
            make_folder(target.parent)
            path.replace(target)
        except FileNotFoundError:
            return  # another process was first
        except OSError as error:
            LOGGER.warning("damaged tuning record %s (%s) left in place: %s", path, reason, error)
            return
        LOGGER.warning("damaged tuning record %s moved to %s: %s", path, target, reason)


class FrozenRecords(RecordStore):
    """Records as they are now, whatever is written later; to be read only."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        paths = sorted(root.glob("*/*/*.json"))
        self._documents_then = {path: super(FrozenRecords, self)._read(path) for path in paths}

    def _read(self, path: Path) -> Document | None:
        return self._documents_then.get(path)


def merge(old: TuningRecord, record: TuningRecord) -> TuningRecord:
    """A record with an older one's other entries and environments, unless that is of another GPU."""
    if any(getattr(old.environment, f) != getattr(record.environment, f) for f in HARD_FIELDS):
        return record
    names = {entry.candidate.name for entry in record.entries}
    kept = tuple(entry for entry in old.entries if entry.candidate.name not in names)
    environments = {**old.environments, **record.environments}
    environments[old.environment.digest] = old.environment
    used = {e.measurement.environment for e in kept + record.entries if e.measurement is not None}
    return replace(
        record,
        entries=record.entries + kept,
        environments={name: env for name, env in environments.items() if name in used},
    )
