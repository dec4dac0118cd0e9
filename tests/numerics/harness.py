"""Runs one case on one kernel and judges everything that the kernel may get wrong.

Inputs lie among NaNs and outputs in storages of a known pattern (:mod:`.storage`); the workspace is full of NaN, too,
between guards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from attention_autotuner.core.problem import Direction, Op, Problem
from attention_autotuner.operations.bindings import TORCH_DTYPES
from attention_autotuner.operations.shared.tensors import PoisonedWorkspace
from attention_autotuner.reference import Bands, attention, attention_low, check
from attention_autotuner.serving.loader import LoadedKernel

from . import gradients
from .cases import Case, Layout
from .launching import launch
from .retention_calls import RetentionBackwardCall, RetentionForwardCall
from .retnet_calls import RetnetBackwardCall, RetnetForwardCall
from .storage import Held, make_input, make_output

SEEDS = (0, 1)
FLIPPED: dict[Layout, Layout] = {
    "batch_broadcast": "heads_broadcast",
    "heads_broadcast": "batch_broadcast",
}

Tensors = dict[str, Held]
Truth = tuple[str, torch.Tensor, torch.Tensor]


class HasProblem(Protocol):
    """A case, as far as this module looks into it."""

    @property
    def problem(self) -> Problem:
        """What is computed."""


class Call(Protocol):
    """What a direction's kernels read, write and should have written; tensors by their names in the C ABI."""

    def scalars(self, case: Any) -> Mapping[str, float]:
        """The params that are neither tensors nor sizes, by their names in the C ABI."""

    def inputs(self, case: Any, *, seed: int, device: torch.device) -> Tensors:
        """Everything that is read."""

    def outputs(self, case: Any, device: torch.device) -> Tensors:
        """Everything that is written, poisoned."""

    def truths(self, case: Any, given: Mapping[str, torch.Tensor]) -> Iterator[Truth]:
        """Name, truth and the formula in the input dtype, of every output."""


def make_inputs(case: Case, generator: torch.Generator) -> Tensors:
    """q, k and v; q is broadcast over the other axis than k and v, so that outputs stay varied."""
    p, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
    layout_q = FLIPPED.get(case.inputs, case.inputs)
    shape_k = (p.batch, p.heads_kv, p.seqlen_k, p.dim_qk)
    shape_v = (p.batch, p.heads_kv, p.seqlen_k, p.dim_v)
    return {
        "q": make_input((p.batch, p.heads_q, p.seqlen_q, p.dim_qk), layout_q, dtype, generator),
        "k": make_input(shape_k, case.inputs, dtype, generator),
        "v": make_input(shape_v, case.inputs, dtype, generator),
    }


class ForwardCall:
    """o and, where it is wanted, lse."""

    def scalars(self, case: Case) -> Mapping[str, float]:
        """See :meth:`Call.scalars`."""
        return gradients.scalars_of(case)

    def inputs(self, case: Case, *, seed: int, device: torch.device) -> Tensors:
        """See :meth:`Call.inputs`."""
        return make_inputs(case, torch.Generator(device=device).manual_seed(seed))

    def outputs(self, case: Case, device: torch.device) -> Tensors:
        """See :meth:`Call.outputs`; lse has a last axis of one element."""
        p = case.problem
        rows = (p.batch, p.heads_q, p.seqlen_q)
        made = {"o": make_output((*rows, p.dim_v), case.output, TORCH_DTYPES[p.dtype], device)}
        if case.lse:
            made["lse"] = make_output((*rows, 1), "dense", torch.float32, device)
        return made

    def truths(self, case: Case, given: Mapping[str, torch.Tensor]) -> Iterator[Truth]:
        """See :meth:`Call.truths`."""
        read = (given["q"], given["k"], given["v"])
        o_ref, lse_ref = attention(*read, **case.options)
        o_low, lse_low = attention_low(*read, **case.options)
        yield "o", o_ref, o_low
        if case.lse:
            width = gradients.rounding_of_lse(case, given, lse_ref)
            lse_low = lse_low + torch.copysign(width, lse_low - lse_ref)
            yield "lse", lse_ref[..., None], lse_low[..., None]


CALLS: dict[tuple[Op, Direction], Call] = {
    ("attention", "forward"): ForwardCall(),
    ("attention", "backward"): gradients.BackwardCall(make_inputs),
    ("retnet", "forward"): RetnetForwardCall(),
    ("retnet", "backward"): RetnetBackwardCall(),
    ("retention", "forward"): RetentionForwardCall(),
    ("retention", "backward"): RetentionBackwardCall(),
}


def call_of(case: HasProblem) -> Call:
    """How a case's kernels are called."""
    return CALLS[case.problem.op, case.problem.direction]


class Run:
    """One launch: its outputs and its workspace.

    Args:
        kernel: prepared.
        case: what to run.
        given: what is read.
        device: where.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        case: HasProblem,
        given: Mapping[str, Held],
        device: torch.device,
    ) -> None:
        call = call_of(case)
        self.written = call.outputs(case, device)
        self._workspace = PoisonedWorkspace(device)
        tensors = {name: held.view for name, held in (*given.items(), *self.written.items())}
        launch(kernel, case.problem, tensors, call.scalars(case), self._workspace)

    def leaks(self) -> Iterator[str]:
        """What else than the outputs was written."""
        for name, held in self.written.items():
            if not held.intact():
                yield f"wrote beside {name}"
        if not self._workspace.intact():
            yield "wrote beside the workspace"


def judge(
    kernel: LoadedKernel,
    case: HasProblem,
    *,
    seed: int,
    device: torch.device,
    deterministic: bool = True,
    repeats: int = 2,
) -> list[str]:
    """What is wrong with a kernel on a case; nothing when all is right.

    Args:
        kernel: prepared on the device.
        case: what to run.
        seed: of the inputs.
        device: where; the CPU for kernels that run on the host.
        deterministic: whether all runs must agree bit for bit; otherwise each is held against the truth.
        repeats: how many runs.
    """
    call = call_of(case)
    given = call.inputs(case, seed=seed, device=device)
    views = {name: held.view for name, held in given.items()}
    truths = list(call.truths(case, views))
    return judge_on(
        kernel, case, given, truths, device=device, deterministic=deterministic, repeats=repeats
    )


def judge_on(
    kernel: LoadedKernel,
    case: HasProblem,
    given: Mapping[str, Held],
    truths: Sequence[Truth],
    *,
    device: torch.device,
    deterministic: bool = True,
    repeats: int = 2,
) -> list[str]:
    """As :func:`judge`, on inputs at hand, whose truths are known."""
    before = {name: held.bits.clone() for name, held in given.items()}
    runs = [Run(kernel, case, given, device) for _ in range(repeats)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wrong = [
        f"{name} was changed"
        for name, held in given.items()
        if not torch.equal(held.bits, before[name])
    ]
    for number, run in enumerate(runs):
        wrong += [f"run {number} {leak}" for leak in run.leaks()]
    if deterministic:
        pairs = ((runs[0], run) for run in runs[1:])
        wrong += [
            f"two runs differ in {name}" for one, other in pairs for name in _differing(one, other)
        ]
    for name, ref, low in truths:
        bands = Bands.of(case.problem, name, ref.dim())
        for run in runs[:1] if deterministic else runs:
            verdict = check(run.written[name].view, ref, low, bands)
            if not verdict.ok:
                wrong.append(f"{name}: {verdict.reason}")
    return wrong


def _differing(one: Run, other: Run) -> Iterator[str]:
    for name, held in one.written.items():
        if not torch.equal(held.bits, other.written[name].bits):
            yield name
