"""Retention with decay on hundreds of shapes: three forms, which must agree, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import DType, Form
from attention_autotuner.errors import ArtifactError
from attention_autotuner.reference import Bands, check
from attention_autotuner.tuning.devices import Guarded
from attention_autotuner.tuning.measure import TorchDevice
from tests.numerics import harness, large_offsets, retention_cases
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.launching import launch
from tests.numerics.retention_cases import LONGEST, RETENTION_FORMS, RetentionCase

pytestmark = pytest.mark.gpu

CASES = retention_cases.make_cases()
MAX_BUILDS = 4 * len(retention_cases.GROUPS)
BASE = next(case for case in CASES if case.problem.dim_qk == 64 and case.problem.dim_v == 64)
PLAIN = replace(
    BASE,
    problem=replace(
        BASE.problem, batch=2, heads_q=2, heads_kv=2, seqlen_q=40, seqlen_k=40, dim_qk=64, dim_v=64
    ),
    inputs="dense",
    output="dense",
    gradient="dense",
    initial=False,
    final=False,
    dgamma=False,
)
WHOLE = replace(
    PLAIN,
    problem=replace(PLAIN.problem, heads_q=8, heads_kv=4, seqlen_q=300, seqlen_k=300),
    gammas="mixed",
    initial=True,
    final=True,
    dgamma=True,
)
# The states of super-chunks are computed first; that pass also fills every stage of shared memory several times.
MANY_CHUNKS = replace(
    PLAIN.problem,
    form="chunkwise",
    heads_q=8,
    heads_kv=8,
    seqlen_q=8192,
    seqlen_k=8192,
)
SPLITS = (1, 63, 64, 65, 128, 200, 299)

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Halves:
    """A sequence cut in two, with one form for each half."""

    at: int
    first: Form
    second: Form

    def kernels_of(self, present: Policy) -> list[Candidate]:
        """The kernels of all forms and of the backward pass."""
        return WHOLE.kernels_of(present)


# Not every split with every pair of forms: every split and every pair of forms occurs.
HALVES = [
    Halves(at=at, first=RETENTION_FORMS[(n + m) % 3], second=RETENTION_FORMS[(n + 2 * m) % 3])
    for n, at in enumerate(SPLITS)
    for m in range(3)
]


def test_few_builds_serve_all_shapes(pool: KernelPool) -> None:
    assert len({case.problem for case in CASES}) >= 150
    assert len(retention_cases.builds(CASES, pool.present)) <= MAX_BUILDS


def verify_forms(pool: KernelPool, case: RetentionCase, seed: int, device: torch.device) -> None:
    """Compare all forms with the reference and with each other, both by the error rule."""
    call = harness.CALLS["retention", "forward"]
    inputs = call.inputs(case, seed=seed, device=device)
    views = {name: buffer.view for name, buffer in inputs.items()}
    references = list(call.references(case, views))
    runs: dict[Form, harness.Run] = {}
    for form in RETENTION_FORMS:
        of_form = case.forward(form)
        candidate = of_form.candidate(pool.present)
        assert candidate.form == form
        kernel = pool.kernel(candidate)
        errors = harness.errors_on(kernel, of_form, inputs, references, device=device)
        assert errors == [], candidate.name
        runs[form] = harness.Run(kernel, of_form, inputs, device)
    for form, other in zip(RETENTION_FORMS, RETENTION_FORMS[1:] + RETENTION_FORMS[:1], strict=True):
        for name, ref, low in references:
            a, b = runs[form].written[name].view, runs[other].written[name].view
            bands = Bands.of(case.problem, name, ref.dim())
            comparison = check(a, b.to(ref.dtype), low, bands)
            assert comparison.ok, f"{name}, {form} against {other}: {comparison.reason}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shape(pool: KernelPool, case: RetentionCase, device: torch.device) -> None:
    backward = case.backward()
    candidate = backward.candidate(pool.present)
    assert candidate.deterministic
    for seed in harness.SEEDS:
        verify_forms(pool, case, seed, device)
        kernel = pool.kernel(candidate)
        assert harness.errors_of(kernel, backward, seed=seed, device=device) == [], candidate.name


@pytest.mark.parametrize("gamma", [1.0, 1 - 2**-12, "default"])
@pytest.mark.parametrize("case", [LONGEST], ids=["s65536"])
def test_64k_tokens_whose_states_outgrow_fp16(
    pool: KernelPool, case: RetentionCase, gamma: float, device: torch.device
) -> None:
    case = replace(case, gammas=gamma)
    verify_forms(pool, case, 0, device)
    backward = case.backward()
    kernel = pool.kernel(backward.candidate(pool.present))
    assert harness.errors_of(kernel, backward, seed=0, device=device) == []


@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 64), ("fp16", 128)])
def test_tiles_are_not_overwritten_while_they_are_read(
    pool: KernelPool, dtype: DType, dim: int, device: torch.device
) -> None:
    problem = replace(MANY_CHUNKS, dtype=dtype, dim_qk=dim, dim_v=dim)
    case = replace(PLAIN, problem=problem, like=retention_cases.FEW, gammas=1 - 2**-12)
    candidate = case.candidate(pool.present)
    assert candidate.config["knobs"]["super_chunk"] < problem.seqlen_q // 2
    kernel = pool.kernel(candidate)
    for seed in harness.SEEDS:
        assert harness.errors_of(kernel, case, seed=seed, device=device, repeats=6) == [], (
            candidate.name
        )


def cut(case: RetentionCase, part: slice) -> RetentionCase:
    length = len(range(WHOLE.problem.seqlen_q)[part])
    return replace(case, problem=replace(case.problem, seqlen_q=length, seqlen_k=length))


def run(
    pool: KernelPool, case: RetentionCase, inputs: Tensors, device: torch.device
) -> dict[str, torch.Tensor]:
    """The outputs of one launch."""
    call = harness.call_of(case)
    kernel = pool.kernel(case.candidate(pool.present))
    written = {name: buffer.view for name, buffer in call.outputs(case, device).items()}
    workspace = Guarded(TorchDevice(device), {})
    launch(kernel, case.problem, {**inputs, **written}, call.scalars(case), workspace)
    torch.cuda.synchronize(device)
    assert workspace.changed() == []
    return written


def tokens(inputs: Tensors, part: slice) -> dict[str, torch.Tensor]:
    rows = ("q", "k", "v", "dout")
    return {name: x[:, :, part] if name in rows else x for name, x in inputs.items()}


def assert_right(outputs: Tensors, case: RetentionCase, inputs: Tensors) -> None:
    for name, ref, low in harness.call_of(case).references(case, inputs):
        comparison = check(outputs[name], ref, low, Bands.of(case.problem, name, ref.dim()))
        assert comparison.ok, f"{name}: {comparison.reason}"


@pytest.mark.parametrize("halves", HALVES, ids=lambda h: f"{h.at}-{h.first}-{h.second}")
def test_a_sequence_may_be_split_anywhere_and_its_state_carried(
    pool: KernelPool, halves: Halves, device: torch.device
) -> None:
    buffer = harness.CALLS["retention", "backward"].inputs(WHOLE.backward(), seed=3, device=device)
    everything = {name: buffer.view for name, buffer in buffer.items()}
    inputs = {x: everything[x] for x in ("q", "k", "v", "log2_gamma", "initial_state")}
    early, late = slice(0, halves.at), slice(halves.at, None)
    early_outputs = run(
        pool, cut(WHOLE.forward(halves.first), early), tokens(inputs, early), device
    )
    carried = early_outputs["final_state"]
    rest = tokens(inputs, late) | {"initial_state": carried}
    late_outputs = run(pool, cut(WHOLE.forward(halves.second), late), rest, device)
    joined = {
        "o": torch.cat((early_outputs["o"], late_outputs["o"]), dim=2),
        "final_state": late_outputs["final_state"],
    }
    assert_right(joined, WHOLE, inputs)

    whole = WHOLE.backward()
    rest = tokens(everything, late) | {"initial_state": carried}
    late_outputs = run(pool, cut(whole, late), rest, device)
    first = tokens(everything, early) | {"dfinal_state": late_outputs["dinitial_state"]}
    early_outputs = run(pool, cut(whole, early), first, device)
    joined = {
        name: torch.cat((early_outputs[name], late_outputs[name]), dim=2)
        for name in ("dq", "dk", "dv")
    } | {
        "dinitial_state": early_outputs["dinitial_state"],
        "dlog2_gamma": early_outputs["dlog2_gamma"] + late_outputs["dlog2_gamma"],
    }
    assert_right(joined, whole, everything)


@pytest.mark.parametrize(
    "case", [WHOLE.forward(form) for form in RETENTION_FORMS], ids=RETENTION_FORMS
)
def test_a_state_may_be_updated_in_place(
    pool: KernelPool, case: RetentionCase, device: torch.device
) -> None:
    call = harness.call_of(case)
    inputs = {x: h.view for x, h in call.inputs(case, seed=0, device=device).items()}
    expected = run(pool, case, inputs, device)
    written = {name: buffer.view for name, buffer in call.outputs(case, device).items()}
    state = inputs["initial_state"].clone()
    tensors = {**inputs, **written, "initial_state": state, "final_state": state}
    kernel = pool.kernel(case.candidate(pool.present))
    workspace = Guarded(TorchDevice(device), {})
    launch(kernel, case.problem, tensors, call.scalars(case), workspace)
    torch.cuda.synchronize(device)
    assert torch.equal(state, expected["final_state"])
    assert torch.equal(written["o"], expected["o"])


FAR: dict[str, RetentionCase] = {
    **{str(form): PLAIN.forward(form) for form in RETENTION_FORMS},
    "backward": PLAIN.backward(),
}


@pytest.mark.parametrize("axis", large_offsets.STRIDES)
@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
def test_offsets_beyond_32_bits(
    pool: KernelPool, case: RetentionCase, axis: str, device: torch.device
) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    assert large_offsets.errors_of(kernel, case, axis, device) == []


@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
def test_a_kernel_refuses_unsupported_tensors(
    pool: KernelPool, case: RetentionCase, device: torch.device
) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    with pytest.raises(ArtifactError, match="copy width"):
        harness.errors_of(kernel, replace(case, inputs="unaligned"), seed=0, device=device)
    wider = replace(case, problem=replace(case.problem, dim_v=80))
    with pytest.raises(ArtifactError, match="outside what this kernel was compiled for"):
        harness.errors_of(kernel, wider, seed=0, device=device)
