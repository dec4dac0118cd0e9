"""Every baseline of the registry computes what our kernels compute, in every mode in which it is timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.attention.modified import attention_modified
from attention_autotuner.operations.attention.modified_inputs import modifiers_of
from attention_autotuner.operations.bindings import make_inputs
from attention_autotuner.reference import attention_backward
from benchmarks.baselines import BASELINES
from benchmarks.baselines.base import DIRECTION_OF, MODES, Mode
from benchmarks.baselines.sdpa import CUDNN_OPS, FLASH_OPS, FusedBackwardEntry, FusedOps
from benchmarks.calls import Call

pytestmark = pytest.mark.gpu

SMALL = Problem(
    batch=2, heads_q=4, heads_kv=4, seqlen_q=256, seqlen_k=256, dim_qk=64, dim_v=64, causal=True
)
KINDS = {
    "attention": SMALL,
    "grouped": replace(SMALL, heads_kv=2),
    "late": replace(SMALL, seqlen_q=4),
    "packed": replace(SMALL, batch=3, packed_rows=(512, 512)),
    "window": replace(SMALL, window_size=(99, -1)),
    "softcap": replace(SMALL, modifications=("softcap",)),
    "alibi": replace(SMALL, modifications=("alibi_slopes",)),
    "sinks": replace(SMALL, modifications=("sinks",)),
    "retnet": replace(SMALL, op="retnet", mask="explicit", causal=False),
    "retention": replace(SMALL, op="retention"),
}
BACKWARD = replace(SMALL, direction="backward", seqlen_q=384, seqlen_k=384)
OTHERS = ("copy", "plain", "equal_lengths")  # compute something else
ALLOWED = 0.02  # of the largest value: another mask or scale would be off by far more


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_runs_and_is_right(
    name: str, kind: str, mode: Mode, device: torch.device
) -> None:
    problem = replace(KINDS[kind], direction=DIRECTION_OF[mode])
    baseline = BASELINES[name]
    reason = baseline.available(problem)
    if reason:
        pytest.skip(reason)
    inputs = [make_inputs(problem, seed=seed, device=device) for seed in (0, 2)]
    entry = baseline.entry(problem, mode, name)
    entry.prepare(inputs, [])
    entry.run(1)
    torch.cuda.synchronize(device)
    if problem.op == "attention" and mode == "forward" and name not in OTHERS:
        assert isinstance(entry, Call)
        (output,) = entry.results(0)
        exact = [tensor.float() for tensor in (inputs[0].q, inputs[0].k, inputs[0].v)]
        modifiers = modifiers_of(problem, inputs[0])
        expected = attention_modified(*exact, modifiers=modifiers, causal=problem.causal)[0]
        assert float((output.float() - expected).abs().max()) < ALLOWED * float(
            expected.abs().max()
        )


@pytest.mark.parametrize("step", [False, True], ids=["backward", "step"])
@pytest.mark.parametrize("ops", [FLASH_OPS, CUDNN_OPS], ids=["flash", "cudnn"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_fused_baseline_computes_our_gradients(
    ops: FusedOps, step: bool, causal: bool, device: torch.device
) -> None:
    problem = replace(BACKWARD, causal=causal)
    inputs = make_inputs(problem, seed=0, device=device)
    taken: list[tuple[torch.Tensor, ...]] = []

    def backward(*arguments: object) -> None:
        taken.append(ops.backward(*arguments))  # type: ignore[arg-type]  # passed through

    entry = FusedBackwardEntry(
        name="baseline",
        ops=FusedOps(forward=ops.forward, backward=backward),
        causal=causal,
        step=step,
    )
    entry.prepare([inputs], [])
    exact = [tensor.float() for tensor in (inputs.q, inputs.k, inputs.v)]
    expected = attention_backward(inputs.tensors["dout"], None, *exact, causal=causal)
    for gradient, reference in zip(taken[0], expected, strict=True):
        error = float((gradient.float() - reference).abs().max())
        assert error < ALLOWED * float(reference.abs().max())
