"""Retention of packed sequences: against a loop, states, checks, problems, candidates and costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import attention_autotuner
from attention_autotuner.api.retention.torch_op import FORWARD_OP, IN_PLACE_OP
from attention_autotuner.arch import A100, H100, Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.errors import UnsupportedArgumentError, UnsupportedProblemError
from attention_autotuner.kernels.cost_model import estimate
from attention_autotuner.kernels.registry import KERNELS, candidates
from attention_autotuner.kernels.shared.workspace import cut_of
from attention_autotuner.tuning.class_pools import small_problem
from tests.numerics.packed_sequences import RETENTION, ends_of

retention_func: Any = attention_autotuner.retention_func  # untyped callers'
LENGTHS, SPARE, HEADS = [5, 0, 70, 1, 0, 9], 3, 4
ENDS = ends_of(LENGTHS)
GAMMA = torch.tensor([0.3, 0.9, 0.99, 1.0])


def make(requires_grad: bool = True) -> list[torch.Tensor]:
    """q, k, v, gamma and the initial states."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(LENGTHS) + SPARE
    shapes = ((1, HEADS, rows, 16), (1, 2, rows, 16), (1, 2, rows, 24))
    three = [torch.randn(shape, generator=generator).half() for shape in shapes]
    state = torch.randn((len(LENGTHS), HEADS, 16, 24), generator=generator)
    return [x.requires_grad_(requires_grad) for x in (*three, GAMMA.clone(), state)]


def packed(*tensors: torch.Tensor, **options: Any) -> Any:
    q, k, v, gamma, state = tensors
    named = {"initial_state": state, "cu_seqlens": ENDS, "max_seqlen": 70, **options}
    return retention_func(q, k, v, gamma, **named)


def looped(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, one sequence after the other."""
    q, k, v, gamma, states = tensors
    pieces = [
        retention_func(
            *(x[:, :, begin:end] for x in (q, k, v)),
            gamma,
            initial_state=states[b, None],
            **options,
        )
        for b, (begin, end) in enumerate(pairwise(ENDS.tolist()))
    ]
    behind = q.new_zeros((1, HEADS, SPARE, v.shape[-1]))
    return torch.cat([*(o for o, _ in pieces), behind], dim=2), torch.cat([s for _, s in pieces])


@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.3, "form": "chunkwise"}], ids=["plain", "scale"]
)
def test_results_and_gradients_are_those_of_a_loop(options: dict[str, Any]) -> None:
    leaves = make()
    results = [function(*leaves, **options) for function in (packed, looped)]
    torch.manual_seed(0)
    directions = [torch.randn_like(x) for x in results[0]]
    gradients = [torch.autograd.grad(outputs, leaves, directions) for outputs in results]
    for ours, theirs in (*zip(*results, strict=True), *zip(*gradients, strict=True)):
        torch.testing.assert_close(ours, theirs, atol=4e-3, rtol=2e-3)
    assert not results[0][0][:, :, -SPARE:].any()
    for gradient in gradients[0][:3]:
        assert not gradient[:, :, -SPARE:].any()
        assert gradient.any()


def test_sequences_can_be_cut_anywhere() -> None:
    q, k, v, gamma, state = make(requires_grad=False)
    whole, final = packed(q, k, v, gamma, state)
    first, rest = [2, 0, 41, 0, 0, 9], [3, 0, 29, 1, 0, 0]
    begins = ENDS[:-1].tolist()
    pieces = []
    for lengths, before in (
        (first, begins),
        (rest, [b + n for b, n in zip(begins, first, strict=True)]),
    ):
        rows = torch.cat([torch.arange(b, b + n) for b, n in zip(before, lengths, strict=True)])
        o, state = packed(
            *(x[:, :, rows] for x in (q, k, v)), gamma, state, cu_seqlens=ends_of(lengths)
        )
        pieces.append((rows, o))
    torch.testing.assert_close(state, final, atol=1e-4, rtol=1e-4)
    for rows, o in pieces:
        torch.testing.assert_close(o, whole[:, :, rows], atol=4e-3, rtol=2e-3)


def test_states_layouts_and_arrays() -> None:
    q, k, v, gamma, state = make(requires_grad=False)
    o, final = packed(q, k, v, gamma, state)
    there, kept = state.clone(), packed(q, k, v, gamma, state, output_final_state=False)
    again, same = packed(q, k, v, gamma, there, inplace_state=True)
    assert same is there
    assert kept[1] is None
    for ours, theirs in ((again, o), (kept[0], o), (there, final)):
        assert torch.equal(ours, theirs)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    o_bshd, _ = packed(*turned, gamma, state, layout="bshd", max_seqlen=None)
    assert torch.equal(o_bshd.transpose(1, 2), o)
    arrays = [x.numpy() for x in (q, k, v, state)]
    o_array, _ = retention_func(
        *arrays[:3], gamma, initial_state=arrays[3], cu_seqlens=ENDS.numpy()
    )
    assert torch.equal(torch.as_tensor(o_array), o)


def test_the_ops_pass_opcheck_and_compile() -> None:
    q, k, v, gamma, state = make()
    call = (q, k, v, gamma.detach().log2().requires_grad_(), None, state, None, "auto", "")
    torch.library.opcheck(FORWARD_OP, (*call, True, ENDS, 70))
    plain = [x if not isinstance(x, torch.Tensor) else x.detach() for x in call]
    torch.library.opcheck(IN_PLACE_OP, (*plain, ENDS, 70))
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    leaves = make(requires_grad=False)
    for ours, theirs in zip(compiled(*leaves), packed(*leaves), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


def test_gradients_can_be_differentiated_again() -> None:
    small = [0.1 * x if x.dim() == 4 else x for x in make(requires_grad=False)]  # within fp16
    leaves, seconds = [x.requires_grad_() for x in small], []
    for function in (packed, looped):
        o, state = function(*leaves)
        loss = o.float().square().mean() + state.square().mean()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        again = torch.stack([x.float().square().sum() for x in first]).sum()
        seconds.append(torch.autograd.grad(again, leaves))
    for ours, theirs in zip(*seconds, strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs, atol=0.02 * float(theirs.abs().max()), rtol=0.05)


def test_no_rows_leave_the_states() -> None:
    state = make()[-1]
    q, k, v = (torch.zeros(1, heads, 0, dim).half() for heads, dim in ((4, 16), (2, 16), (2, 24)))
    ends = torch.zeros(len(LENGTHS) + 1, dtype=torch.int32)
    o, final = packed(q, k, v, GAMMA, state, cu_seqlens=ends)
    assert o.shape == (1, 4, 0, 24)
    assert torch.equal(final, state)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens": ENDS.long()}, "cu_seqlens must be torch.int32, got torch.int64"),
    ({"cu_seqlens": ENDS[:1]}, r"\[sequences \+ 1\] with at least one sequence, got Tensor \[1\]"),
    ({"cu_seqlens": ENDS[None]}, r"at least one sequence, got Tensor \[1, 7\]"),
    ({"cu_seqlens": ENDS.repeat(2)[::2]}, "cu_seqlens must be contiguous, got a stride of .2"),
    ({"cu_seqlens": ENDS.to("meta")}, "cu_seqlens must be on q's device cpu, got meta"),
    ({"cu_seqlens": [0, 5]}, "cu_seqlens"),
    (
        {"cu_seqlens": None, "initial_state": None},
        "max_seqlen is for cu_seqlens, got max_seqlen=70",
    ),
    ({"cu_seqlens": ENDS[:-1]}, r"must be \[sequences, heads_q, .*\] = \[5, 4, 16, 24\], got \[6"),
    ({"max_seqlen": -1}, "max_seqlen must be None or an integer from 0 to .*, got -1"),
    ({"max_seqlen": 7.0}, "max_seqlen must be None or an integer from 0 to .*, got 7.0"),
    ({"max_seqlen": True}, "max_seqlen must be None or an integer from 0 to .*, got True"),
    ({"form": "parallel"}, "form of packed sequences must be one of .*, got 'parallel'"),
    ({"form": "recurrent"}, "form of packed sequences must be one of .*, got 'recurrent'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_arguments_are_typed_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedArgumentError, UnsupportedProblemError), match=message):
        packed(*make(requires_grad=False), **change)


def test_a_batch_is_not_packed() -> None:
    q, k, v, gamma, state = make(requires_grad=False)
    with pytest.raises(UnsupportedProblemError, match="one batch entry, got a batch of 2"):
        packed(*(x.repeat(2, 1, 1, 1) for x in (q, k, v)), gamma, state)


# --- problems, candidates and costs ------------------------------------------------------------------


def test_problems_of_packed_sequences() -> None:
    assert RETENTION.compiled_modifications == ("packed",)
    assert RETENTION.describe().endswith("packed 401x401")
    alone = [
        replace(RETENTION, batch=1, packed_rows=(0, 0), seqlen_q=n, seqlen_k=n) for n in (301, 100)
    ]
    for direction in ("forward", "backward"):
        pieces = [replace(x, direction=direction).flops for x in alone]
        assert replace(RETENTION, direction=direction).flops == sum(pieces)
    for bad, message in (
        ({"packed_rows": (3, 4)}, "packed_rows of retention must be equal, got 3 and 4"),
        ({"form": "parallel"}, "form of packed sequences must be one of .* got 'parallel'"),
        ({"window_size": (3, 0)}, "score modifications are for attention, got .*window"),
        ({"op": "retnet", "mask": "decay"}, "score modifications are for attention"),
        ({"batch": 40000}, "batch . heads_q must be at most 65535 for retention, got 160000"),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            replace(RETENTION, **bad)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("policy", [A100(), H100()], ids=lambda policy: policy.name)
def test_chunks_of_family_sm80_serve(policy: Policy, direction: Any) -> None:
    problem = replace(RETENTION, direction=direction)
    default = policy.default(problem)
    assert default is not None
    assert default.kernel == "chunks_sm80"
    assert "_packed_" in default.name
    assert small_problem(default).packed
    offered = [
        x for x in candidates(problem, policy.families, policy.spec) if isinstance(x, Candidate)
    ]
    assert {x.kernel for x in offered} == {"chunks_sm80"}
    assert default in offered
    assert {x.knobs.super_chunk for x in offered} == {0, 1024, 2048, 4096}
    for batch, longest, rows in ((1, 9, 9), (500, 90, 4000), (18, 2678, 17000)):
        sizes: Any = {"seqlen_q": longest, "seqlen_k": longest, "packed_rows": (rows, rows)}
        assert policy.default(replace(problem, batch=batch, **sizes)) == default  # builds nothing
    assert KERNELS["scores_forward_sm80"].lacks(RETENTION) == ("packed",)


def test_uneven_lengths_are_divided() -> None:
    """A sequence that is far longer than the others is shared by many CTAs, and costs say so."""
    policy = H100()
    base = replace(
        RETENTION, heads_q=8, heads_kv=8, dim_qk=128, dim_v=128, packed_rows=(32768, 32768)
    )
    even = replace(base, batch=64, seqlen_q=512, seqlen_k=512)
    uneven = replace(base, batch=64, seqlen_q=16384, seqlen_k=16384)
    assert max(rows for rows, _ in uneven.lengths) > 20 * sorted(uneven.lengths)[32][0]
    assert [cut_of(x, chunk=32, wanted=1024, ctas=1).divided for x in (even, uneven)] == [
        False,
        True,
    ]
    made = Candidate.of(uneven, policy.default(uneven).knobs)
    whole = Candidate.of(uneven, replace(made.knobs, super_chunk=0))
    times = [estimate(uneven, x, policy.spec).us for x in (made, whole)]
    assert times[0] < 0.5 * times[1]
    assert estimate(even, whole, policy.spec).us < times[1] / 4
