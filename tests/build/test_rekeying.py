"""`records rekey` on kernels that are compiled: what survives a tidy-up, and what asks for a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import H100
from attention_autotuner.cli import main
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import find_disassembler, find_toolchain
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.record_schema import TuningRecord, space_digest
from attention_autotuner.tuning.shipping import ship
from tests.neutral_refactoring import copied_sources, refactor
from tests.record_entries import entry

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(find_disassembler() is None, reason="needs cuobjdump and nvdisasm"),
]

GPU = "NVIDIA H200"
RETENTION = Problem(op="retention", causal=True, dim_qk=64, dim_v=64)
PROBLEMS = {
    "scores_forward_sm80": Problem(dim_qk=64, dim_v=64, alignment_bytes=2),
    "recurrent_sm80": replace(RETENTION, form="recurrent"),
    "chunks_sm90": replace(RETENTION, form="chunkwise"),
}
"""Kernel -> a problem that it serves, of tiles that compile fast."""


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A copy of templates and headers, rendered and compiled in place of the package's."""
    with copied_sources(tmp_path) as copy:
        yield copy


def picks_of(problems: dict[str, Problem], folder: Path) -> Path:
    """A file of picks without a code digest, of sources as they are now."""
    from attention_autotuner.tuning.stages import source_digests

    tools = find_toolchain().identity()
    gpu = Environment(
        gpu_name=GPU,
        num_sms=132,
        compute_capability="9.0",
        nvcc=tools["nvcc"],
        cutlass=tools["cutlass"],
    )
    records = []
    for kernel, problem in problems.items():
        candidate = H100().default(problem)
        assert candidate.kernel == kernel
        (digest,) = source_digests([candidate]).values()
        records.append(
            TuningRecord(
                problem=problem.bucketed(),
                measured_problem=problem,
                purpose="forward",
                arch="H100",
                space_digest=space_digest([candidate]),
                pick=candidate.name,
                default=candidate.name,
                confirmed=True,
                entries=(entry(candidate, 10.0, source_digest=digest, environment=gpu.digest),),
                environment=gpu,
            )
        )
    return ship(folder, GPU, records)


def test_a_tidy_up_costs_no_gpu_and_a_change_of_one_kernel_asks_for_that_one(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    new_store: Callable[[Path], Store],
) -> None:
    path = picks_of(PROBLEMS, tmp_path)

    def said(action: str, status: int = 0) -> dict[str, Any]:
        assert main(["records", action, "--file", str(path), "--json"]) == status
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    with settings.override(cache_dir=new_store(tmp_path / "cache").root):
        assert said("rekey")["states"] == {"filled": 3}
        filled = path.read_bytes()
        assert said("rekey")["states"] == {"valid": 3}
        assert path.read_bytes() == filled

        refactor(source)
        stale = said("verify", 1)
        assert (stale["valid"], stale["total"]) == (0, 3)
        assert {item["field"] for item in stale["records"]} == {"source_digest"}
        assert said("rekey")["states"] == {"carried": 3}
        assert said("verify")["valid"] == 3
        carried = path.read_bytes()
        assert carried != filled

        recurrent = source / "include" / "attention_autotuner" / "recurrent_sm80" / "mainloop.cuh"
        text = recurrent.read_text(encoding="utf-8")
        changed = text.replace("__syncthreads();", "__syncthreads(); __syncthreads();", 1)
        assert changed != text
        recurrent.write_text(changed, encoding="utf-8")
        answer = said("rekey", 1)
        assert answer["states"] == {"valid": 2, "changed": 1}
        (lost,) = (item for item in answer["entries"] if item["state"] == "changed")
        assert lost["candidate"] == H100().default(PROBLEMS["recurrent_sm80"]).name
        assert "must be measured" in lost["reason"]
        assert path.read_bytes() == carried
