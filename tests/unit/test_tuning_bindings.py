"""The ways to call retnet's and retention's kernels: inputs, outputs, truths, and the params that point at them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_autotuner.core.problem import Direction, Problem
from attention_autotuner.operations.bindings import Binding, ways_of
from attention_autotuner.operations.params import field_names
from attention_autotuner.operations.shared.gammas import EDGES, gammas_of, log2_gammas
from attention_autotuner.operations.shared.tensors import Outputs, bind
from attention_autotuner.reference import Bands, check
from attention_autotuner.tuning.devices import workspace_on
from attention_autotuner.tuning.measure import TorchDevice

CPU = torch.device("cpu")
RETNET = Problem(
    op="retnet",
    mask="explicit",
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=45,
    seqlen_k=33,
    dim_qk=16,
    dim_v=24,
)
DECAY = replace(RETNET, mask="decay", causal=True, seqlen_k=70)
RETENTION = replace(RETNET, op="retention", mask="none", causal=True, seqlen_q=130, seqlen_k=130)
DECODE = replace(RETENTION, seqlen_q=1, seqlen_k=1, form="recurrent")
FORWARD = [RETNET, replace(RETNET, causal=True, alignment_bytes=2), DECAY, RETENTION, DECODE]
ALL = [*FORWARD, *(replace(p, direction="backward", form="auto") for p in FORWARD)]


CALLS = [
    pytest.param(problem, way, id=f"{problem.describe()}{way.note}")
    for problem in ALL
    for way in ways_of(problem)
]


class Looking:
    """A kernel that keeps what it is launched with."""

    def __init__(self) -> None:
        self.params: Any = None

    def workspace_bytes(self, params: Any) -> int:
        self.params = params
        return 0


@pytest.mark.parametrize(("problem", "way"), CALLS)
def test_every_output_has_a_truth_that_its_rounding_meets_and_a_zero_does_not(
    problem: Problem, way: Binding
) -> None:
    inputs, shapes = way.inputs(problem, seed=0, device=CPU), way.output_shapes(problem)
    references = {name: (ref, low) for name, ref, low in way.references(problem, inputs)}
    assert references.keys() == shapes.keys()
    for name, (ref, low) in references.items():
        shape, dtype = shapes[name]
        assert tuple(ref.shape) == tuple(low.shape) == shape
        bands = Bands.of(problem, name, ref.dim())
        assert check(ref.to(dtype), ref, low, bands).ok
        if bool(ref.any()):
            assert not check(torch.zeros_like(ref, dtype=dtype), ref, low, bands).ok


@pytest.mark.parametrize(("problem", "way"), CALLS)
def test_params_point_at_every_tensor_and_at_nothing_else(problem: Problem, way: Binding) -> None:
    inputs, shapes = way.inputs(problem, seed=0, device=CPU), way.output_shapes(problem)
    made = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    outputs = Outputs(tensors=made, workspace=workspace_on(TorchDevice(CPU)))
    kernel = Looking()
    bind(kernel, problem, inputs, outputs)  # type: ignore[arg-type]
    tensors = {**inputs.tensors, **outputs.tensors}
    for name in field_names(problem):
        value = getattr(kernel.params, name)
        if hasattr(value, "stride_row"):
            assert (value.data or 0) == (tensors[name].data_ptr() if name in tensors else 0)
        elif name in tensors:
            assert value == tensors[name].data_ptr()
    assert tensors.keys() <= set(field_names(problem))
    for name, number in inputs.scalars.items():
        assert getattr(kernel.params, name) == pytest.approx(number)
    assert kernel.params.batch == problem.batch


def test_rows_of_a_mask_begin_as_the_problem_says_with_nan_between_them() -> None:
    for alignment in (16, 2):
        problem = replace(RETNET, alignment_bytes=alignment)
        mask = ways_of(problem)[0].inputs(problem, seed=0, device=CPU).tensors["mask"]
        assert bool(mask.isfinite().all())
        rows = {(mask.data_ptr() + 2 * mask.stride(1) * row) % 16 for row in range(4)}
        assert (rows == {0}) is (alignment == 16)
    gap = mask.as_strided((mask.stride(1),), (1,), mask.storage_offset())[problem.seqlen_k :]
    assert gap.numel() == 0 or bool(gap.isnan().all())


def test_what_is_timed_is_the_plain_call_and_decoding_carries_states() -> None:
    train = ways_of(RETENTION)[0]
    assert set(train.output_shapes(RETENTION)) == {"o"}
    assert "initial_state" not in train.inputs(RETENTION, seed=0, device=CPU).tensors
    step = ways_of(DECODE)[0]
    assert set(step.output_shapes(DECODE)) == {"o", "final_state"}
    assert "initial_state" in step.inputs(DECODE, seed=0, device=CPU).tensors
    backward = replace(RETENTION, direction="backward")
    assert set(ways_of(backward)[0].output_shapes(backward)) == {"dq", "dk", "dv"}


def test_gammas_go_round_the_edges_and_are_the_usual_ones_otherwise() -> None:
    tensors = gammas_of(log2_gammas(6, CPU, 1))
    expected = torch.tensor([*EDGES[1:], EDGES[0], EDGES[1]], dtype=torch.float64)
    assert torch.allclose(tensors, expected, rtol=1e-6)
    usual = log2_gammas(24, CPU)
    assert bool((usual < 0).all()), "1 - 2^(-5-h) is below 1 for every head"


LIMITED = [
    replace(RETNET, seqlen_q=293, seqlen_k=397, dim_qk=128),
    replace(RETNET, seqlen_q=293, seqlen_k=397, dim_qk=128, causal=True, dtype="bf16"),
    replace(RETNET, batch=1, heads_q=2, heads_kv=1, seqlen_q=1024, seqlen_k=1024, causal=True),
]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("problem", LIMITED, ids=Problem.describe)
def test_rows_lie_at_both_limits_of_r_and_between(problem: Problem, direction: Direction) -> None:
    problem = replace(problem, direction=direction)
    (way,) = (way for way in ways_of(problem) if "at most 4" in way.note)
    inputs = way.inputs(problem, seed=0, device=CPU)
    if direction == "forward":
        r = next(ref for name, ref, _ in way.references(problem, inputs) if name == "r")
    else:
        r = inputs.tensors["r"]
    for rows in (r, r[..., problem.seqlen_q // 2 :]):
        assert 1.7 < rows.median() < 2.3
        assert 0.15 < (rows == 1).float().mean() < 0.35
        assert 0.15 < (rows == 4).float().mean() < 0.35
        assert ((rows > 1) & (rows < 4)).float().mean() > 0.3


def test_rows_at_an_edge_of_r_have_no_gradient() -> None:
    problem = replace(RETNET, direction="backward", causal=True, batch=8)
    way = next(w for w in ways_of(problem) if "to one mask" in w.note)
    dout = way.inputs(problem, seed=0, device=CPU).tensors["dout"]
    silent = (dout == 0).all(-1).float().mean()
    assert 0 < silent < 0.2
