"""The caller's side of checks and races: inputs and references are torch's, in this process; kernels run in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import prod
from typing import Any

import torch

from ..core.outcome import Outcome
from ..core.problem import Problem
from ..operations.bindings import ways_of
from ..operations.shared.tensors import Inputs, Shapes
from ..serving.loader import KernelDescription
from . import verify as verifying
from .devices import ALIGNMENT, Shared
from .verify import REPEATS, Launched, Launcher

Call = Callable[..., Any]


def judging_device(index: int) -> torch.device:
    """Where references are computed: a CUDA device, or the host where this process's torch has no CUDA."""
    return torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Compute as a program of its own does, whatever modes the caller's is in; the GPU's memory is given back after."""
    dtype, deterministic = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    torch.set_default_dtype(torch.float32)
    torch.set_deterministic_debug_mode(0)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cuda", enabled=False),
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_deterministic_debug_mode(deterministic)
        if device.type == "cuda":
            torch.cuda.empty_cache()


class RemoteKernel(Launcher):
    """A kernel that another process launches; see :class:`.verify.Launcher`.

    Args:
        call: runs a task there.
        described: what its task ``load`` answered.
        device: of this process's tensors.
    """

    def __init__(self, call: Call, described: Mapping[str, Any], device: torch.device) -> None:
        self._call, self._device = call, device
        self.info = KernelDescription(**described["info"])
        self.gpu_name, self.num_sms = described["gpu_name"], described["num_sms"]

    def launch(self, problem: Problem, inputs: Inputs, shapes: Shapes) -> Launched | Outcome:
        """See :meth:`.verify.Launcher.launch`."""
        shared, handed = hand_over(inputs, shapes, REPEATS)
        answer = self._call("launch", problem=asdict(problem), handed=handed, repeats=REPEATS)
        if isinstance(answer, Outcome):
            return answer
        outputs = [
            {
                name: torch.from_numpy(shared.data)[offset : offset + place["num_bytes"]]
                .to(self._device, copy=True)
                .view(shapes[name][1])
                .view(shapes[name][0])
                for name, place in handed["outputs"].items()
                for offset in place["offsets"][run : run + 1]
            }
            for run in range(REPEATS)
        ]
        return Launched(outputs=outputs, changed=answer)


def verify(
    call: Call, described: Mapping[str, Any], problem: Problem, device: int, deterministic: bool
) -> Outcome:
    """Verify a kernel that another process has loaded, see :func:`.verify.verify`.

    Args:
        call: runs a task there.
        described: what its task ``load`` answered.
        problem: what it will serve.
        device: CUDA device index.
        deterministic: the kernel claims equal bits from equal inputs.
    """
    where = judging_device(device)
    kernel = RemoteKernel(call, described, where)
    with undisturbed(where):
        return verifying.verify(problem, kernel, deterministic=deterministic, device=where)


def race_of(problem: Problem, seed: int, device: int) -> tuple[Shared, dict[str, Any]]:
    """The inputs of a race in a file, and what the task ``prepare`` is told about problem and tensors."""
    where = judging_device(device)
    way = ways_of(problem)[0]
    with undisturbed(where):
        shared, handed = hand_over(
            way.inputs(problem, seed=seed, device=where), way.output_shapes(problem)
        )
        handed["forward_outputs"] = {}
        if problem.direction == "backward":
            forward = replace(problem, direction="forward", deterministic=False)
            shapes = ways_of(forward)[0].output_shapes(forward)
            handed["forward_outputs"] = {name: _place(*shapes[name]) for name in shapes}
    return shared, {"problem": asdict(problem), "handed": handed}


def hand_over(inputs: Inputs, shapes: Shapes, repeats: int = 0) -> tuple[Shared, dict[str, Any]]:
    """Write inputs to a file, with room for the outputs of several launches.

    Returns:
        The file, which must be held while it is used, and what :func:`.devices.read_inputs` and ``launch`` read.
    """
    places: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in inputs.tensors.items():
        elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        place = _place(tensor.shape, tensor.dtype)
        place["num_bytes"] = max(0, elements) * place["itemsize"] if tensor.numel() else 0
        place["lead"] = tensor.data_ptr() % ALIGNMENT
        place["strides"] = list(tensor.stride())
        place["offset"], end = end, _after(end, place["num_bytes"])
        places[name] = place
    outputs = {name: _place(*shapes[name]) for name in shapes}
    for place in outputs.values():
        place["offsets"] = []
        for _ in range(repeats):
            place["offsets"].append(end)
            end = _after(end, place["num_bytes"])
    shared = Shared(end)
    data = torch.from_numpy(shared.data)
    for name, tensor in inputs.tensors.items():
        offset, num_bytes = places[name]["offset"], places[name]["num_bytes"]
        span = tensor.as_strided((num_bytes // tensor.element_size(),), (1,)).view(torch.uint8)
        data[offset : offset + num_bytes].copy_(span)
    return shared, {
        "path": str(shared.path),
        "inputs": places,
        "scalars": dict(inputs.scalars),
        "outputs": outputs,
    }


def _place(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "shape": list(shape),
        "itemsize": dtype.itemsize,
        "num_bytes": prod(shape) * dtype.itemsize,
    }


def _after(end: int, num_bytes: int) -> int:
    return -(-(end + num_bytes) // ALIGNMENT) * ALIGNMENT
