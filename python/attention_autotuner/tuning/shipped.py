"""Picks that come with the package: one read-only file of JSON lines per GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..codegen.files import write_atomic
from ..core.identity import digest16, slug
from ..core.problem import Problem
from ..core.trust import parse_json
from ..errors import RecordError
from .locking import locked
from .lookup import Document, Hit, Query, by_distance, compare, serves_lengths
from .record_schema import SCHEMA, TuningRecord
from .records import Change, KeptRecord, RecordStore, kept_record
from .shipped_lines import rekeyed_line, states, to_document
from .validity import Miss

if TYPE_CHECKING:
    from importlib.abc import Traversable

SUFFIX = ".jsonl"


@dataclass(frozen=True, kw_only=True)
class ShippedFile:
    """A parsed file.

    Attributes:
        gpu_name: the driver's name of the GPU.
        environments: that its lines name, by digest.
        lines: one for each problem, with its proofs.
    """

    gpu_name: str
    environments: dict[str, Document]
    lines: tuple[Document, ...]

    def documents(self, **fields: Any) -> list[Document]:
        """Its records in the JSON form of the user's own; with fields, those of problems that have them.

        Raises:
            RecordError: a line lacks or distorts a field.
        """
        lines = [line for line in self.lines if states(line, fields)]
        return [to_document(line, self.environments) for line in lines]


def shipped_name(gpu_name: str) -> str:
    """The name of a GPU's file."""
    return slug(gpu_name) + SUFFIX


def read_shipped(source: Path | Traversable) -> ShippedFile:
    """Parse a file.

    Raises:
        RecordError: it is damaged, or of another schema.
        OSError: it cannot be read.
    """
    try:
        text = source.read_text(encoding="utf-8")
        header, *lines = [parse_json(line) for line in text.splitlines()] or [None]
        if not isinstance(header, dict) or "schema" not in header:
            raise TypeError("the first line must be a JSON object with a field 'schema'")
        if header["schema"] != SCHEMA:
            raise ValueError(f"schema {SCHEMA} expected, got {header['schema']!r}")
        if not all(isinstance(line, dict) for line in lines):
            raise TypeError("a line is a JSON object")
        proofs = dict(header.get("proofs", {}))
        return ShippedFile(
            gpu_name=str(header["gpu_name"]),
            environments=dict(header["environments"]),
            lines=tuple(_with_proofs(line, proofs.__getitem__) for line in lines),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"the picks {source} are damaged, or it is no file of picks: {error}"
        ) from error


def write_lines(
    path: Path, gpu_name: str, environments: Mapping[str, Document], lines: Sequence[Document]
) -> None:
    """Write a file, whole or not at all.

    Args:
        path: the file.
        gpu_name: the driver's name of the GPU.
        environments: by digest; those that no line names are left out.
        lines: one for each problem, with its proofs.
    """
    used = {line["environment"] for line in lines}
    proofs: dict[str, Document] = {}

    def by_digest(proof: Document) -> str:
        name = digest16(proof)
        proofs[name] = proof
        return name

    lines = [_with_proofs(line, by_digest) for line in lines]
    header = {
        "schema": SCHEMA,
        "gpu_name": gpu_name,
        "environments": {name: environments[name] for name in environments if name in used},
    }
    header |= {"proofs": proofs} if proofs else {}
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (header, *lines))
    write_atomic(path, text)


def _with_proofs(line: Document, change: Callable[[Any], Any]) -> Document:
    """A line with something in place of each proof: lines of one kernel have one in common, which the header holds."""
    return {
        name: {**part, "proof": change(part["proof"])}
        if name in ("pick", "default") and isinstance(part, dict) and part.get("proof")
        else part
        for name, part in line.items()
    }


class ShippedPicks:
    """A file of shipped picks.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def kept(self) -> Iterator[KeptRecord]:
        """All of them, in a fixed order.

        Raises:
            RecordError: the file is damaged.
            OSError: it cannot be read.
        """
        for document in read_shipped(self.path).documents():
            yield kept_record(_key(document), document)

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
            changed = sum(new != old for new, old in zip(lines, file.lines, strict=True))
            if changed:
                kept = [line for line in lines if line is not None]
                write_lines(self.path, file.gpu_name, file.environments, kept)
        return changed


RecordPlace = RecordStore | ShippedPicks


def _key(document: Document) -> str:
    return f"{Problem(**document['problem']).describe()} on {document['arch']}"


class ShippedRecords:
    """The read-only picks of the package, one file per GPU.

    Args:
        folder: where the files are; by default the package's own ``tuned`` data.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._files: dict[str, ShippedFile | None] = {}
        self._documents: dict[tuple[Any, ...], list[Document]] = {}

    def find(self, query: Query) -> Hit | Miss:
        """The shipped record of a problem, else of the nearest bucket with its lengths, else why not.

        Raises:
            RecordError: a shipped file is damaged.
        """
        gpu = query.environment.gpu_name
        if gpu is None:
            return Miss(field="gpu_name", expected="a known GPU", recorded="none on this machine")
        missed: Miss | None = None
        near = (
            document
            for document in self._near(shipped_name(gpu), query)
            if serves_lengths(document["measured_problem"], query.problem)
        )
        for _, document in by_distance(enumerate(near), query):
            answer = compare(document, query, "shipped")
            if isinstance(answer, Hit):
                return answer
            missed = missed or answer
        described = query.problem.bucketed().describe()
        return missed or Miss(field="problem", expected=described, recorded="no shipped record")

    def count(self, gpu_name: str) -> int:
        """The number of records for a GPU, by the driver's name for it.

        Raises:
            RecordError: its file is damaged.
        """
        file = self._load(shipped_name(gpu_name))
        return 0 if file is None else len(file.lines)

    def _near(self, name: str, query: Query) -> list[Document]:
        """The records of a file that could be near a problem: making documents of all takes longer than the rest."""
        same = ("op", "direction", "dtype", "causal", "alignment_bytes", "deterministic")
        kind = {field: getattr(query.problem, field) for field in same}
        key = (name, *kind.values())
        if key not in self._documents:
            file = self._load(name)
            self._documents[key] = [] if file is None else file.documents(**kind)
        return self._documents[key]

    def _load(self, name: str) -> ShippedFile | None:
        if name not in self._files:
            root = self._folder or resources.files("attention_autotuner.tuned")
            source = root.joinpath(name)
            self._files[name] = read_shipped(source) if source.is_file() else None
        return self._files[name]


def shipped_gpus() -> list[str]:
    """Names of the GPUs that picks come with the package for, as the driver gives them.

    Raises:
        RecordError: a shipped file is damaged.
    """
    folder = resources.files("attention_autotuner.tuned")
    sources = [source for source in folder.iterdir() if source.name.endswith(SUFFIX)]
    return sorted(read_shipped(source).gpu_name for source in sources)
