"""Regression tests for mistakes of an earlier implementation of these ops, each named after its mistake.

Other mistakes have tests for all operations: multi-stage backward kernels and 32-wide tiles in the samples of
``test_retention_candidates``, a dim of 192 in the groups of ``test_retention_numerics`` and ``test_retnet_numerics``,
failed builds, timing and verification in the tests of the search.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_autotuner import retention_func
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning.devices import Guarded
from attention_autotuner.tuning.measure import TorchDevice
from tests.numerics import harness
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.launching import launch
from tests.numerics.retention_cases import FULL, RETENTION_FORMS, RetentionCase
from tests.numerics.retnet_cases import RetnetCase

pytestmark = pytest.mark.gpu

Either = RetentionCase | RetnetCase

LONG_CYCLES = 200_000_000  # a tenth of a second on any present GPU
REPEATS = 20
_RETENTION = RetentionCase(
    problem=replace(
        FULL, batch=2, heads_q=4, heads_kv=2, seqlen_q=203, seqlen_k=203, dim_qk=128, dim_v=128
    )
)
_MASKED = RetnetCase(
    problem=Problem(
        op="retnet",
        mask="explicit",
        batch=2,
        heads_q=4,
        heads_kv=2,
        seqlen_q=77,
        seqlen_k=200,
        dim_qk=128,
        dim_v=128,
    ),
    scale=None,
)


def backward(case: RetnetCase, **changes: Any) -> RetnetCase:
    return replace(case, problem=replace(case.problem, direction="backward", **changes))


CALLS: dict[str, Either] = {
    **{form: _RETENTION.forward(form) for form in RETENTION_FORMS},
    "retention-backward": _RETENTION.backward(),
    "retnet": _MASKED,
    "retnet-backward": backward(_MASKED, deterministic=True),
    "retnet-decay": replace(_MASKED, problem=replace(_MASKED.problem, mask="decay", causal=True)),
    "retnet-decay-backward": replace(
        backward(_MASKED, deterministic=True, mask="decay", causal=True), dmask=False
    ),
}
every_call = pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)


def errors_of(pool: KernelPool, case: Either, device: torch.device, repeats: int = 2) -> list[str]:
    candidate = case.candidate(pool.present)
    kernel = pool.kernel(candidate)
    return harness.errors_of(
        kernel, case, seed=0, device=device, deterministic=candidate.deterministic, repeats=repeats
    )


@every_call
@pytest.mark.parametrize("scale", [0.125, None, -1.0])
def test_the_scale_is_not_that_of_heads_of_64(
    pool: KernelPool, case: Either, scale: float | None, device: torch.device
) -> None:
    assert errors_of(pool, replace(case, scale=scale), device) == []


@every_call
def test_causal_is_not_ignored(pool: KernelPool, case: Either, device: torch.device) -> None:
    """Later tokens change no earlier row, and earlier rows change no gradient of later tokens."""
    if isinstance(case, RetnetCase) and case.explicit:
        case = replace(case, problem=replace(case.problem, causal=True))
    assert errors_of(pool, case, device) == []


@every_call
def test_every_row_of_a_tail_is_written(
    pool: KernelPool, case: Either, device: torch.device
) -> None:
    """Outputs start full of NaN, so that neither zeros nor leftovers of the allocator can pass for results."""
    for seqlen in (1, 15, 33, 65, 129, 130):
        keys = seqlen if case.problem.op == "retention" else case.problem.seqlen_k
        problem = replace(case.problem, seqlen_q=seqlen, seqlen_k=keys)
        assert errors_of(pool, replace(case, problem=problem), device) == []


@every_call
def test_gradients_need_no_atomics_and_repeat_their_bits(
    pool: KernelPool, case: Either, device: torch.device
) -> None:
    assert case.candidate(pool.present).deterministic
    assert errors_of(pool, case, device, repeats=REPEATS) == []


@every_call
def test_every_kernel_of_a_launch_runs_on_the_callers_stream(
    pool: KernelPool, case: Either, device: torch.device
) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    call = harness.call_of(case)
    inputs = {
        name: buffer.view for name, buffer in call.inputs(case, seed=0, device=device).items()
    }
    expected = harness.Run(kernel, case, call.inputs(case, seed=0, device=device), device).written
    late = {name: torch.full_like(x, torch.nan) for name, x in inputs.items()}
    written = {name: buffer.view for name, buffer in call.outputs(case, device).items()}
    workspace = Guarded(TorchDevice(device), {})
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        for name, x in late.items():
            x.copy_(inputs[name])
        launch(kernel, case.problem, {**late, **written}, call.scalars(case), workspace)
    stream.synchronize()
    for name, output in written.items():  # a kernel on any other stream would have read NaN
        assert torch.equal(output, expected[name].view), name


@pytest.mark.parametrize("form", ["parallel", "chunkwise"])
def test_a_score_beyond_fp16_changes_no_earlier_token(form: Any, device: torch.device) -> None:
    """Such a score once overflowed to infinity before the multiplication with its decay of 0 made it NaN."""
    q, k, v = (torch.randn(2, 4, 130, 64, device=device, dtype=torch.float16) for _ in range(3))
    q, k, v = 100.0 * q.sign(), 0.01 * k[:, :2], v[:, :2]
    calm, _ = retention_func(q, k, v, [0.9, 0.5, 0.99, 1.0], form=form)
    for token in (1, 40, 129):
        loud = k.clone()
        loud[:, :, token] = 100.0 * q[:, ::2, 0].sign()  # 80000 with the first token's query
        out, _ = retention_func(q, loud, v, [0.9, 0.5, 0.99, 1.0], form=form)
        assert torch.equal(out[:, :, :token], calm[:, :, :token]), token
