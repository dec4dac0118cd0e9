"""Heads and bands of rows: which rows are compared together, and which one a message names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_autotuner.core.problem import CausalAlignment, Problem
from attention_autotuner.operations.shared.bands import SEEN, keys_seen, queries_that_see
from attention_autotuner.reference import Bands, check

PROBLEM = Problem(
    batch=2, heads_q=4, heads_kv=2, seqlen_q=24, seqlen_k=40, dim_qk=16, dim_v=8, causal=True
)


@pytest.mark.parametrize("lengths", [(24, 40), (40, 24), (17, 17), (1, 5), (5, 1)])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_counts_are_those_of_the_causal_mask(
    lengths: tuple[int, int], alignment: CausalAlignment
) -> None:
    rows, keys = lengths
    offset = keys - rows if alignment == "bottom_right" else 0
    visible = torch.ones(rows, keys).tril(offset).long()
    problem = replace(PROBLEM, seqlen_q=rows, seqlen_k=keys, causal_alignment=alignment)
    assert torch.equal(keys_seen(problem), visible.sum(1))
    assert torch.equal(queries_that_see(problem), visible.sum(0))
    whole = replace(problem, causal=False)
    assert bool((keys_seen(whole) == keys).all())
    assert bool((queries_that_see(whole) == rows).all())


def test_bands_go_by_powers_of_two_and_rows_that_see_nothing_have_their_own() -> None:
    counts = torch.tensor([0, 0, 1, 2, 3, 4, 7, 8, 9])
    bands, index = Bands(heads=1, rows=2, counts=counts).band_of_rows()
    assert index.tolist() == [0, 0, 1, 2, 2, 3, 3, 4, 4]
    spoken = [Bands(heads=1, rows=2, counts=counts).describe(3, int(band)) for band in bands]
    assert spoken == [
        "head 3, rows that see 0 keys",
        "head 3, rows that see 1 keys",
        "head 3, rows that see 2..3 keys",
        "head 3, rows that see 4..7 keys",
        "head 3, rows that see 8..15 keys",
    ]


def outputs() -> dict[str, tuple[int, ...]]:
    """Shapes of all outputs, as the bindings and as the GPU tests have them."""
    p = PROBLEM
    rows, states = (p.batch, p.heads_q, p.seqlen_q), (p.batch, p.heads_q, p.dim_qk, p.dim_v)
    return {
        "o": (*rows, p.dim_v),
        "lse": rows,
        "r": (*rows, 1),
        "dq": (*rows, p.dim_qk),
        "dk": (p.batch, p.heads_kv, p.seqlen_k, p.dim_qk),
        "dv": (p.batch, p.heads_kv, p.seqlen_k, p.dim_v),
        "dmask": (p.heads_q, p.seqlen_q, p.seqlen_k),
        "dattn_mask": (1, p.heads_q, p.seqlen_q, p.seqlen_k),
        "final_state": states,
        "dinitial_state": states,
        "dlog2_gamma": (p.batch, p.heads_q),
        "dsinks": (p.heads_q,),
        "dbias_table": (p.heads_q, 41),
    }


@pytest.mark.parametrize("name", SEEN)
def test_small_values_of_one_head_are_not_excused_by_the_large_ones_of_others(name: str) -> None:
    shape = outputs()[name]
    bands = Bands.of(PROBLEM, name, len(shape))
    ref = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    small = ref.movedim(bands.heads, 0)[-1]
    small *= 1e-4
    low = ref + 1e-3 * ref.abs()
    out = ref.clone()
    out.movedim(bands.heads, 0)[-1] *= 1.01
    assert check(ref.clone(), ref, low, bands).ok
    assert check(out, ref, low).ok
    results = check(out, ref, low, bands)
    assert f"head {shape[bands.heads] - 1}" in results.reason
    counted = shape[bands.heads] * len(bands.band_of_rows()[0])
    assert results.groups == counted


def test_the_band_and_the_element_are_named() -> None:
    ref = torch.ones(2, 4, 24, 8)
    out = ref.clone()
    out[1, 2, 20, 5] = 1.5
    results = check(out, ref, ref.clone(), Bands.of(PROBLEM, "o", 4))
    assert "largest error 0.5 at (1, 2, 20, 5)" in results.reason
    assert "(head 2, rows that see 32..63 keys)" in results.reason
    assert "1 of 8 heads and bands are wrong" in results.reason
    assert results.max_error == 0.5


def test_rows_that_see_no_key_must_be_zero_whatever_others_hold() -> None:
    problem = replace(PROBLEM, seqlen_q=40, seqlen_k=24)
    ref = torch.randn(2, 4, 40, 8, generator=torch.Generator().manual_seed(0))
    ref[:, :, :16] = 0.0
    out = ref.half()
    out[0, 0, 3, 0] = 1e-3
    assert check(out, ref, ref.clone()).ok
    results = check(out, ref, ref.clone(), Bands.of(problem, "o", 4))
    assert "(head 0, rows that see 0 keys)" in results.reason


def test_bands_of_another_length_are_refused() -> None:
    ref = torch.ones(2, 4, 25, 8)
    with pytest.raises(ValueError, match="bands are of 24 rows"):
        check(ref, ref, ref, Bands.of(PROBLEM, "o", 4))
    with pytest.raises(KeyError):
        Bands.of(PROBLEM, "p", 4)
