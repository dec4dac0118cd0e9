"""Python and the headers agree about kernels of family sm90."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.legality import check_kernel
from attention_autotuner.kernels.scores_forward_sm90.knobs import ForwardSm90Knobs
from attention_autotuner.kernels.scores_forward_sm90.resources import shape_of
from attention_autotuner.kernels.scores_forward_sm90.rules import FORWARD_SM90_PREDICATES
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

PLAIN = Candidate(
    op="retnet",
    mask="explicit",
    dtype="fp16",
    padded_dim_qk=128,
    padded_dim_v=128,
    knobs=ForwardSm90Knobs(warpgroups=2, block_n=64, num_stages=2),
)


def wgmma(fields: dict[str, Any] | None = None, **knobs: Any) -> Candidate:
    changed: Any = replace(PLAIN.knobs, **knobs)
    return replace(PLAIN, knobs=changed, **(fields or {}))


ILLEGAL = {
    "padded_dim_qk_range": wgmma({"padded_dim_qk": 24}),
    "padded_dim_v_range": wgmma({"padded_dim_v": 24}),
    "tma_needs_alignment": wgmma({"copy_bytes": 2}),
    "warpgroups_range": wgmma(warpgroups=1),
    "wgmma_block_n_known": wgmma(block_n=96),
    "wgmma_stages_range": wgmma(num_stages=5),
    "value_columns_fit_mma": wgmma({"padded_dim_v": 512}),
    "fragments_fit_warpgroup": wgmma({"padded_dim_v": 256}, block_n=128),
}
TOO_LARGE = wgmma(block_n=128, num_stages=4)


def test_every_rule_of_the_kernels_has_its_static_assert(tmp_path: Path) -> None:
    assert ILLEGAL.keys() == {*CLASS_PREDICATES, *FORWARD_SM90_PREDICATES}
    for name, candidate in ILLEGAL.items():
        shape = shape_of(candidate)
        assert shape is not None
        rule = FORWARD_SM90_PREDICATES.get(name)
        assert rule(shape) if rule is not None else CLASS_PREDICATES[name](candidate), name
    assert check_kernel(PLAIN) is check_kernel(TOO_LARGE) is None
    result = compile_host(tmp_path, source_of([*ILLEGAL.values(), TOO_LARGE]))
    assert result.returncode != 0
    assert asserted(result) == {*ILLEGAL, "smem_fits_block"}


def test_shared_memory_is_counted_alike(tmp_path: Path) -> None:
    candidates = sm90_retnet_candidates("forward")
    assert len(candidates) > 50
    assert printed(tmp_path, candidates) == counted(candidates)
