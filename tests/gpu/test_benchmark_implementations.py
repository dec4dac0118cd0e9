"""Every implementation in the registry computes the same as our kernels, in every way that it is timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.bindings import make_inputs
from attention_autotuner.reference import attention
from benchmarks.calls import Call
from benchmarks.implementations import DIRECTION_OF, IMPLEMENTATIONS, WAYS, Way

pytestmark = pytest.mark.gpu

SMALL = Problem(
    batch=2, heads_q=4, heads_kv=4, seqlen_q=256, seqlen_k=256, dim_qk=64, dim_v=64, causal=True
)
KINDS = {
    "attention": SMALL,
    "grouped": replace(SMALL, heads_kv=2),
    "late": replace(SMALL, seqlen_q=4),
    "retnet": replace(SMALL, op="retnet", mask="explicit", causal=False),
    "retention": replace(SMALL, op="retention"),
}
ALLOWED = 0.02  # of the largest value: another mask or scale would have a far larger error


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_implementation_matches_the_reference(
    name: str, kind: str, way: Way, device: torch.device
) -> None:
    problem = replace(KINDS[kind], direction=DIRECTION_OF[way])
    implementation = IMPLEMENTATIONS[name]
    reason = implementation.can_run(problem)
    if reason is not None:
        pytest.skip(reason)
    inputs = [make_inputs(problem, seed=seed, device=device) for seed in (0, 1)]
    entry = implementation.entry(problem, way)
    entry.prepare(inputs, [])
    entry.run(1)
    torch.cuda.synchronize(device)
    if problem.op == "attention" and way == "forward":
        assert isinstance(entry, Call)
        (output,) = entry.results(0)
        inputs_fp32 = [tensor.float() for tensor in (inputs[0].q, inputs[0].k, inputs[0].v)]
        expected = attention(*inputs_fp32, causal=problem.causal)[0]
        assert float((output.float() - expected).abs().max()) < ALLOWED * float(
            expected.abs().max()
        )
