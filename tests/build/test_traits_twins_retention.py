"""Python and the headers agree about retention's passes over chunks and recurrent kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.chunks_sm80.knobs import ChunkPass
from attention_autotuner.kernels.chunks_sm80.rules import CHUNK_PREDICATES, passes_of
from attention_autotuner.kernels.legality import check_kernel
from attention_autotuner.kernels.recurrent_sm80.knobs import RecurrentKnobs
from attention_autotuner.kernels.recurrent_sm80.resources import RecurrentShape
from attention_autotuner.kernels.recurrent_sm80.rules import RECURRENT_PREDICATES
from attention_autotuner.kernels.registry import kernel_of
from attention_autotuner.kernels.shared.rules import CLASS_PREDICATES, COPY_PREDICATES
from tests.candidates import CHUNKS, RETENTION, retention
from tests.cpp_mirror import asserted, compare_traits, compile_host, source_of

pytestmark = pytest.mark.build


def chunkwise(item: dict[str, Any] | None = None, **knobs: Any) -> Candidate:
    """The middling chunkwise candidate but for fields of its pass and of its knobs."""
    output = replace(CHUNKS, **(item or {}))
    changed: Any = replace(RETENTION["chunkwise"], **({"output": output} | knobs))
    return retention("chunkwise", knobs=changed)


def recurrent(columns: int, warps: int, padded_dim_qk: int = 64) -> Candidate:
    return retention(
        "recurrent", padded_dim_qk=padded_dim_qk, knobs=RecurrentKnobs(columns=columns, warps=warps)
    )


# One candidate a rule, which breaks that rule; some break others on the way.
ILLEGAL = {
    "padded_dim_qk_range": retention("chunkwise", padded_dim_qk=24),
    "padded_dim_v_range": retention("chunkwise", padded_dim_v=24),
    "copy_bytes_known": retention("chunkwise", copy_bytes=4),
    "chunk_range": chunkwise(chunk=48),
    "chunk_stages_range": chunkwise({"num_stages": 4}),
    "depth_warps_range": chunkwise({"depth_warps": 3}),
    "chunk_warps_range": chunkwise({"column_warps": 1}),
    "columns_divide_among_warps": chunkwise({"columns": 40}),
    "chunk_divides_among_depth_warps": chunkwise({"depth_warps": 2}, chunk=16),
    "inline_divides_chunk": chunkwise({"column_warps": 4}, chunk=16),
    "precomputed_needs_chunk_of_32": chunkwise({"scores": "precomputed"}, chunk=16),
    "super_chunk_multiple_of_chunk": chunkwise(super_chunk=96),
    "state_fits_registers": retention("chunkwise", padded_dim_qk=256),
    "recurrent_warps_range": recurrent(32, 64),
    "recurrent_columns_share_warps": recurrent(48, 4),
    "recurrent_rows_divide": recurrent(32, 5),
    "recurrent_state_fits_registers": recurrent(128, 1, 256),
}
WIDE = ChunkPass(columns=128, column_warps=8, num_stages=3)
TOO_LARGE = replace(chunkwise(chunk=128, output=WIDE), padded_dim_qk=256)
RULES = CHUNK_PREDICATES | RECURRENT_PREDICATES | CLASS_PREDICATES | COPY_PREDICATES


def reason(name: str, candidate: Candidate) -> str | None:
    """Why a rule refuses a candidate."""
    knobs = candidate.knobs
    if isinstance(knobs, RecurrentKnobs):
        shape = RecurrentShape(knobs=knobs, padded_dim_qk=candidate.padded_dim_qk)
        return RECURRENT_PREDICATES[name](shape)
    if name in CHUNK_PREDICATES:
        (item,) = passes_of(candidate)
        return CHUNK_PREDICATES[name](item.subject)
    return (CLASS_PREDICATES | COPY_PREDICATES)[name](candidate)


def test_every_rule_of_the_kernels_has_its_static_assert(tmp_path: Path) -> None:
    assert ILLEGAL.keys() == RULES.keys()
    for name, candidate in ILLEGAL.items():
        assert reason(name, candidate), name
    assert check_kernel(chunkwise()) is check_kernel(TOO_LARGE) is None
    result = compile_host(tmp_path, source_of([*ILLEGAL.values(), TOO_LARGE]))
    assert result.returncode != 0
    assert asserted(result) == {*RULES, "smem_fits_block"}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_shared_memory_of_passes_is_counted_alike(tmp_path: Path, direction: Any) -> None:
    candidates = []
    forms: tuple[Any, ...] = ("auto",)
    if direction == "forward":
        forms = ("chunkwise", "parallel", "recurrent")
    for form in forms:
        for policy, dim_qk, dim_v in (
            ("H100", 64, 64),
            ("A100", 256, 512),
            ("RTX4090", 48, 304),
            ("H100", 176, 400),
        ):
            problem = Problem(
                op="retention",
                causal=True,
                direction=direction,
                form=form,
                dim_qk=dim_qk,
                dim_v=dim_v,
            )
            legal = resolve(policy).legal(problem)
            candidates += legal[:: max(1, len(legal) // 9)]
    compare_traits(tmp_path, candidates)
    passes = [
        launch.subject.knobs
        for item in candidates
        for launch in kernel_of(item).passes(item)
        if launch.kernel == "chunks_sm80"
    ]
    for knob in ("columns", "column_warps", "depth_warps", "num_stages", "scores"):
        assert len({getattr(item, knob) for item in passes}) > 1, knob


def test_warps_that_exchange_scores_take_room_for_them(tmp_path: Path) -> None:
    deep = {"depth_warps": 2, "column_warps": 2}
    candidates = [
        chunkwise(deep | {"columns": columns}, chunk=chunk)
        for columns, chunk in ((32, 64), (64, 32), (32, 32), (64, 64))
    ]
    compare_traits(tmp_path, candidates)
