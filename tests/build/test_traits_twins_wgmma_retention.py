"""Python and the headers agree about retention's kernels of family sm90."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.chunks_backward_sm90.knobs import ChunkwiseBackwardSm90Knobs
from attention_autotuner.kernels.chunks_backward_sm90.resources import shapes_of
from attention_autotuner.kernels.chunks_sm90.knobs import ChunkwiseSm90Knobs
from attention_autotuner.kernels.chunks_sm90.resources import shape_of
from attention_autotuner.kernels.chunks_sm90.rules import CHUNK_SM90_PREDICATES
from attention_autotuner.kernels.legality import check_kernel
from attention_autotuner.kernels.shared.rules import CLASS_PREDICATES
from tests.cpp_mirror import asserted, compare_traits, compile_host, source_of

pytestmark = pytest.mark.build

PLAIN = Candidate(
    op="retention",
    dtype="fp16",
    padded_dim_qk=128,
    padded_dim_v=128,
    knobs=ChunkwiseSm90Knobs(warpgroups=2, num_stages=2),
)


def chunk_candidate(fields: dict[str, Any] | None = None, **knobs: Any) -> Candidate:
    changed: Any = replace(PLAIN.knobs, **knobs)
    return replace(PLAIN, knobs=changed, **(fields or {}))


ILLEGAL = {
    "padded_dim_qk_range": chunk_candidate({"padded_dim_qk": 24}),
    "padded_dim_v_range": chunk_candidate({"padded_dim_v": 24}),
    "tma_needs_alignment": chunk_candidate({"copy_bytes": 2}),
    "state_warpgroups_range": chunk_candidate(warpgroups=4),
    "wgmma_chunk_stages_range": chunk_candidate(num_stages=5),
    "wgmma_ctas_range": chunk_candidate(ctas_per_sm=3),
    "super_chunk_multiple_of_wgmma_chunk": chunk_candidate(super_chunk=96),
    "state_fits_warpgroup": chunk_candidate({"padded_dim_qk": 256}, warpgroups=1, ctas_per_sm=2),
}
TOO_LARGE = chunk_candidate({"padded_dim_qk": 256}, num_stages=3)


def test_every_rule_of_the_kernels_has_its_static_assert(tmp_path: Path) -> None:
    assert ILLEGAL.keys() == {*CLASS_PREDICATES, *CHUNK_SM90_PREDICATES}
    for name, candidate in ILLEGAL.items():
        shape = shape_of(candidate)
        assert shape is not None
        rule = CHUNK_SM90_PREDICATES.get(name)
        assert rule(shape) if rule is not None else CLASS_PREDICATES[name](candidate), name
    assert check_kernel(PLAIN) is check_kernel(TOO_LARGE) is None
    result = compile_host(tmp_path, source_of([*ILLEGAL.values(), TOO_LARGE]))
    assert result.returncode != 0
    assert asserted(result) == {*ILLEGAL, "smem_fits_block"}


def test_shared_memory_and_registers_are_counted_alike(tmp_path: Path) -> None:
    candidates = [
        selected
        for dims in ((64, 64), (96, 80), (128, 128), (192, 128), (256, 256), (256, 512), (16, 304))
        for selected in H100().legal(
            Problem(
                op="retention",
                causal=True,
                batch=8,
                heads_q=64,
                heads_kv=64,
                dim_qk=dims[0],
                dim_v=dims[1],
            )
        )
        if selected.family == "sm90"
    ]
    assert len(candidates) > 30
    forwards = [shape_of(selected) for selected in candidates]
    compare_traits(
        tmp_path,
        candidates,
        kStateRegisters=[shape.state_registers for shape in forwards],
        kFragmentRegisters=[shape.fragment_registers for shape in forwards],
    )


BACKWARD = replace(
    PLAIN,
    direction="backward",
    knobs=ChunkwiseBackwardSm90Knobs(warpgroups=2, num_stages=2),
)


def backward_candidate(fields: dict[str, Any] | None = None, **knobs: Any) -> Candidate:
    changed: Any = replace(BACKWARD.knobs, **knobs)
    return replace(BACKWARD, knobs=changed, **(fields or {}))


ILLEGAL_BACKWARD = {
    name: backward_candidate(
        {
            field: getattr(candidate, field)
            for field in ("padded_dim_qk", "padded_dim_v", "copy_bytes")
        },
        **asdict(candidate.knobs),
    )
    for name, candidate in ILLEGAL.items()
}
TOO_DEEP = backward_candidate({"padded_dim_v": 512}, warpgroups=1)
TOO_LARGE_BACKWARD = backward_candidate({"padded_dim_v": 256}, num_stages=3)


def test_every_rule_of_the_gradients_has_its_static_assert(tmp_path: Path) -> None:
    for name, candidate in ILLEGAL_BACKWARD.items():
        rejection = check_kernel(candidate)
        assert rejection is not None
        assert rejection.predicate == name
    rejection = check_kernel(TOO_DEEP)  # by dq, though not by dv
    assert rejection is not None
    assert rejection.predicate == "state_fits_warpgroup"
    assert rejection.reason.startswith("dq: ")
    assert check_kernel(BACKWARD) is check_kernel(TOO_LARGE_BACKWARD) is None
    result = compile_host(tmp_path, source_of([*ILLEGAL_BACKWARD.values(), TOO_LARGE_BACKWARD]))
    assert result.returncode != 0
    assert asserted(result) == {*ILLEGAL_BACKWARD, "smem_fits_block"}


def test_shared_memory_and_registers_of_the_gradients_are_counted_alike(tmp_path: Path) -> None:
    candidates = [
        selected
        for dims in (
            *((64, 64), (96, 80), (128, 256), (192, 128), (256, 256), (16, 48)),
            *((256, 512), (64, 272), (128, 384)),  # two warpgroups share the depth
        )
        for selected in H100().legal(
            Problem(
                op="retention",
                direction="backward",
                causal=True,
                batch=8,
                heads_q=64,
                heads_kv=64,
                dim_qk=dims[0],
                dim_v=dims[1],
            )
        )
        if selected.family == "sm90"
    ]
    assert len(candidates) > 20
    shapes = [shape for selected in candidates for shape in shapes_of(selected).values()]
    compare_traits(
        tmp_path,
        candidates,
        kStateRegisters=[shape.state_registers for shape in shapes],
        kDepth=[shape.depth for shape in shapes],
        kSlices=[shape.slices for shape in shapes],
    )
