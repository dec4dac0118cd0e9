"""Run one case on one kernel and find every kind of error that the kernel may make.

Inputs lie among NaNs and outputs in storages of a known pattern (:mod:`.guarded_buffers`); the workspace is also full
of NaN, between guards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from attention_autotuner.core.problem import Direction, Op, Problem
from attention_autotuner.operations.bindings import TORCH_DTYPES
from attention_autotuner.reference import Bands, attention, attention_low, check
from attention_autotuner.serving.loader import LoadedKernel
from attention_autotuner.tuning.devices import Guarded
from attention_autotuner.tuning.measure import TorchDevice

from . import gradients
from .cases import Case, Layout
from .guarded_buffers import GuardedBuffer, make_input, make_output
from .launching import launch
from .retention_calls import RetentionBackwardCall, RetentionForwardCall
from .retnet_calls import RetnetBackwardCall, RetnetForwardCall

SEEDS = (0, 1)
FLIPPED: dict[Layout, Layout] = {
    "batch_broadcast": "heads_broadcast",
    "heads_broadcast": "batch_broadcast",
}

Tensors = dict[str, GuardedBuffer]
Reference = tuple[str, torch.Tensor, torch.Tensor]


class HasProblem(Protocol):
    """The part of a case that this module uses."""

    @property
    def problem(self) -> Problem:
        """The problem that the kernel solves."""


class Call(Protocol):
    """Inputs, outputs and references of an operation and direction; tensors by their names in the C ABI."""

    def scalars(self, case: Any) -> Mapping[str, float]:
        """The params that are neither tensors nor sizes, by their names in the C ABI."""

    def inputs(self, case: Any, *, seed: int, device: torch.device) -> Tensors:
        """The tensors that the kernel reads."""

    def outputs(self, case: Any, device: torch.device) -> Tensors:
        """The tensors that the kernel writes, poisoned."""

    def references(self, case: Any, inputs: Mapping[str, torch.Tensor]) -> Iterator[Reference]:
        """Name, reference and low-precision result (the formula in the input dtype) of every output."""


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
    """Inputs, outputs and references of attention forward: o and, where the case wants it, lse."""

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

    def references(self, case: Case, inputs: Mapping[str, torch.Tensor]) -> Iterator[Reference]:
        """See :meth:`Call.references`."""
        read = (inputs["q"], inputs["k"], inputs["v"])
        o_ref, lse_ref = attention(*read, **case.options)
        o_low, lse_low = attention_low(*read, **case.options)
        yield "o", o_ref, o_low
        if case.lse:
            width = gradients.rounding_of_lse(case, inputs, lse_ref)
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
    """The inputs, outputs and references of a case."""
    return CALLS[case.problem.op, case.problem.direction]


class Run:
    """One launch: its outputs and its workspace.

    Args:
        kernel: the prepared kernel.
        case: the case to run.
        inputs: the tensors that the kernel reads.
        device: the device of all tensors.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        case: HasProblem,
        inputs: Mapping[str, GuardedBuffer],
        device: torch.device,
    ) -> None:
        call = call_of(case)
        self.written = call.outputs(case, device)
        self._workspace = Guarded(TorchDevice(device), {})
        tensors = {name: buffer.view for name, buffer in (*inputs.items(), *self.written.items())}
        launch(kernel, case.problem, tensors, call.scalars(case), self._workspace)

    def leaks(self) -> Iterator[str]:
        """Descriptions of writes outside the outputs."""
        for name, buffer in self.written.items():
            if not buffer.intact():
                yield f"wrote beside {name}"
        if self._workspace.changed():
            yield "wrote beside the workspace"


def errors_of(
    kernel: LoadedKernel,
    case: HasProblem,
    *,
    seed: int,
    device: torch.device,
    deterministic: bool = True,
    repeats: int = 2,
) -> list[str]:
    """The errors of a kernel on a case; empty when everything is right.

    Args:
        kernel: the kernel, prepared on the device.
        case: the case to run.
        seed: seed of the inputs.
        device: the device to run on; the CPU for kernels that run on the host.
        deterministic: all runs must agree bit for bit; otherwise each is compared with the reference.
        repeats: number of runs.
    """
    call = call_of(case)
    inputs = call.inputs(case, seed=seed, device=device)
    views = {name: buffer.view for name, buffer in inputs.items()}
    references = list(call.references(case, views))
    return errors_on(
        kernel,
        case,
        inputs,
        references,
        device=device,
        deterministic=deterministic,
        repeats=repeats,
    )


def errors_on(
    kernel: LoadedKernel,
    case: HasProblem,
    inputs: Mapping[str, GuardedBuffer],
    references: Sequence[Reference],
    *,
    device: torch.device,
    deterministic: bool = True,
    repeats: int = 2,
) -> list[str]:
    """As :func:`errors_of`, on existing inputs with known references."""
    before = {name: buffer.bits.clone() for name, buffer in inputs.items()}
    runs = [Run(kernel, case, inputs, device) for _ in range(repeats)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    errors = [
        f"{name} was changed"
        for name, buffer in inputs.items()
        if not torch.equal(buffer.bits, before[name])
    ]
    for number, run in enumerate(runs):
        errors += [f"run {number} {leak}" for leak in run.leaks()]
    if deterministic:
        pairs = ((runs[0], run) for run in runs[1:])
        errors += [
            f"two runs differ in {name}"
            for first, second in pairs
            for name in _differing(first, second)
        ]
    for name, ref, low in references:
        bands = Bands.of(case.problem, name, ref.dim())
        for run in runs[:1] if deterministic else runs:
            comparison = check(run.written[name].view, ref, low, bands)
            if not comparison.ok:
                errors.append(f"{name}: {comparison.reason}")
    return errors


def _differing(first: Run, second: Run) -> Iterator[str]:
    for name, buffer in first.written.items():
        if not torch.equal(buffer.bits, second.written[name].bits):
            yield name
