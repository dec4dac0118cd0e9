"""Retention with decay on hundreds of shapes: three forms that agree, and their gradients; see ``tests/numerics``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import DType, Form
from attention_autotuner.errors import ArtifactError
from attention_autotuner.operations.shared.tensors import PoisonedWorkspace
from attention_autotuner.reference import Bands, check
from tests.numerics import far, harness, retention_cases
from tests.numerics.launching import launch
from tests.numerics.retention_cases import LONGEST, RETENTION_FORMS, RetentionCase
from tests.numerics.workshop import Workshop

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
# States of super-chunks come first, and every stage of shared memory is filled several times there, too.
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
    """A sequence cut in two, each part in a form of its own."""

    at: int
    first: Form
    second: Form

    def kernels_of(self, present: Policy) -> list[Candidate]:
        """The kernels of all forms and of the backward pass."""
        return WHOLE.kernels_of(present)


# Every split with every pair of forms would say little more than each split with some and each pair at some.
HALVES = [
    Halves(at=at, first=RETENTION_FORMS[(n + m) % 3], second=RETENTION_FORMS[(n + 2 * m) % 3])
    for n, at in enumerate(SPLITS)
    for m in range(3)
]


def test_few_builds_serve_all_shapes(workshop: Workshop) -> None:
    assert len({case.problem for case in CASES}) >= 150
    assert len(retention_cases.builds(CASES, workshop.present)) <= MAX_BUILDS


def judge_forms(workshop: Workshop, case: RetentionCase, seed: int, device: torch.device) -> None:
    """All forms against the truth, and against each other, by the rule for both."""
    call = harness.CALLS["retention", "forward"]
    given = call.inputs(case, seed=seed, device=device)
    views = {name: held.view for name, held in given.items()}
    truths = list(call.truths(case, views))
    found: dict[Form, harness.Run] = {}
    for form in RETENTION_FORMS:
        of_form = case.forward(form)
        one = of_form.candidate(workshop.present)
        assert one.form == form
        kernel = workshop.kernel(one)
        wrong = harness.judge_on(kernel, of_form, given, truths, device=device)
        assert wrong == [], one.name
        found[form] = harness.Run(kernel, of_form, given, device)
    for one_form, other in zip(
        RETENTION_FORMS, RETENTION_FORMS[1:] + RETENTION_FORMS[:1], strict=True
    ):
        for name, ref, low in truths:
            a, b = (found[form].written[name].view for form in (one_form, other))
            bands = Bands.of(case.problem, name, ref.dim())
            verdict = check(a, b.to(ref.dtype), low, bands)
            assert verdict.ok, f"{name}, {one_form} against {other}: {verdict.reason}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shape(workshop: Workshop, case: RetentionCase, device: torch.device) -> None:
    backward = case.backward()
    one = backward.candidate(workshop.present)
    assert one.deterministic
    for seed in harness.SEEDS:
        judge_forms(workshop, case, seed, device)
        kernel = workshop.kernel(one)
        assert harness.judge(kernel, backward, seed=seed, device=device) == [], one.name


@pytest.mark.parametrize("gamma", [1.0, 1 - 2**-12, "default"])
@pytest.mark.parametrize("case", [LONGEST], ids=["s65536"])
def test_64k_tokens_whose_states_outgrow_fp16(
    workshop: Workshop, case: RetentionCase, gamma: float, device: torch.device
) -> None:
    case = replace(case, gammas=gamma)
    judge_forms(workshop, case, 0, device)
    backward = case.backward()
    kernel = workshop.kernel(backward.candidate(workshop.present))
    assert harness.judge(kernel, backward, seed=0, device=device) == []


@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 64), ("fp16", 128)])
def test_tiles_are_not_overwritten_while_they_are_read(
    workshop: Workshop, dtype: DType, dim: int, device: torch.device
) -> None:
    problem = replace(MANY_CHUNKS, dtype=dtype, dim_qk=dim, dim_v=dim)
    case = replace(PLAIN, problem=problem, like=retention_cases.FEW, gammas=1 - 2**-12)
    one = case.candidate(workshop.present)
    assert one.config["knobs"]["super_chunk"] < problem.seqlen_q // 2
    kernel = workshop.kernel(one)
    for seed in harness.SEEDS:
        assert harness.judge(kernel, case, seed=seed, device=device, repeats=6) == [], one.name


def cut(case: RetentionCase, part: slice) -> RetentionCase:
    length = len(range(WHOLE.problem.seqlen_q)[part])
    return replace(case, problem=replace(case.problem, seqlen_q=length, seqlen_k=length))


def run(
    workshop: Workshop, case: RetentionCase, given: Tensors, device: torch.device
) -> dict[str, torch.Tensor]:
    """One launch on given tensors; the outputs."""
    call = harness.call_of(case)
    kernel = workshop.kernel(case.candidate(workshop.present))
    written = {name: held.view for name, held in call.outputs(case, device).items()}
    workspace = PoisonedWorkspace(device)
    launch(kernel, case.problem, {**given, **written}, call.scalars(case), workspace)
    torch.cuda.synchronize(device)
    assert workspace.intact()
    return written


def tokens(given: Tensors, part: slice) -> dict[str, torch.Tensor]:
    rows = ("q", "k", "v", "dout")
    return {name: x[:, :, part] if name in rows else x for name, x in given.items()}


def assert_right(found: Tensors, case: RetentionCase, given: Tensors) -> None:
    for name, ref, low in harness.call_of(case).truths(case, given):
        verdict = check(found[name], ref, low, Bands.of(case.problem, name, ref.dim()))
        assert verdict.ok, f"{name}: {verdict.reason}"


@pytest.mark.parametrize("halves", HALVES, ids=lambda h: f"{h.at}-{h.first}-{h.second}")
def test_a_sequence_may_be_split_anywhere_and_its_state_carried(
    workshop: Workshop, halves: Halves, device: torch.device
) -> None:
    held = harness.CALLS["retention", "backward"].inputs(WHOLE.backward(), seed=3, device=device)
    everything = {name: each.view for name, each in held.items()}
    given = {x: everything[x] for x in ("q", "k", "v", "log2_gamma", "initial_state")}
    early, late = slice(0, halves.at), slice(halves.at, None)
    one = run(workshop, cut(WHOLE.forward(halves.first), early), tokens(given, early), device)
    carried = one["final_state"]
    rest = tokens(given, late) | {"initial_state": carried}
    two = run(workshop, cut(WHOLE.forward(halves.second), late), rest, device)
    joined = {"o": torch.cat((one["o"], two["o"]), dim=2), "final_state": two["final_state"]}
    assert_right(joined, WHOLE, given)

    whole = WHOLE.backward()
    rest = tokens(everything, late) | {"initial_state": carried}
    two = run(workshop, cut(whole, late), rest, device)
    first = tokens(everything, early) | {"dfinal_state": two["dinitial_state"]}
    one = run(workshop, cut(whole, early), first, device)
    joined = {name: torch.cat((one[name], two[name]), dim=2) for name in ("dq", "dk", "dv")} | {
        "dinitial_state": one["dinitial_state"],
        "dlog2_gamma": one["dlog2_gamma"] + two["dlog2_gamma"],
    }
    assert_right(joined, whole, everything)


@pytest.mark.parametrize(
    "case", [WHOLE.forward(form) for form in RETENTION_FORMS], ids=RETENTION_FORMS
)
def test_a_state_may_be_updated_in_place(
    workshop: Workshop, case: RetentionCase, device: torch.device
) -> None:
    call = harness.call_of(case)
    given = {x: h.view for x, h in call.inputs(case, seed=0, device=device).items()}
    expected = run(workshop, case, given, device)
    written = {name: held.view for name, held in call.outputs(case, device).items()}
    state = given["initial_state"].clone()
    tensors = {**given, **written, "initial_state": state, "final_state": state}
    kernel = workshop.kernel(case.candidate(workshop.present))
    workspace = PoisonedWorkspace(device)
    launch(kernel, case.problem, tensors, call.scalars(case), workspace)
    torch.cuda.synchronize(device)
    assert torch.equal(state, expected["final_state"])
    assert torch.equal(written["o"], expected["o"])


FAR: dict[str, RetentionCase] = {
    **{str(form): PLAIN.forward(form) for form in RETENTION_FORMS},
    "backward": PLAIN.backward(),
}


@pytest.mark.parametrize("axis", far.STRIDES)
@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
def test_offsets_beyond_32_bits(
    workshop: Workshop, case: RetentionCase, axis: str, device: torch.device
) -> None:
    kernel = workshop.kernel(case.candidate(workshop.present))
    assert far.judge(kernel, case, axis, device) == []


@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
def test_a_kernel_refuses_what_it_cannot_read(
    workshop: Workshop, case: RetentionCase, device: torch.device
) -> None:
    kernel = workshop.kernel(case.candidate(workshop.present))
    with pytest.raises(ArtifactError, match="copy width"):
        harness.judge(kernel, replace(case, inputs="unaligned"), seed=0, device=device)
    wider = replace(case, problem=replace(case.problem, dim_v=80))
    with pytest.raises(ArtifactError, match="outside what this kernel was compiled for"):
        harness.judge(kernel, wider, seed=0, device=device)
