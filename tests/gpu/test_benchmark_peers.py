"""The peers in the benchmark of attention backward compute the same gradients as our kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.bindings import make_inputs
from attention_autotuner.reference import attention_backward
from benchmarks.gradients import CUDNN, FLASH, FusedBackwardEntry, FusedOps
from benchmarks.peers import PEERS

pytestmark = pytest.mark.gpu

PROBLEM = Problem(
    direction="backward",
    batch=2,
    heads_q=4,
    heads_kv=4,
    seqlen_q=384,
    seqlen_k=384,
    dim_qk=64,
    dim_v=64,
    causal=True,
)
ALLOWED = 0.02  # of the largest value: another mask or scale would have a far larger error


@pytest.mark.parametrize("step", [False, True], ids=["backward", "step"])
@pytest.mark.parametrize("ops", [FLASH, CUDNN], ids=["flash", "cudnn"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_fused_peer_computes_our_gradients(
    ops: FusedOps, step: bool, causal: bool, device: torch.device
) -> None:
    problem = replace(PROBLEM, causal=causal)
    inputs = make_inputs(problem, seed=0, device=device)
    results: list[tuple[torch.Tensor, ...]] = []

    def backward(*arguments: object) -> None:
        results.append(ops.backward(*arguments))  # type: ignore[arg-type]  # forwarded

    entry = FusedBackwardEntry(
        name="peer",
        ops=FusedOps(forward=ops.forward, backward=backward),
        causal=causal,
        step=step,
    )
    entry.prepare([inputs], [])
    inputs_fp32 = [tensor.float() for tensor in (inputs.q, inputs.k, inputs.v)]
    expected = attention_backward(inputs.tensors["dout"], None, *inputs_fp32, causal=causal)
    for gradient, ref in zip(results[0], expected, strict=True):
        assert float((gradient.float() - ref).abs().max()) < ALLOWED * float(ref.abs().max())


@pytest.mark.parametrize("name", PEERS["attention_backward"])
def test_every_peer_runs(name: str, device: torch.device) -> None:
    entry = PEERS["attention_backward"][name].entry(PROBLEM)
    entry.prepare([make_inputs(PROBLEM, seed=seed, device=device) for seed in (0, 1)], [])
    entry.run(1)
    torch.cuda.synchronize(device)
