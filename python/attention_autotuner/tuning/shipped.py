"""Picks that come with the package: one read-only file of JSON lines per GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ..codegen.files import write_atomic
from ..core.identity import slug
from ..errors import RecordError
from .environment import Environment
from .lookup import Document, Hit, Query, by_distance, compare
from .record_schema import SCHEMA
from .shipped_lines import to_document
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
        lines: one for each problem.
    """

    gpu_name: str
    environments: dict[str, Document]
    lines: tuple[Document, ...]

    def documents(self) -> list[Document]:
        """Its records in the JSON form of the user's own.

        Raises:
            RecordError: a line lacks or distorts a field.
        """
        return [to_document(line, self.environments) for line in self.lines]


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
        header, *lines = map(json.loads, source.read_text(encoding="utf-8").splitlines())
        if header["schema"] != SCHEMA:
            raise ValueError(f"schema {SCHEMA} expected, got {header['schema']!r}")
        if not all(isinstance(line, dict) for line in lines):
            raise TypeError("a line is a JSON object")
        return ShippedFile(
            gpu_name=str(header["gpu_name"]),
            environments=dict(header["environments"]),
            lines=tuple(lines),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"the shipped records {source} are damaged: {error}") from error


def write_lines(
    path: Path, gpu_name: str, environments: Sequence[Environment], lines: Sequence[Document]
) -> None:
    """Write a file, whole or not at all.

    Args:
        path: the file.
        gpu_name: the driver's name of the GPU.
        environments: that the lines name.
        lines: one for each problem.
    """
    used = {line["environment"] for line in lines}
    header = {
        "schema": SCHEMA,
        "gpu_name": gpu_name,
        "environments": {
            environment.digest: {
                name: value for name, value in environment.to_json().items() if value is not None
            }
            for environment in environments
            if environment.digest in used
        },
    }
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (header, *lines))
    write_atomic(path, text)


class ShippedRecords:
    """The read-only picks of the package, one file per GPU.

    Args:
        folder: where the files are; by default the package's own ``tuned`` data.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._documents: dict[str, list[Document]] = {}

    def find(self, query: Query) -> Hit | Miss:
        """The shipped record of a problem, else of the nearest bucket, else why not.

        Raises:
            RecordError: a shipped file is damaged.
        """
        gpu = query.environment.gpu_name
        if gpu is None:
            return Miss(field="gpu_name", expected="a known GPU", recorded="none on this machine")
        documents = self._load(shipped_name(gpu))
        pairs = [(Path(str(index)), document) for index, document in enumerate(documents)]
        missed: Miss | None = None
        for _, document in by_distance(pairs, query):
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
        return len(self._load(shipped_name(gpu_name)))

    def _load(self, name: str) -> list[Document]:
        if name not in self._documents:
            root = (
                resources.files("attention_autotuner.tuned") if not self._folder else self._folder
            )
            source = root.joinpath(name)
            self._documents[name] = read_shipped(source).documents() if source.is_file() else []
        return self._documents[name]


def shipped_gpus() -> list[str]:
    """Names of the GPUs that picks come with the package for, as the driver gives them.

    Raises:
        RecordError: a shipped file is damaged.
    """
    folder = resources.files("attention_autotuner.tuned")
    sources = [source for source in folder.iterdir() if source.name.endswith(SUFFIX)]
    return sorted(read_shipped(source).gpu_name for source in sources)
