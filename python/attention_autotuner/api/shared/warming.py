"""Kernels made ready ahead of time: for the problems of a file, or for those that a model's call turns out to have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ... import settings
from ...arch import naming
from ...arch.naming import DeviceType
from ...arch.probe import probe
from ...arch.resolution import native_arch
from ...codegen.obtain import build_ahead
from ...core.problem import Problem
from ...errors import UnsupportedArchitectureError, UnsupportedArgumentError
from ...serving import dispatch, pinning
from ...serving.untuned import read_problems
from . import checks, launch, planning
from .planning import Asked


def warmup(
    target: Callable[..., Any] | str | Path,
    *inputs: Any,
    backward: bool = False,
    device_type: DeviceType | None = None,
) -> tuple[Problem, ...]:
    """Make ready what a program will call: kernels are built, several at once, loaded and prepared, as calls decide.

    A callable, such as a model, is called once, with the calls of attention and retention inside giving zeros: their
    problems are noted, nothing is computed by them, so that it must not act on what they give. Calls on the CPU need
    no kernel, and calls under settings that the callable changes itself are computed. Where mode is ``tune``, what
    nobody measured is tuned.

    Args:
        target: a callable, or a file of problems, as ``UNTUNED_LOG`` writes it.
        inputs: of the callable.
        backward: differentiate what it returns, too, by its inputs and all parameters that it depends on; their
            ``grad`` stays as it is.
        device_type: of a file: for which GPU; None is the present one.

    Returns:
        The problems, each once, in the order of the calls.

    Raises:
        UnsupportedArgumentError: a file has inputs or a backward pass, or a callable a device type; the target is
            neither; nothing that the callable returns has a gradient for a backward pass.
        OSError: the file cannot be read.
        ProblemFileError: the file holds something else than problems.
        UnsupportedArchitectureError: there is no GPU.
        NoCandidateError, UntunedError, ToolchainError, StoreError, BuildError, ArtifactError: as a call.
    """
    if callable(target):
        if device_type is not None:
            raise UnsupportedArgumentError(
                "device_type is of a file: a callable's calls say theirs"
            )
        wanted = _recorded(target, inputs, backward=backward)
    else:
        if not isinstance(target, (str, Path)):
            raise UnsupportedArgumentError(
                f"target must be a callable or the path of a file, got {type(target).__name__} {target!r}"
            )
        if inputs or backward:
            raise UnsupportedArgumentError("a file of problems takes neither inputs nor backward")
        problems = read_problems(Path(target))
        name = "" if device_type is None else naming.policy_name(device_type)
        device = _current_device()
        wanted = [Asked(problem, name, device) for problem in problems]
    _build_together(wanted)
    for asked in wanted:
        planning.kernel_of(*asked)
    return tuple(dict.fromkeys(asked.problem for asked in wanted))


def _current_device() -> int:
    try:
        return launch.current_device()
    except (AssertionError, RuntimeError) as error:  # of a torch without CUDA, or without a driver
        raise UnsupportedArchitectureError(
            f"warmup loads kernels, which takes a GPU, and torch has none here: {error}; "
            "`attention-autotuner warmup --problems FILE --device-type GPU` builds them anywhere"
        ) from error


def _recorded(call: Callable[..., Any], inputs: tuple[Any, ...], *, backward: bool) -> list[Asked]:
    """The problems of a call, and of its backward pass."""
    with planning.recording() as recorded:
        result = call(*inputs)
        if backward:
            outputs = [x for x in _tensors(result) if x.requires_grad]
            if not outputs:
                raise UnsupportedArgumentError(
                    "backward=True needs a callable that returns tensors that require a gradient, got "
                    f"{checks.shown(result)}"
                )
            leaves = _sources(outputs, [x for x in _tensors(inputs) if x.requires_grad])
            torch.autograd.grad(
                outputs, leaves, [torch.zeros_like(x) for x in outputs], allow_unused=True
            )
    return list(dict.fromkeys(recorded))


def _sources(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs, and the leaves of autograd's graph that outputs have a gradient by; none from before the inputs."""
    sources = {id(x): x for x in inputs}
    seen = {x.grad_fn for x in inputs}
    nodes: list[Any] = []
    for x in outputs:
        if x.grad_fn is None:
            sources[id(x)] = x
        nodes.append(x.grad_fn)
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":  # torch's own, to a leaf's ``grad``
            sources[id(node.variable)] = node.variable
        nodes += [following for following, _ in node.next_functions]
    return list(sources.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _build_together(wanted: list[Asked]) -> None:
    """Build what calls would build one by one; what fails there says so then."""
    in_force, by_device = settings.current(), dict[int, dict[Any, None]]()
    for problem, device_type, index in wanted:
        name, pins = pinning.split(device_type)
        policy = dispatch.running_on(naming.policy_named(name, device=index), index)
        candidate = pinning.pinned(problem, policy, pins) if pins else None
        pick = dispatch.lookup(problem, policy, device=index)
        if pick.layer != "default" or in_force.mode_of(problem.direction) != "tune":
            by_device.setdefault(index, {})[candidate or pick.candidate] = None
    for index, candidates in by_device.items():
        arch = native_arch(probe(index).compute_capability)
        build_ahead(candidates, arch, settings=in_force)
