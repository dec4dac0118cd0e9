"""Records that travel between machines: files of one record a line, written, merged and taken in.

Of two records of one problem, policy and GPU the later measured one says the pick, and the entries of the other that
it lacks are kept, as in a cache that both had been measured into. What a record is held to when it serves, it is held
to on the other machine, too: a record of another GPU is taken in and never serves there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..codegen.files import read_text, write_atomic
from ..core.trust import make_folder, parse_json
from ..errors import RecordError
from .locking import storing
from .record_schema import TuningRecord
from .records import RecordStore, merge
from .validity import misfit

FORMAT = "attention_autotuner records"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A record that was not taken.

    Attributes:
        place: its file and line.
        reason: why.
    """

    place: str
    reason: str


def write_records(path: Path, records: Iterable[TuningRecord]) -> None:
    """Write a file of records, compressed where its name ends in ``.gz`` or ``.xz``.

    Raises:
        StoreError: it cannot be written; nothing of it is left.
    """
    documents = [{"format": FORMAT, "version": VERSION}, *(r.to_json() for r in records)]
    lines = [json.dumps(document, separators=(",", ":")) for document in documents]
    with storing(f"write the records {path}"):
        make_folder(path.parent)
        write_atomic(path, "\n".join(lines) + "\n")


def read_records(paths: Sequence[Path]) -> tuple[list[TuningRecord], list[Refused]]:
    """The records of files, those of one problem, policy and GPU merged; and those that no present kernel can mean.

    Raises:
        RecordError: a file cannot be read, is none of records, or one of its lines is damaged.
    """
    merged: dict[tuple[object, ...], TuningRecord] = {}
    refused: list[Refused] = []
    for path in paths:
        for number, line in _lines(path):
            place = f"{path}, line {number}"
            try:
                document = parse_json(line)
                if not isinstance(document, dict):
                    raise RecordError(f"a record is an object, got {type(document).__name__}")
                missed = misfit(document)
                if missed is not None:
                    refused.append(Refused(place=place, reason=missed.describe()))
                    continue
                record = TuningRecord.from_json(document)
            except (RecordError, ValueError) as error:
                raise RecordError(f"{place}: {error}") from error
            key = (record.problem, record.arch, record.environment.gpu_name)
            known = merged.get(key)
            merged[key] = record if known is None else later_of(known, record)
    return list(merged.values()), refused


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    try:
        first, *lines = read_text(path).splitlines() or [""]
        header = parse_json(first)
    except OSError as error:
        raise RecordError(f"cannot read the records {path}: {error}") from error
    except ValueError as error:
        raise RecordError(f"{path} is no file of records: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RecordError(f"{path} is no file of records: it does not begin with their header")
    if header.get("version") != VERSION:
        raise RecordError(f"{path} is of version {header.get('version')}, this reads {VERSION}")
    return enumerate(lines, start=2)


def later_of(record: TuningRecord, other: TuningRecord) -> TuningRecord:
    """The later measured of two records of one problem, policy and GPU, with the entries that only the other has."""
    older, newer = sorted((record, other), key=lambda item: item.environment.time_utc or "")
    return merge(older, newer)


def take_in(store: RecordStore, records: Iterable[TuningRecord]) -> int:
    """Put records into a store, beside what it has.

    Returns:
        The number of records that became others, or came to be.

    Raises:
        StoreError: the folder cannot be written.
    """
    return sum(store.combine(record, later_of) for record in records)
