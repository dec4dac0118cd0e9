"""Tensors of a launch, in the memory of torch or of a worker's device.

Tensors go by the names that the params of the C ABI give them, so that :func:`bind` serves every direction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ...core.abi import Tensor as AbiTensor
from ...core.problem import Problem
from ...serving.loader import LoadedKernel
from ..params import abi_tensor, params_of

if TYPE_CHECKING:
    import torch

GUARD = 4096  # elements before and after each output, bytes before and after a workspace
GUARD_BYTE = 0x5A
NAN_BYTE = 0xFF  # repeated, a NaN in every float type
WORKSPACE_ALIGNMENT = 256  # bytes, of the address


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors and scalars that a launch reads.

    Attributes:
        tensors: by name: q ``[batch, heads_q, seqlen_q, dim_qk]``, k ``[batch, heads_kv, seqlen_k, dim_qk]``, v with
            ``dim_v``, and what else the operation reads, such as dout, a mask or a state. Those of a worker without
            torch are :class:`~attention_autotuner.tuning.devices.Array`.
        scalars: params beside the sizes, by name, where they are not those of :func:`.params_of`.
    """

    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def device(self) -> Any:
        """Where they all are."""
        return next(iter(self.tensors.values())).device

    @property
    def q(self) -> torch.Tensor:
        """The queries."""
        return self.tensors["q"]

    @property
    def k(self) -> torch.Tensor:
        """The keys."""
        return self.tensors["k"]

    @property
    def v(self) -> torch.Tensor:
        """The values."""
        return self.tensors["v"]


class Workspace(Protocol):
    """Gives launches their workspace, and keeps it alive."""

    def take(self, num_bytes: int) -> int:
        """The address of this many bytes at least, aligned to :data:`WORKSPACE_ALIGNMENT`."""


class GrowingWorkspace:
    """One piece of memory for launches that run one after the other on one stream; it grows with what they ask for.

    Args:
        allocate: makes so many bytes; answers what keeps them alive, and their address.
    """

    def __init__(self, allocate: Callable[[int], tuple[Any, int]]) -> None:
        self._allocate = allocate
        # Those outgrown as well: launches that were bound to them hold addresses.
        self._pieces: list[Any] = []
        self._size = self._address = 0

    def take(self, num_bytes: int) -> int:
        """See :meth:`Workspace.take`."""
        size = num_bytes + WORKSPACE_ALIGNMENT
        if self._size < size:
            piece, self._address = self._allocate(size)
            self._pieces.append(piece)
            self._size = size
        return self._address + -self._address % WORKSPACE_ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The tensors that a launch writes.

    Attributes:
        tensors: by name, such as o and lse, or dq, dk and dv.
        workspace: where launches get theirs.
    """

    tensors: Mapping[str, torch.Tensor]
    workspace: Workspace


def bind(
    kernel: LoadedKernel,
    problem: Problem,
    inputs: Inputs,
    outputs: Outputs,
    scale: float | None = None,
) -> Callable[[], None]:
    """A function that launches the kernel on the current stream with these tensors; scale as :func:`params_of`."""
    params = params_of(problem, scale)
    kinds = dict(type(params)._fields_)  # type: ignore[arg-type]  # pairs here, though ctypes allows bit fields
    for name, number in inputs.scalars.items():
        setattr(params, name, number)
    for name, tensor in (*inputs.tensors.items(), *outputs.tensors.items()):
        address = tensor.data_ptr()
        strided = kinds[name] is AbiTensor
        value = abi_tensor(tensor.shape, tensor.stride(), address) if strided else address
        setattr(params, name, value)
    num_bytes = kernel.workspace_bytes(params)
    workspace = outputs.workspace.take(num_bytes) if num_bytes else 0
    held = (inputs, outputs)  # the params hold bare pointers
    index, stream = inputs.device.index or 0, _stream_of(inputs.device)

    def launch() -> None:
        assert held
        kernel.launch(params, workspace, stream(), index)

    return launch


def _stream_of(device: Any) -> Callable[[], int]:
    """The stream that launches on a device are put on: torch's current one, or the device's own."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(device, torch.device):
        return lambda: int(device.stream)
    if device.type == "cpu":
        return lambda: 0
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)
