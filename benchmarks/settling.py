"""Records after a comparison: picks that are confirmed or taken back, and those that ship, with their evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attention_autotuner.arch import Policy
from attention_autotuner.core.identity import slug
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.lookup import Hit, Query
from attention_autotuner.tuning.record_schema import TuningRecord
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipping import evidence, evidence_path, ship
from attention_autotuner.tuning.validity import PresentKernels

from .contenders import DETERMINISTIC, PICK, variants
from .results import RESULTS, TUNED, problem_of


def evidence_file(folder: Path, gpu_name: str, *, again: bool = False) -> Path:
    """The evidence for a GPU's shipped picks; that for the package's is among the results.

    Args:
        folder: of the shipped files.
        gpu_name: the driver's name of the GPU.
        again: True for races among kernels that were shipped before, apart from what models learn from.
    """
    path = evidence_path(folder, gpu_name)
    if folder.resolve() == TUNED:
        path = RESULTS / slug(gpu_name) / "records.jsonl.xz"
    return path.parent / "again" / path.name if again else path


def all_evidence(folder: Path, gpu_name: str) -> dict[str, TuningRecord]:
    """The records of both files, by digest."""
    return evidence(evidence_file(folder, gpu_name)) | evidence(
        evidence_file(folder, gpu_name, again=True)
    )


def settle_and_ship(
    rows: Sequence[Mapping[str, Any]],
    policy: Policy,
    records: RecordStore,
    environment: Environment,
    folder: Path | None,
    say: Callable[[str], None],
    *,
    again: bool = False,
) -> None:
    """Write the rows' outcomes to their records: confirmed, or the default after all.

    Where a folder of shipped files is named, the picks of the rows' problems, as they are then, go there; ``again``:
    they come of races among kernels that were shipped before.
    """
    settled = []
    for row in rows:
        for label, problem in zip((PICK, DETERMINISTIC), variants(problem_of(row)), strict=False):
            pick = row["pick"] if label == PICK else row[label]["pick"]
            query = Query(
                problem=problem, arch=policy.name, environment=environment, kernels=PresentKernels()
            )
            hit = records.find(query)
            if not isinstance(hit, Hit) or not hit.exact:
                continue
            record = hit.record
            if "median_us" in row["entries"][label] and record.entry(pick) is not None:
                record = records.put(replace(record, pick=pick, confirmed=True))
            settled.append(record)
    if folder is not None and settled:
        gpu_name = environment.gpu_name or "unknown"
        proofs = evidence_file(folder, gpu_name, again=again)
        say(f"wrote {ship(folder, gpu_name, settled, proofs)}")
