"""Picks that come with the package: one read-only JSON file per GPU, in the schema of the user's own records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from pathlib import Path

from ..codegen.files import write_atomic
from ..core.identity import slug
from ..errors import RecordError
from .lookup import Document, Hit, Miss, Query, by_distance, judge
from .record_schema import SCHEMA, TuningRecord


class ShippedRecords:
    """The read-only picks of the package, one file per GPU, in the same schema.

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
            return Miss(field="gpu_name", expected="a known GPU", found="none on this machine")
        documents = self._load(slug(gpu))
        pairs = [(Path(str(index)), document) for index, document in enumerate(documents)]
        missed: Miss | None = None
        for _, document in by_distance(pairs, query):
            found = judge(document, query, "shipped")
            if isinstance(found, Hit):
                return found
            missed = missed or found
        described = query.problem.bucketed().describe()
        return missed or Miss(field="problem", expected=described, found="no shipped record")

    def count(self, gpu_name: str) -> int:
        """How many records there are for a GPU, by the driver's name for it.

        Raises:
            RecordError: its file is damaged.
        """
        return len(self._load(slug(gpu_name)))

    def _load(self, name: str) -> list[Document]:
        if name not in self._documents:
            root = (
                resources.files("attention_autotuner.tuned") if not self._folder else self._folder
            )
            source = root.joinpath(f"{name}.json")
            documents: list[Document] = []
            if source.is_file():
                try:
                    documents = list(json.loads(source.read_text(encoding="utf-8"))["records"])
                except (ValueError, KeyError, TypeError) as error:
                    raise RecordError(
                        f"the shipped records {source} are damaged: {error}"
                    ) from error
            self._documents[name] = documents
        return self._documents[name]


def shipped_gpus() -> list[str]:
    """Names of the GPUs that picks come with the package for, as the driver gives them.

    Raises:
        RecordError: a shipped file is damaged.
    """
    folder = resources.files("attention_autotuner.tuned")
    sources = [source for source in folder.iterdir() if source.name.endswith(".json")]
    return sorted(_gpu_name(each.name, each.read_text(encoding="utf-8")) for each in sources)


def _gpu_name(name: str, text: str) -> str:
    try:
        return str(json.loads(text)["gpu_name"])
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"the shipped records {name} are damaged: {error}") from error


def write_shipped(folder: Path, gpu_name: str, records: Iterable[TuningRecord]) -> Path:
    """Write a shipped file for one GPU from records; failed candidates are left out to keep it small."""
    documents = []
    for record in sorted(records, key=lambda r: (r.problem.describe(), r.arch)):
        kept = tuple(entry for entry in record.entries if entry.measurement is not None)
        documents.append(replace(record, entries=kept).to_json())
    path = folder / f"{slug(gpu_name)}.json"
    write_atomic(
        path, json.dumps({"schema": SCHEMA, "gpu_name": gpu_name, "records": documents}, indent=1)
    )
    return path
