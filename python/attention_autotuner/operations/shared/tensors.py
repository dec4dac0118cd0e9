"""Tensors of a launch: inputs, outputs that show what was not written or written beside, and workspace.

Tensors go by the names that the params of the C ABI give them, so that :func:`bind` serves every direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch

from ...core.abi import Tensor as AbiTensor
from ...core.problem import Problem
from ...serving.loader import LoadedKernel
from ..params import abi_tensor, params_of

GUARD = 4096  # elements before and after each output, bytes before and after a workspace
GUARD_BITS = {1: 0x5A, 2: 0x5A5A, 4: 0x5A5A5A5A}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
NAN_BYTE = 0xFF  # repeated, a NaN in every float type
WORKSPACE_ALIGNMENT = 256  # bytes, of the address

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors and scalars that a launch reads.

    Attributes:
        tensors: by name: q ``[batch, heads_q, seqlen_q, dim_qk]``, k ``[batch, heads_kv, seqlen_k, dim_qk]``, v with
            ``dim_v``, and what else the operation reads, such as dout, a mask or a state.
        scalars: params beside the sizes, by name, where they are not those of :func:`.params_of`.
    """

    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
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


class PoisonedWorkspace:
    """New memory for every launch, full of NaN, between guards.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: list[tuple[torch.Tensor, int, int]] = []

    def take(self, num_bytes: int) -> int:
        """See :meth:`Workspace.take`."""
        size = num_bytes + 2 * GUARD + WORKSPACE_ALIGNMENT
        storage = torch.full((size,), GUARD_BITS[1], dtype=torch.uint8, device=self._device)
        start = GUARD + -storage.data_ptr() % WORKSPACE_ALIGNMENT
        storage[start : start + num_bytes] = NAN_BYTE
        self._taken.append((storage, start, start + num_bytes))
        return storage.data_ptr() + start

    def intact(self) -> bool:
        """Return True where nothing was written beside the memory that was asked for."""
        return all(
            bool((torch.cat((storage[:start], storage[stop:])) == GUARD_BITS[1]).all())
            for storage, start, stop in self._taken
        )


class SharedWorkspace:
    """One piece of memory for launches that run one after the other on one stream; it grows with what they ask for.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Those outgrown as well: launches that were bound to them hold addresses.
        self._pieces: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> int:
        """See :meth:`Workspace.take`."""
        size = num_bytes + WORKSPACE_ALIGNMENT
        if not self._pieces or self._pieces[-1].numel() < size:
            self._pieces.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        address = self._pieces[-1].data_ptr()
        return address + -address % WORKSPACE_ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The tensors that a launch writes.

    Attributes:
        tensors: by name, such as o and lse, or dq, dk and dv.
        workspace: where launches get theirs.
        storages: of the tensors, with the guards around them; empty for outputs without guards.
    """

    tensors: Mapping[str, torch.Tensor]
    workspace: Workspace
    storages: tuple[torch.Tensor, ...] = field(default=())

    def intact(self) -> bool:
        """Return True where nothing was written beside the tensors."""
        return all(_guards_intact(storage) for storage in self.storages)


def guarded_outputs(shapes: Shapes, workspace: Workspace, device: torch.device) -> Outputs:
    """Outputs full of NaN between guards of a known pattern."""
    made = {name: _guarded(shape, dtype, device) for name, (shape, dtype) in shapes.items()}
    return Outputs(
        tensors={name: tensor for name, (tensor, _) in made.items()},
        workspace=workspace,
        storages=tuple(storage for _, storage in made.values()),
    )


def bind(
    kernel: LoadedKernel,
    problem: Problem,
    inputs: Inputs,
    outputs: Outputs,
    scale: float | None = None,
) -> Callable[[], None]:
    """A function that launches the kernel on torch's current stream with these tensors; scale as :func:`params_of`."""
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
    device = inputs.device

    def launch() -> None:
        on_gpu = held[0].device.type == "cuda"
        stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
        kernel.launch(params, workspace, stream, device.index or 0)

    return launch


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True where two tensors of one dtype hold the same bits, NaN or not."""
    integer = INTEGERS[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))


def current_device() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


def _guarded(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor full of NaN, and its storage with guards around it."""
    count = prod(shape)
    storage = torch.empty(count + 2 * GUARD, dtype=dtype, device=device)
    storage.view(INTEGERS[storage.element_size()]).fill_(GUARD_BITS[storage.element_size()])
    inner = storage[GUARD : GUARD + count].view(shape)
    inner.fill_(float("nan"))
    return inner, storage


def _guards_intact(storage: torch.Tensor) -> bool:
    bits = storage.view(INTEGERS[storage.element_size()])
    expected = GUARD_BITS[storage.element_size()]
    guards = torch.cat((bits[:GUARD], bits[-GUARD:]))
    return bool((guards == expected).all())
