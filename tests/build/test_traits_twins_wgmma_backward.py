"""Python and the headers agree about retnet's backward passes of family sm90."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.legality import check_kernel
from attention_autotuner.kernels.scores_backward_sm90.knobs import StoredPass
from attention_autotuner.kernels.scores_backward_sm90.resources import (
    PRODUCER_REGISTERS,
    StoredPassShape,
    computing_shapes,
    shapes,
)
from attention_autotuner.kernels.scores_backward_sm90.rules import (
    PASS_SM90_PREDICATES,
    STORED_SM90_PREDICATES,
    passes_of,
)
from attention_autotuner.kernels.shared.passes import kernel_violation
from attention_autotuner.kernels.shared.rules import CLASS_PREDICATES
from tests.candidates import SM90_PASS, masked_backward
from tests.cpp_mirror import (
    asserted,
    compare_traits,
    compile_host,
    sm90_retnet_candidates,
    source_of,
)

pytestmark = pytest.mark.build

GRADIENTS = ("dq", "dk", "dv")


def passes(fields: dict[str, Any] | None = None, **knobs: Any) -> Candidate:
    """A candidate of three equal passes."""
    return masked_backward(dict.fromkeys(GRADIENTS, replace(SM90_PASS, **knobs)), **(fields or {}))


def stored(fields: dict[str, Any] | None = None, **knobs: Any) -> Candidate:
    """The same with dK from stored scores."""
    stored_dk = replace(StoredPass(warpgroup_rows=64, num_stages=2), **knobs)
    return masked_backward({"dk": None, "stored_dk": stored_dk}, **(fields or {}))


ILLEGAL = {
    "padded_dim_qk_range": passes({"padded_dim_qk": 24}),
    "padded_dim_v_range": passes({"padded_dim_v": 24}),
    "tma_needs_alignment": passes({"copy_bytes": 2}),
    "warpgroups_range": passes(warpgroups=1),
    "block_columns_known": passes(block_columns=96),
    "pass_stages_range": passes(num_stages=4),
    "sliced_depth_has_no_ping_pong": passes(depth_slices=2, slice_stages=3, ping_pong=True),
    "result_columns_fit_mma": passes({"padded_dim_v": 512}, num_stages=1),
    "slices_divide_depth": passes(depth_slices=3, slice_stages=3),
    "slice_stages_range": passes(slice_stages=1),
    "fragments_fit_warpgroup": passes({"padded_dim_qk": 256}, block_columns=128),
    "kept_depth_range": passes(kept_depth=128),
    "exchange_stages_range": passes(exchange_stages=3),
    "two_slices_share_scores": passes(exchange_stages=1),
    "shared_scores_have_no_ping_pong": passes(exchange_stages=1, ping_pong=True),
    "shared_ring_holds_step": passes(exchange_stages=1, slice_stages=2),
    "shared_slices_fit_mma": passes({"padded_dim_qk": 192}, exchange_stages=1, depth_slices=3),
    "barriers_fit": passes(
        {"padded_dim_qk": 64, "padded_dim_v": 64}, num_stages=3, slice_stages=10
    ),
    "stored_warpgroups_known": stored(warpgroups=3),
    "stored_rows_fit_mma": stored(warpgroup_rows=96),
    "stored_stages_range": stored(num_stages=9),
    "stored_fragments_fit_warpgroup": stored(warpgroup_rows=192),
}
TOO_LARGE = passes(block_columns=128, num_stages=3, slice_stages=3)


def test_every_rule_of_the_kernels_has_its_static_assert(tmp_path: Path) -> None:
    assert ILLEGAL.keys() == {*CLASS_PREDICATES, *PASS_SM90_PREDICATES, *STORED_SM90_PREDICATES}
    for name, candidate in ILLEGAL.items():
        if name in STORED_SM90_PREDICATES and name not in PASS_SM90_PREDICATES:
            _, shape, _ = shapes(candidate)
            assert isinstance(shape, StoredPassShape)
            assert STORED_SM90_PREDICATES[name](shape), name
        elif name in PASS_SM90_PREDICATES:
            assert any(map(PASS_SM90_PREDICATES[name], computing_shapes(candidate))), name
        else:
            assert CLASS_PREDICATES[name](candidate), name
        assert kernel_violation(candidate, passes_of(candidate)), name
    assert check_kernel(passes()) is check_kernel(stored()) is check_kernel(TOO_LARGE) is None
    result = compile_host(tmp_path, source_of([*ILLEGAL.values(), TOO_LARGE]))
    assert result.returncode != 0
    assert asserted(result) == {*ILLEGAL, "smem_fits_block"}


def test_shared_memory_and_registers_are_counted_alike(tmp_path: Path) -> None:
    offered = sm90_retnet_candidates()
    computing = [item for item in offered if item.knobs.stored_dk is None]
    storing = [item for item in offered if item.knobs.stored_dk is not None]
    assert len(computing) > 40
    assert len(storing) > 20
    for candidates in (computing, storing):
        pass_shapes = [shape for candidate in candidates for shape in shapes(candidate)]
        members: dict[str, list[int | None]] = {
            "kFragmentRegisters": [shape.fragment_registers for shape in pass_shapes],
            "kConsumerRegisters": [shape.consumer_registers for shape in pass_shapes],
            "kProducerRegisters": [PRODUCER_REGISTERS] * len(pass_shapes),
        }
        if candidates is computing:
            assert {shape.kept_registers for shape in pass_shapes} == {0, 16}
            members["kKeepsX"] = [int(shape.kept_registers > 0) for shape in pass_shapes]
        compare_traits(tmp_path, candidates, **members)


def test_dk_takes_one_pass() -> None:
    knobs, other = passes().knobs, stored().knobs
    for dk, stored_dk in ((None, None), (knobs.dk, other.stored_dk)):
        with pytest.raises(ValueError, match="dK takes one pass"):
            replace(knobs, dk=dk, stored_dk=stored_dk)
