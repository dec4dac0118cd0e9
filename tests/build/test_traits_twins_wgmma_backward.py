"""What Python says of retnet's backward passes of family sm90, and what their headers say, is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.legality import check_kernel
from attention_autotuner.kernels.scores_backward_sm90.knobs import (
    BackwardSm90Knobs,
    Sm90Pass,
)
from attention_autotuner.kernels.scores_backward_sm90.passes import passes_of
from attention_autotuner.kernels.scores_backward_sm90.resources import (
    PRODUCER_REGISTERS,
    shapes,
)
from attention_autotuner.kernels.scores_backward_sm90.rules import (
    PASS_SM90_PREDICATES,
)
from attention_autotuner.kernels.shared.passes import kernel_violation
from attention_autotuner.kernels.shared.rules import CLASS_PREDICATES
from tests.cpp_mirror import (
    asserted,
    compile_host,
    counted,
    printed,
    sm90_retnet_candidates,
    source_of,
)

pytestmark = pytest.mark.build

PLAIN = Sm90Pass(warpgroups=2, block_columns=64, num_stages=2, part_slots=2)


def passes(fields: dict[str, Any] | None = None, **knobs: Any) -> Candidate:
    """A candidate of three equal passes."""
    one = replace(PLAIN, **knobs)
    config: dict[str, Any] = {"class_qk": 128, "class_v": 128} | (fields or {})
    return Candidate(
        op="retnet",
        direction="backward",
        mask="explicit",
        dtype="fp16",
        knobs=BackwardSm90Knobs(dq=one, dk=one, dv=one),
        **config,
    )


ILLEGAL = {
    "class_qk_range": passes({"class_qk": 24}),
    "class_v_range": passes({"class_v": 24}),
    "tensor_maps_need_alignment": passes({"copy_bytes": 2}),
    "warpgroups_range": passes(warpgroups=1),
    "block_columns_known": passes(block_columns=96),
    "pass_stages_range": passes(num_stages=4),
    "parts_have_no_turns": passes(parts=2, part_slots=3, turns=True),
    "result_columns_fit_product": passes({"class_v": 512}, num_stages=1),
    "parts_divide_depth": passes(parts=3, part_slots=3),
    "part_slots_range": passes(part_slots=1),
    "fragments_fit_warpgroup": passes({"class_qk": 256}, block_columns=128),
    "barriers_have_room": passes({"class_qk": 64, "class_v": 64}, num_stages=3, part_slots=10),
}
TOO_LARGE = passes(block_columns=128, num_stages=3, part_slots=3)


def test_every_rule_of_the_kernels_has_its_static_assert(tmp_path: Path) -> None:
    assert ILLEGAL.keys() == {*CLASS_PREDICATES, *PASS_SM90_PREDICATES}
    for name, candidate in ILLEGAL.items():
        rule = PASS_SM90_PREDICATES.get(name)
        if rule is not None:
            assert any(map(rule, shapes(candidate))), name
        else:
            assert CLASS_PREDICATES[name](candidate), name
        assert kernel_violation(candidate, passes_of(candidate)), name
    assert check_kernel(passes()) is check_kernel(TOO_LARGE) is None
    result = compile_host(tmp_path, source_of([*ILLEGAL.values(), TOO_LARGE]))
    assert result.returncode != 0
    assert asserted(result) == {*ILLEGAL, "smem_fits_block"}


def test_shared_memory_is_counted_alike(tmp_path: Path) -> None:
    candidates = sm90_retnet_candidates("backward")
    assert len(candidates) > 40
    assert printed(tmp_path, candidates) == counted(candidates)


def test_registers_are_traded_alike(tmp_path: Path) -> None:
    found = [each for candidate in sm90_retnet_candidates("backward") for each in shapes(candidate)]
    assert {each.kept_registers for each in found} == {0, 16}
    for member, wanted in (
        ("kConsumerRegisters", [each.consumer_registers for each in found]),
        ("kProducerRegisters", [PRODUCER_REGISTERS] * len(found)),
        ("kKeepsX", [int(each.kept_registers > 0) for each in found]),
    ):
        assert printed(tmp_path, sm90_retnet_candidates("backward"), member) == wanted, member
