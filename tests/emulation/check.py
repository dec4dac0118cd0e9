"""The project's own check of a kernel, on the emulated machine and on small problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from attention_autotuner.core.outcome import Ok, Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.attention.inputs import AttentionForward
from attention_autotuner.operations.bindings import Binding, Reference, ways_of
from attention_autotuner.operations.shared.launching import bind
from attention_autotuner.operations.shared.tensors import Inputs, Shapes
from attention_autotuner.serving.loader import LoadedKernel
from attention_autotuner.tuning import remote, tasks, verify
from tests.launchers import launcher

from .build import Range, configure, put_ahead

CPU = torch.device("cpu")
RUNS: tuple[tuple[str, int], ...] = (("lazy", 0), ("eager", 0), ("random", 1))
"""Policies and seeds of the machine."""

GROWING = (AttentionForward(growing=True),)
"""The way to call attention that meets new maxima to the end of a loop."""

Adjust = Callable[[Inputs], tuple[Inputs, Inputs]]
"""From inputs to those of the launch and those of the reference."""


def uneven_levels(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Rows of retnet whose P leaves the range of fp16, of 128 keys in one half of them alone, at first or later."""
    mask = inputs.tensors["mask"]
    for rows, keys in ((slice(0, None, 3), slice(64, 128)), (slice(1, None, 3), slice(0, 64))):
        mask[:, rows, :128] *= 4000
        mask[:, rows, keys] *= 8
    mask[:, 5:90:7, 128:192] *= 60000
    mask.clamp_(-60000, 60000)
    return inputs, inputs


def scaled(inputs: Inputs, *, sign: float) -> tuple[Inputs, Inputs]:
    """The scale of attention times a sign or zero, which a reference finds in the queries."""
    scale = sign * inputs.q.shape[-1] ** -0.5
    queries = {**inputs.tensors, "q": inputs.q * sign}
    return replace(inputs, scalars={**inputs.scalars, "softmax_scale": scale}), replace(
        inputs, tensors=queries
    )


class _AdjustedWay:
    """A way to call a kernel whose inputs are adjusted."""

    def __init__(self, way: Binding, adjust: Adjust) -> None:
        self._way = way
        self._adjust = adjust
        self._referenced: Inputs | None = None
        self.note = way.note

    def inputs(self, problem: Problem, *, seed: int, device: torch.device) -> Inputs:
        made, self._referenced = self._adjust(self._way.inputs(problem, seed=seed, device=device))
        return made

    def output_shapes(self, problem: Problem) -> Shapes:
        return self._way.output_shapes(problem)

    def references(self, problem: Problem, inputs: Inputs) -> Iterator[Reference]:
        assert self._referenced is not None
        return self._way.references(problem, self._referenced)


def _adjusted_ways(
    problem: Problem, adjust: Adjust, ways: tuple[Binding, ...]
) -> tuple[_AdjustedWay, ...]:
    return tuple(_AdjustedWay(way, adjust) for way in ways or ways_of(problem))


def _ranges(buffers: Iterable[torch.Tensor]) -> list[Range]:
    return [Range(x.data_ptr(), x.numel()) for x in buffers if x.numel()]


def bind_behind_another(
    kernel: Any, problem: Problem, inputs: Any, outputs: Any
) -> Callable[[], None]:
    """A function as ``bind`` gives it, whose launch has that of somebody else ahead of it in the stream."""
    launch = bind(kernel, problem, inputs, outputs)
    read = _ranges(array.memory for array in inputs.tensors.values())
    written = _ranges(outputs.workspace.buffers())

    def call() -> None:
        put_ahead(kernel, read, written)
        launch()

    return call


class _LaunchedOnce(verify.Launcher):
    """A kernel whose second launch, which a policy without chance would repeat step by step, is taken for granted."""

    def __init__(self, kernel: verify.Launcher) -> None:
        self.info, self.gpu_name, self.num_sms = kernel.info, kernel.gpu_name, kernel.num_sms
        self._kernel = kernel

    def launch(self, problem: Problem, inputs: Inputs, shapes: Shapes) -> verify.Launched | Outcome:
        with mock.patch.object(remote, "REPEATS", 1):
            launched = self._kernel.launch(problem, inputs, shapes)
        if isinstance(launched, Outcome):
            return launched
        return replace(launched, outputs=[*launched.outputs] * verify.REPEATS)


def check(
    kernel: LoadedKernel,
    problems: Sequence[Problem],
    runs: Iterable[tuple[str, int]] = RUNS,
    *,
    adjust: Adjust = lambda inputs: (inputs, inputs),
    ways: tuple[Binding, ...] = (),
    deterministic: bool = True,
    mutant: str = "",
    multiprocessors: int = 2,
) -> Outcome:
    """Verify a kernel for problems, each under every policy; the first outcome that is not Ok, or Ok.

    It is called in the ways given, or in those of its operation.
    """
    adjusted = partial(_adjusted_ways, adjust=adjust, ways=ways)
    launched: verify.Launcher = launcher(kernel, CPU)
    for policy, seed in runs:
        configure(kernel, policy, seed, multiprocessors=multiprocessors, mutant=mutant)
        with (
            mock.patch.multiple(verify, variants=lambda *_, **__: problems, ways_of=adjusted),
            mock.patch.object(tasks, "bind", bind_behind_another),
        ):
            outcome = verify.verify(
                problems[0],
                launched if policy == "random" else _LaunchedOnce(launched),
                deterministic=deterministic,
                seeds=(seed,),
                device=CPU,
            )
        if not outcome.ok:
            return outcome
    return Ok()
