"""Writing the picks that come with the package: what was settled, cut to what a lookup needs, and the evidence for it.

The evidence is one line for each pick, the whole record as it was measured, and never changes; the pick has the line's
digest. Lines stay when a pick is measured again: the cost model learns from all. Digests of kernels are held to the
present in the pick's line alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..codegen.files import read_text, write_atomic
from ..core.identity import slug
from ..core.trust import parse_json
from ..errors import RecordError
from .locking import locked
from .lookup import Document
from .record_schema import TuningRecord
from .shipped import ShippedFile, read_shipped, shipped_name, write_lines
from .shipped_lines import lasting, stated, to_line
from .validity import misfit

ENTRIES = 3  # of a record that are timed again


def trimmed(record: TuningRecord) -> TuningRecord:
    """A record with the pick, the default, and the fastest others up to :data:`ENTRIES` in all."""
    timed = {
        entry.candidate.name: entry.measurement.ratio_to_best
        for entry in record.entries
        if entry.measurement is not None
    }
    order = dict.fromkeys([record.pick, record.default, *sorted(timed, key=timed.__getitem__)])
    kept = [name for name in order if name in timed][:ENTRIES]
    return replace(
        record, entries=tuple(entry for entry in record.entries if entry.candidate.name in kept)
    )


def evidence_digest(line: str) -> str:
    """Sixteen hex characters that name a line of evidence."""
    return hashlib.sha256(line.encode()).hexdigest()[:16]


def evidence_path(folder: Path, gpu_name: str) -> Path:
    """The file of evidence beside a GPU's file, where no other is named."""
    return folder / f"{slug(gpu_name)}.evidence.jsonl"


def evidence(path: Path) -> dict[str, TuningRecord]:
    """The records of a file of evidence, by digest; none where there is no file.

    Raises:
        RecordError: the file is damaged.
    """
    lines = _lines(path)
    try:
        documents = {digest: dict(parse_json(line)) for digest, line in lines.items()}
        return {digest: TuningRecord.from_json(said) for digest, said in documents.items()}
    except (ValueError, TypeError) as error:  # a RecordError names no file
        raise RecordError(f"the evidence {path} is damaged: {error}") from error


def _lines(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"the evidence {path} is damaged: {error}") from error
    return {evidence_digest(line): line for line in lines}


def shipped(folder: Path, gpu_name: str) -> list[TuningRecord]:
    """The records of a GPU's file, but for those that are not read any longer; none where there is no file.

    Raises:
        RecordError: the file is damaged.
    """
    file = _read(folder, gpu_name)
    try:
        return [
            TuningRecord.from_json(document)
            for document in file.documents()
            if misfit(document) is None
        ]
    except RecordError as error:
        raise RecordError(
            f"the shipped records {folder / shipped_name(gpu_name)} are damaged: {error}"
        ) from error


def _read(folder: Path, gpu_name: str) -> ShippedFile:
    path = folder / shipped_name(gpu_name)
    if not path.is_file():
        return ShippedFile(gpu_name=gpu_name, environments={}, lines=())
    return read_shipped(path)


def ship(
    folder: Path, gpu_name: str, records: Sequence[TuningRecord], evidence: Path | None = None
) -> Path:
    """Write records to a GPU's file, beside those of other problems that it holds already; one process at a time.

    What it holds of knobs that its kernel no longer has is dropped: no look-up would serve it.

    Args:
        folder: of the shipped files.
        gpu_name: the driver's name of the GPU.
        records: replace those of the same problem and policy.
        evidence: where all that they say is kept, packed if its name ends in ``.gz`` or ``.xz``; default
            :func:`evidence_path`.

    Returns:
        The file.

    Raises:
        RecordError: the file that is there is damaged.
        StoreError: the folder cannot be written, or another process holds it for too long.
    """
    path = folder / shipped_name(gpu_name)
    with locked(path):
        file = _read(folder, gpu_name)
        proofs = evidence or evidence_path(folder, gpu_name)
        said = _lines(proofs)
        environments = dict(file.environments)
        lines: dict[tuple[str, str], Document] = {}
        for line, document in zip(file.lines, file.documents(), strict=True):
            if misfit(document) is None:
                record = TuningRecord.from_json(document)
                lines[record.problem.describe(), record.arch] = line
        for record in records:
            text = json.dumps(record.to_json(), separators=(",", ":"))
            said[evidence_digest(text)] = text
            line = to_line(record, evidence_digest(text))
            environments[line["environment"]] = stated(lasting(record.environment))
            lines[record.problem.describe(), record.arch] = line
        ordered = [lines[key] for key in sorted(lines)]
        proofs.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(proofs, "".join(f"{line}\n" for line in said.values()))
        write_lines(path, gpu_name, environments, ordered)
    return path
