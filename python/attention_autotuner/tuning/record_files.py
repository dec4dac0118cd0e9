"""Tuning records wherever they are kept, for those who look after them: the user's own, and files of shipped picks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..core.problem import Problem
from ..errors import RecordError, StoreError
from .environment import Environment
from .locking import locked
from .lookup import Document
from .record_schema import TuningRecord
from .records import RecordStore
from .shipped import read_shipped, write_lines
from .shipped_lines import rekeyed_line
from .validity import misfit

Change = Callable[[TuningRecord], TuningRecord | None]


@dataclass(frozen=True, kw_only=True)
class KeptRecord:
    """A record as it is kept.

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


def _kept(key: str, document: Document) -> KeptRecord:
    """A record as it is kept, from its JSON form."""
    try:
        problem = Problem(**document["problem"]).describe()
    except (KeyError, TypeError, ValueError):
        problem = ""
    record, field, reason = None, "", ""
    try:
        missed = misfit(document)
        if missed is not None and missed.field == "schema":
            field, reason = "schema", f"schema {missed.recorded}"
        else:
            record = TuningRecord.from_json(document)
            if missed is not None:
                field = missed.field
                reason = f"{field} is {missed.recorded}, wanted {missed.expected}"
    except RecordError as error:
        field, reason = "record", str(error)
    return KeptRecord(key=key, problem=problem, record=record, reason=reason, field=field)


class OwnRecords:
    """The user's own records.

    Args:
        store: where they are.
    """

    def __init__(self, store: RecordStore) -> None:
        self.store = store

    def records(self) -> Iterator[KeptRecord]:
        """All of them, in a fixed order."""
        for path, document in self.store.documents():
            yield _kept(str(path), document)

    def rewrite(self, keys: Collection[str], change: Change) -> int:
        """Replace records by what becomes of them as they are under the lock; says how many were written.

        Raises:
            RecordError: a record was damaged meanwhile.
            StoreError: the folder cannot be locked or written.
        """
        return sum(self.store.rewrite(Path(key), change) for key in keys)

    def remove(self, keys: Collection[str]) -> None:
        """Remove records.

        Raises:
            StoreError: a file cannot be removed.
        """
        try:
            for key in keys:
                Path(key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot remove tuning records: {error}") from error


class ShippedPicks:
    """A file of shipped picks.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self) -> Iterator[KeptRecord]:
        """All of them, in a fixed order.

        Raises:
            RecordError: the file is damaged.
            OSError: it cannot be read.
        """
        for document in read_shipped(self.path).documents():
            yield _kept(_key(document), document)

    def rewrite(self, keys: Collection[str], change: Change) -> int:
        """Replace records by what becomes of them as they are under the lock, all lines at once; says how many differ.

        Raises:
            RecordError: the file is damaged.
            StoreError: it cannot be locked or written.
        """

        def line_of(line: Document, document: Document) -> Document:
            record = change(TuningRecord.from_json(document)) if _key(document) in keys else None
            return line if record is None else rekeyed_line(line, record)

        return self._replace(line_of)

    def remove(self, keys: Collection[str]) -> None:
        """Remove records.

        Raises:
            RecordError: the file is damaged.
            StoreError: it cannot be locked or written.
        """
        self._replace(lambda line, document: None if _key(document) in keys else line)

    def _replace(self, line_of: Callable[[Document, Document], Document | None]) -> int:
        """Write the file with another line for each; None leaves one out. Says how many differ."""
        with locked(self.path):
            file = read_shipped(self.path)
            pairs = list(zip(file.lines, file.documents(), strict=True))
            lines = [line_of(line, document) for line, document in pairs]
            changed = sum(new != old for new, (old, _) in zip(lines, pairs, strict=True))
            if changed:
                environments = [Environment.from_json(e) for e in file.environments.values()]
                kept = [line for line in lines if line is not None]
                write_lines(self.path, file.gpu_name, environments, kept)
        return changed


RecordPlace = OwnRecords | ShippedPicks


def _key(document: Mapping[str, object]) -> str:
    problem = document["problem"]
    described = Problem(**problem).describe() if isinstance(problem, dict) else str(problem)
    return f"{described} on {document['arch']}"
