"""Writing the picks that come with the package: what was settled, cut to what a lookup needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..core.identity import slug
from ..errors import RecordError
from .locking import locked
from .record_schema import TuningRecord, is_present
from .shipped import write_shipped

ENTRIES = 3  # of a record that is shipped


def trimmed(record: TuningRecord, count: int = ENTRIES) -> TuningRecord:
    """A record with the pick, the default, and the fastest others up to ``count`` entries in all."""
    timed = {
        entry.candidate.name: entry.measurement.ratio_to_best
        for entry in record.entries
        if entry.measurement is not None
    }
    order = dict.fromkeys(
        [record.pick, record.default, *sorted(timed, key=lambda name: timed[name])]
    )
    kept = [name for name in order if name in timed][: max(count, 2)]
    used = {
        entry.measurement.environment
        for entry in record.entries
        if entry.candidate.name in kept and entry.measurement is not None
    }
    return replace(
        record,
        entries=tuple(entry for entry in record.entries if entry.candidate.name in kept),
        environments={name: each for name, each in record.environments.items() if name in used},
    )


def shipped(folder: Path, gpu_name: str) -> list[TuningRecord]:
    """The records of a GPU's file, but for those of another schema or knob space; none where there is no file.

    Raises:
        RecordError: the file is damaged.
    """
    path = folder / f"{slug(gpu_name)}.json"
    if not path.is_file():
        return []
    try:
        documents = json.loads(path.read_text(encoding="utf-8"))["records"]
        return [TuningRecord.from_json(each) for each in documents if is_present(each)]
    except (RecordError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"the shipped records {path} are damaged: {error}") from error


def ship(folder: Path, gpu_name: str, records: Sequence[TuningRecord]) -> Path:
    """Write records to a GPU's file, beside those of other problems that it holds already; one process at a time.

    What it holds of another schema or of another knob space is dropped: no look-up would serve it.

    Args:
        folder: of the shipped files.
        gpu_name: the driver's name of the GPU.
        records: replace those of the same problem and policy.

    Returns:
        The file.

    Raises:
        RecordError: the file that is there is damaged.
        StoreError: the folder cannot be written, or another process holds it for too long.
    """
    with locked(folder / f"{slug(gpu_name)}.json"):
        kept = {(record.problem, record.arch): record for record in shipped(folder, gpu_name)}
        kept |= {(record.problem, record.arch): trimmed(record) for record in records}
        return write_shipped(folder, gpu_name, kept.values())
