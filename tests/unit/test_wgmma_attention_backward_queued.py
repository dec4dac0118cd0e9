"""Shares of dQ in the order of their blocks, on Hopper: where they are the default, and heads that are side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attention_autotuner.arch import H100
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_backward_sm90.cost import nearest_divisor, section_heads
from attention_autotuner.kernels.attention_backward_sm90.knobs import knobs_of
from attention_autotuner.kernels.attention_backward_sm90.resources import shapes
from tests.candidates import offered_by

KERNEL = "attention_backward_sm90"
POLICY = H100(H200_SPEC)
PROBLEM = Problem(
    direction="backward", batch=4, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_k=4096
)


def with_dims(dims: tuple[int, int], **options: Any) -> Problem:
    return replace(PROBLEM, dim_qk=dims[0], dim_v=dims[1], **options)


def offered(problem: Problem) -> list[Candidate]:
    return offered_by(KERNEL, problem, POLICY.spec)


@pytest.mark.parametrize(
    ("dims", "seqlen", "heads", "claimed"),
    [
        ((64, 64), 256, 256, True),
        ((96, 96), 4096, 16, True),
        ((128, 128), 768, 512, False),  # blocks of a head
        ((128, 128), 769, 512, True),
        ((128, 128), 4096, 28, False),  # of all heads
        ((128, 128), 4096, 64, True),
        ((128, 128), 132 * 128, 3, False),
        ((128, 128), 132 * 128 + 1, 3, True),
        ((112, 112), 4096, 64, False),  # in whole heads employ 128 SMs, or 108
        ((112, 112), 3333, 64, True),
    ],
)
def test_even_blocks_that_are_queued_are_claimed_where_they_are_many(
    dims: tuple[int, int], seqlen: int, heads: int, claimed: bool
) -> None:
    shape = with_dims(dims, batch=1, seqlen_q=seqlen, seqlen_k=seqlen, deterministic=True)
    problem = replace(shape, heads_q=heads, heads_kv=heads)
    knobs = knobs_of(POLICY.default(problem))
    assert knobs.dq_share is not None
    assert (knobs.dq_share.dq_add, knobs.persistent) == ("queued", True)
    assert knobs.dynamic is claimed
    assert any(knobs_of(c).dynamic for c in offered(problem)) is claimed


def test_what_cannot_be_queued_has_a_pass_over_queries_in_deterministic_mode() -> None:
    """Documents and wide head dims have no order of blocks, few even blocks with a softcap were not raced."""
    few: dict[str, Any] = {"batch": 1, "heads_q": 8, "heads_kv": 8}
    changed: list[dict[str, Any]] = [
        {"dim_qk": 256, "dim_v": 256},
        {"modifications": ("softcap",), **few},
        {"modifications": ("document_ids",)},
    ]
    for changes in changed:
        chosen = knobs_of(POLICY.default(replace(PROBLEM, deterministic=True, **changes)))
        assert chosen.decomposition == "two_pass"


@pytest.mark.parametrize("modifications", [("sinks",), ("alibi_slopes",), ("softcap", "sinks")])
@pytest.mark.parametrize("dim", [64, 128])
def test_changed_scores_are_queued_in_deterministic_mode(
    modifications: tuple[str, ...], dim: int
) -> None:
    for causal, rows in ((True, (0, 0)), (False, (0, 0)), (True, (9999, 9999))):
        of = {"modifications": modifications, "causal": causal, "packed_rows": rows}
        chosen = knobs_of(POLICY.default(with_dims((dim, dim), deterministic=True, **of)))
        assert chosen.dq_share is not None
        assert (chosen.dq_share.dq_add, chosen.dynamic) == ("queued", True)


@pytest.mark.parametrize(
    ("dim", "batch", "longest", "options", "adds"),
    [
        (128, 18, 2678, {}, "stored"),
        (128, 4, 4096, {}, "stored"),
        (128, 2, 8192, {}, "stored"),
        (128, 4, 8192, {}, "stored"),
        (128, 1, 16384, {"causal": False}, "queued"),
        (64, 18, 2678, {}, "queued"),
        (64, 1, 16384, {}, "stored"),  # as long as each other
        (128, 18, 2678, {"window_size": (511, 0)}, "stored"),
        (64, 18, 2678, {"window_size": (511, 0)}, "queued"),
        (128, 2, 8192, {"modifications": ("softcap",), "heads_q": 8, "heads_kv": 1}, "bulk"),
        (128, 18, 2678, {"modifications": ("sinks",)}, "stored"),
        (128, 18, 2678, {"modifications": ("alibi_slopes",)}, "stored"),
        (128, 18, 2678, {"heads_q": 2, "heads_kv": 2}, "stored"),
        (64, 18, 2678, {"heads_q": 2, "heads_kv": 2}, "bulk"),  # few blocks
    ],
)
def test_how_shares_are_added_in_packed_sequences(
    dim: int, batch: int, longest: int, options: dict[str, Any], adds: str
) -> None:
    """Shares are queued where no tail gains more; where they have to be, with any modification and lengths."""
    shape = with_dims((dim, dim), batch=batch, seqlen_q=longest, seqlen_k=longest, causal=True)
    problem = replace(shape, packed_rows=(16384, 16384), **options)
    share = knobs_of(POLICY.default(problem)).dq_share
    assert share is not None
    assert share.dq_add == adds
    ordered = knobs_of(POLICY.default(replace(problem, deterministic=True))).dq_share
    assert ordered is None or ordered.dq_add == "queued"


@pytest.mark.parametrize(
    ("dims", "batch", "queries", "causal", "pays"),
    [
        ((64, 64), 64, 256, False, True),
        ((64, 64), 64, 512, False, True),
        ((64, 64), 8, 1024, False, False),  # in eight waves of blocks of keys
        ((64, 64), 64, 2048, False, True),
        ((64, 64), 2, 4096, False, False),
        ((96, 96), 64, 4096, False, True),
        ((112, 112), 64, 512, False, False),
        ((64, 64), 64, 1024, True, True),
        ((64, 64), 64, 2048, True, False),
        ((96, 96), 64, 512, True, False),
    ],
)
def test_queued_shares_pay_in_the_usual_mode_where_blocks_have_few_steps(
    dims: tuple[int, int], batch: int, queries: int, causal: bool, pays: bool
) -> None:
    problem = with_dims(dims, batch=batch, seqlen_q=queries, seqlen_k=queries, causal=causal)
    share = knobs_of(POLICY.default(problem)).dq_share
    assert share is not None
    assert (share.dq_add == "queued") is pays
    offers = [knobs_of(c) for c in offered(problem) if c.kernel == KERNEL]
    queued = [k for k in offers if k.dq_share is not None and k.dq_share.dq_add == "queued"]
    assert bool(queued) is pays
    assert all(knobs.dynamic for knobs in queued)
    assert any(not candidate.deterministic for candidate in offered(problem))
    bent = replace(problem, modifications=("alibi_slopes",))
    shares = [knobs_of(c).dq_share for c in offered(bent) if c.kernel == KERNEL]
    assert all(share is None or share.dq_add != "queued" for share in shares)


def test_queued_shares_are_offered_to_deterministic_problems() -> None:
    def queued(problem: Problem) -> int:
        shares = [knobs_of(c).dq_share for c in offered(problem) if c.kernel == KERNEL]
        return sum(share is not None and share.dq_add == "queued" for share in shares)

    assert queued(PROBLEM) == 0
    assert queued(replace(PROBLEM, deterministic=True)) >= 2


def sections_of(problem: Problem) -> int:
    """Heads side by side of a problem's default."""
    (shape,) = shapes(POLICY.default(problem))
    group = problem.heads_q // problem.heads_kv
    return section_heads(problem, shape, problem.batch * problem.heads_kv, group, 132)


@pytest.mark.parametrize(
    ("dims", "options", "heads"),
    [
        # Blocks of twice as many heads as SMs take, of those that divide all.
        ((64, 64), {}, 8),
        ((64, 64), {"heads_q": 15, "heads_kv": 15}, 10),
        ((64, 64), {"seqlen_q": 512, "seqlen_k": 512}, 64),
        ((64, 64), {"seqlen_q": 16384, "seqlen_k": 16384}, 2),
        ((64, 64), {"seqlen_q": 65536, "seqlen_k": 65536}, 1),
        ((64, 64), {"causal": True}, 8),
        ((128, 128), {}, 8),
        ((128, 128), {"causal": True}, 4),
        # What L2 holds of causal ones.
        ((128, 128), {"causal": True, "heads_q": 64}, 1),
        ((64, 64), {"causal": True, "heads_q": 64}, 2),
        ((64, 64), {"heads_q": 64}, 8),
        # As many blocks as share a tile of queries in a window of their own.
        ((64, 64), {"causal": True, "window_size": (1023, -1)}, 16),
        ((128, 128), {"causal": True, "window_size": (1023, -1)}, 4),
        # A fixed share of few blocks in whole heads.
        ((128, 128), {"batch": 1}, 1),
    ],
)
def test_heads_are_side_by_side_where_shares_are_queued(
    dims: tuple[int, int], options: dict[str, Any], heads: int
) -> None:
    assert sections_of(with_dims(dims, deterministic=True, **options)) == heads


def test_heads_are_side_by_side_where_even_first_shares_are_stored_by_the_keys() -> None:
    problem = with_dims((128, 128))
    assert "stored" in POLICY.default(problem).knobs.label
    assert sections_of(problem) == 4
    few = replace(problem, seqlen_q=512, seqlen_k=512, batch=32)
    assert not knobs_of(POLICY.default(few)).dynamic
    assert sections_of(few) == 32
    assert sections_of(replace(problem, causal=True)) == 1
    assert "bulk" in POLICY.default(with_dims((64, 64))).knobs.label
    assert sections_of(with_dims((64, 64))) == 1


@pytest.mark.parametrize(
    ("number", "wanted", "divisor"),
    [
        (64, 8.25, 8),
        (64, 12.0, 16),
        (64, 11.0, 8),
        (7, 3.0, 7),
        (7, 2.0, 1),
        (6, 100.0, 6),
        (6, 0.1, 1),
    ],
)
def test_the_nearest_divisor_is_that_of_the_least_ratio(
    number: int, wanted: float, divisor: int
) -> None:
    assert nearest_divisor(number, wanted) == divisor
