"""What a comparison's rows come to: figures against bars, the document that is kept, and the records it settles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from attention_autotuner.arch import Policy
from attention_autotuner.core.identity import slug
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.lookup import Hit, Query
from attention_autotuner.tuning.record_schema import TuningRecord
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.shipping import evidence_path
from attention_autotuner.tuning.validity import PresentKernels

from .comparison import contests
from .peer import Peer
from .rivals import DETERMINISTIC, PICK, variants

ROOT = Path(__file__).resolve().parents[1]
TUNED = ROOT / "python" / "attention_autotuner" / "tuned"
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = 1
PEER_LIBRARIES = ("triton", "fla-core", "flash-attn", "flash-attn-3", "nvidia-cudnn-cu13")
_GRADIENT_BARS = {"geometric_mean": 1.05, "min": 0.95}
BARS: dict[str, dict[str, dict[str, float]]] = {
    "attention_forward": {"sdpa_flash": {"geometric_mean": 1.05, "min": 0.97}},
    "attention_backward": {
        "sdpa_flash": _GRADIENT_BARS,
        "sdpa_flash_step": _GRADIENT_BARS,
        DETERMINISTIC: {"geometric_mean": 1 / 1.35},
    },
    "retnet": {
        "compiled_forward": {"geometric_mean": 1.4},
        "compiled_backward": {"geometric_mean": 1.1},
    },
    "retention": {
        "fla_forward": {"geometric_mean": 1.8, "min": 1.1},
        "fla_step": {"geometric_mean": 2.0, "min": 1.1},
    },
}
"""Benchmark -> contest -> what our speed over the other's must reach."""
DIM_BARS: dict[str, dict[str, dict[tuple[int, int], float]]] = {
    "retnet": {
        "compiled_forward": {(256, 512): 0.65, (128, 128): 2.2, (64, 64): 2.2},
        "compiled_backward": {(256, 512): 0.45},
    },
}
"""The same for problems of some head dims (dim_qk, dim_v), each of them."""

Document = dict[str, Any]


def summarise(
    benchmark: str, rows: Sequence[Mapping[str, Any]], peers: Mapping[str, Peer]
) -> dict[str, Any]:
    """Per contest: geometric mean and least of our speed over the other's, and the bars that are missed.

    A problem that the other computed and we did not is a missed bar of its own.
    """
    found = {}
    for contest, (ours, theirs) in contests(peers).items():
        ratios = {
            row["name"]: row["ratios"][contest]["ratio"] for row in rows if contest in row["ratios"]
        }
        lost = [
            row["name"]
            for row in rows
            if ours in row["entries"]
            and "tflops" in row["entries"].get(theirs, {})
            and contest not in row["ratios"]
        ]
        if not ratios:
            continue
        least = min(ratios, key=lambda name: ratios[name])
        figures: dict[str, Any] = {
            "problems": len(ratios),
            "geometric_mean": geometric_mean(list(ratios.values())),
            "min": ratios[least],
            "min_at": least,
        }
        bars = BARS.get(benchmark, {}).get(contest, {})
        missed = [name for name, bar in bars.items() if figures[name] < bar]
        missed += _slow_dims(rows, contest, DIM_BARS.get(benchmark, {}).get(contest, {}))
        found[contest] = {**figures, "bars": bars, "missed": [*missed, *lost]}
    return found


def _slow_dims(
    rows: Sequence[Mapping[str, Any]], contest: str, bars: Mapping[tuple[int, int], float]
) -> list[str]:
    """The problems that miss the bar of their head dims."""
    found = []
    for row in rows:
        bar = bars.get((row["problem"]["dim_qk"], row["problem"]["dim_v"]))
        if bar is not None and contest in row["ratios"] and row["ratios"][contest]["ratio"] < bar:
            found.append(f"{row['name']} ({bar:g})")
    return found


def document(
    benchmark: str,
    rows: Sequence[Mapping[str, Any]],
    peers: Mapping[str, Peer],
    policy: Policy,
    environment: Environment,
) -> Document:
    """What is written down."""
    return {
        "benchmark": benchmark,
        "schema": SCHEMA,
        "policy": policy.name,
        "spec": policy.spec.name,
        "peers": {name: peer.title for name, peer in peers.items()},
        "contests": {name: list(labels) for name, labels in contests(peers).items()},
        "environment": environment.to_json(),
        "libraries": library_versions(),
        "summary": summarise(benchmark, rows, peers),
        "rows": list(rows),
    }


def library_versions() -> dict[str, str | None]:
    """The versions of those that peers come from; None where one is not installed."""
    return {name: _version(name) for name in PEER_LIBRARIES}


def _version(library: str) -> str | None:
    """The version of an installed library; None where it is not."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def evidence_file(folder: Path, gpu_name: str) -> Path:
    """The evidence for a GPU's shipped picks; that for the package's own is among the results."""
    if folder.resolve() == TUNED:
        return RESULTS / slug(gpu_name) / "records.jsonl.gz"
    return evidence_path(folder, gpu_name)


def settle(
    rows: Sequence[Mapping[str, Any]],
    policy: Policy,
    records: RecordStore,
    environment: Environment,
) -> list[TuningRecord]:
    """Write what the comparison found out about its records: confirmed, or the default after all.

    Returns:
        The records of the rows' problems, as they are now; problems without one are left out.
    """
    settled = []
    for row in rows:
        for label, problem in zip(
            (PICK, DETERMINISTIC), variants(Problem(**row["problem"])), strict=False
        ):
            pick = row["pick"] if label == PICK else row[label]["pick"]
            query = Query(
                problem=problem,
                arch=policy.name,
                environment=environment,
                kernels=PresentKernels(),
            )
            found = records.find(query)
            if not isinstance(found, Hit) or not found.exact:
                continue
            record = found.record
            if "tflops" in row["entries"][label] and record.entry(pick) is not None:
                record = records.put(replace(record, pick=pick, confirmed=True))
            settled.append(record)
    return settled
