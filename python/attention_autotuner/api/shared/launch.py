"""The base of every operation's launch plans: torch's allocator and stream, the C entry, and the memory of plans."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ... import settings
from ...core.memo import Table
from ...core.problem import Direction, Op
from ...operations.params import SOMEWHERE
from ...serving.loader import LoadedKernel
from . import checks

MAX_PLANS = 4096
"""Kinds of call remembered per operation; the oldest are forgotten first."""

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

Params = tuple[ctypes.c_void_p, memoryview, Any]
"""The address of params, their memory in 8-byte words, and what keeps it."""


def _stream_of(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# Torch's own shortcuts, a tenth of the time of torch.cuda's functions; absent from builds without CUDA.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)
"""Torch's current stream of a device, as a raw ``cudaStream_t``."""
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The calling thread's current device."""


def allocator(device: torch.device) -> Allocate:
    """The maker of uninitialised tensors of ``(shape, strides, dtype)`` on a device, which must be current."""
    if device.type in ("cuda", "cpu"):
        # What Inductor's code allocates with: no parsing of options and no dispatcher, a third of the time.
        guards = getattr(torch._C._dynamo, "guards", None)
        quick: Allocate | None = getattr(guards, f"_empty_strided_{device.type}", None)
        if quick is not None:
            return quick
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


class Launch:
    """A kernel with params that are complete but for their pointers, ready to be enqueued again and again.

    Attributes:
        workspace_bytes: device memory that a launch needs beside its tensors.
    """

    __slots__ = (
        "_allocate",
        "_entry",
        "_index",
        "_index_argument",
        "_kernel",
        "_kind",
        "_spare",
        "_template",
        "workspace_bytes",
    )

    def __init__(
        self, kernel: LoadedKernel, params: ctypes.Structure, *, index: int, allocate: Allocate
    ) -> None:
        """Prepare launches.

        Args:
            kernel: what to launch.
            params: complete but for the pointers.
            index: CUDA device index.
            allocate: where the workspace comes from.
        """
        self._kernel = kernel
        kernel.set_launch_knobs(params)
        self._entry = kernel.launch_function
        self._kind = type(params)
        self._template = bytes(params)
        self.workspace_bytes = kernel.workspace_bytes(params)
        self._allocate = allocate
        self._index = index
        # Arguments that are ctypes objects already pass quicker than integers.
        self._index_argument = ctypes.c_int32(index)
        # Params in use by no call. A list's pop and append are atomic, so threads share it without a lock.
        self._spare: list[Params] = []

    def params(self) -> Params:
        """Params for :meth:`enqueue`, whose pointers are to be written through the second item, 8 bytes a word."""
        try:
            return self._spare.pop()
        except IndexError:
            params = self._kind.from_buffer_copy(self._template)
            address = ctypes.c_void_p(ctypes.addressof(params))
            return address, memoryview(params).cast("B").cast("Q"), params

    def enqueue(self, held: Params) -> None:
        """Launch on torch's current stream of the device, which must be current.

        Args:
            held: from :meth:`params`, every pointer written (0 for null); not the caller's any more.

        Raises:
            torch.OutOfMemoryError: there is no room for the workspace; nothing was launched.
            ArtifactError: the launch failed.
        """
        workspace = None
        if self.workspace_bytes:
            # Freed on return: torch reuses it only for work that comes later on this stream.
            workspace = self._allocate((self.workspace_bytes,), (1,), torch.uint8)
        status = self._entry(
            held[0],
            None if workspace is None else workspace.data_ptr(),
            current_stream(self._index),
            self._index_argument,
        )
        if status:
            self._kernel.raise_for_status(status, f"launch it on cuda:{self._index}")
        self._spare.append(held)  # the launch has copied the params


# Tensors of plans that CUDA graphs read: graphs may outlive the plans, so these are never let go.
CAPTURED: Table[int, torch.Tensor] = Table("captured", permanent=True)


class Layout(NamedTuple):
    """An output that a plan allocates.

    Attributes:
        name: of the params' field.
        shape: elements.
        strides: elements.
        dtype: of the elements.
        unread: its value where there is nothing to read and so no kernel: a number, or the name of the input that it
            equals, which is 0 if absent.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    unread: float | str = 0.0


def contiguous(
    name: str, shape: Sequence[int], dtype: torch.dtype, unread: float | str = 0.0
) -> Layout:
    """The layout of an output whose last dimension moves first, and so on."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return Layout(name, tuple(shape), tuple(reversed(strides)), dtype, unread)


def output(q: torch.Tensor, v: torch.Tensor) -> Layout:
    """The layout of o: dense, with q's order of dimensions and v's last dim."""
    strides = checks.output_strides(q.shape, q.stride(), v.shape[3])
    return Layout("o", (*q.shape[:3], v.shape[3]), strides, q.dtype)


def gradients(**tensors: torch.Tensor) -> list[Layout]:
    """The layouts of gradients, by their names: dense, each with its tensor's order of dimensions."""
    return [
        Layout(
            name, tuple(x.shape), checks.output_strides(x.shape, x.stride(), x.shape[3]), x.dtype
        )
        for name, x in tensors.items()
    ]


def signature(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    """All that a plan depends on of a tensor but its values and what its address is beyond 16 bytes."""
    if x is None:
        return None
    return (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15 == 0)


def signature_of_three(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
    """The same of q, k and v, whose addresses matter together; two thirds of the time of three."""
    return (
        q.shape,
        q.stride(),
        k.shape,
        k.stride(),
        v.shape,
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0,
    )


class Plan:
    """A call of one kind: everything but the addresses is fixed, and a warm call only replays it.

    It touches no file, never synchronises, may run under CUDA-graph capture, and holds no tensor of a caller's.

    Attributes:
        keep: a tensor that the params refer to, held as long as the plan.
        settings: those in force when it was made, held so that their ``id`` in a key stays theirs.
        workspace_bytes: device memory that a call needs beside its tensors, and frees again.
    """

    __slots__ = (
        "_allocate",
        "_copies",
        "_index",
        "_input_words",
        "_launch",
        "_outputs",
        "_unread",
        "keep",
        "settings",
        "workspace_bytes",
    )

    def __init__(
        self,
        kernel: LoadedKernel | None,
        params: ctypes.Structure | None,
        *,
        inputs: Mapping[str, torch.Tensor | None],
        outputs: Sequence[Layout],
        in_force: settings.Settings,
        copies: Sequence[str] = (),
        keep: torch.Tensor | None = None,
    ) -> None:
        """Prepare a call.

        Args:
            kernel: to be launched; None where there is nothing to read.
            params: complete but for the pointers of inputs and outputs; other pointers stay as they are. None without
                a kernel.
            inputs: by their fields of the params, in the order of :meth:`run`'s arguments; the first is there, and
                says the device.
            outputs: to be allocated.
            in_force: the present settings.
            copies: those inputs that must be copied before they are read.
            keep: what the params already refer to.
        """
        self.settings = in_force
        first = next(iter(inputs.values()))
        assert first is not None
        self._allocate = allocator(first.device)
        self._index = index = first.get_device()
        self.keep = keep
        self._copies = tuple(n for n, name in enumerate(inputs) if name in copies)
        names = [*inputs, *(layout.name for layout in outputs)]
        pointers = [0] * len(names) if params is None else words_of(type(params), *names)
        self._input_words, written = pointers[: len(inputs)], pointers[len(inputs) :]
        self._outputs = [
            (word, layout.shape, layout.strides, layout.dtype)
            for word, layout in zip(written, outputs, strict=True)
        ]
        self._unread = [
            names.index(layout.unread) if isinstance(layout.unread, str) else layout.unread
            for layout in outputs
        ]
        self._launch = None
        self.workspace_bytes = 0
        if kernel is not None and params is not None:
            # A kernel may need more memory for what is there than for what is not: none of it may look absent.
            words = memoryview(params).cast("B").cast("Q")
            present = [name for name, x in inputs.items() if x is not None]
            for word in (*words_of(type(params), *present), *written):
                words[word] = SOMEWHERE
            self._launch = Launch(kernel, params, index=index, allocate=self._allocate)
            self.workspace_bytes = self._launch.workspace_bytes

    @property
    def reads_in_place(self) -> bool:
        """True where nothing but addresses matters of inputs that lie as those of the plan: none is copied."""
        return not self._copies

    def run(self, *inputs: torch.Tensor | None) -> list[torch.Tensor]:
        """Allocate the outputs and enqueue the kernel on torch's current stream of the tensors' device.

        Args:
            inputs: None for absent ones, as when the plan was made.

        Raises:
            torch.OutOfMemoryError: there is no room for the outputs or the workspace.
        """
        if current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.run(*inputs)
        if self.keep is not None and torch.cuda.is_current_stream_capturing():
            CAPTURED.remember(id(self.keep), self.keep)
        allocate, launch = self._allocate, self._launch
        if launch is None:
            return self._without_launch(inputs)
        if self._copies:
            # They live until the launch is enqueued; torch reuses their memory for later work of this stream only.
            inputs = tuple(
                copy_of(x) if x is not None and position in self._copies else x
                for position, x in enumerate(inputs)
            )
        held = launch.params()
        words = held[1]
        for word, x in zip(self._input_words, inputs, strict=True):
            if x is not None:
                words[word] = x.data_ptr()
        results = []
        for word, shape, strides, dtype in self._outputs:
            result = allocate(shape, strides, dtype)
            words[word] = result.data_ptr()
            results.append(result)
        launch.enqueue(held)
        return results

    def _without_launch(self, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        results = []
        for (_, shape, strides, dtype), unread in zip(self._outputs, self._unread, strict=True):
            source = inputs[unread] if isinstance(unread, int) else None
            result = self._allocate(shape, strides, dtype)
            fill = unread if isinstance(unread, float) else 0.0
            results.append(result.fill_(fill) if source is None else result.copy_(source))
        return results


class ReferencePlan:
    """A call of one kind that no kernel serves: the PyTorch reference computes it.

    Attributes:
        settings: as :class:`Plan` has them.
    """

    __slots__ = ("_reference", "settings")

    workspace_bytes = 0
    reads_in_place = False

    def __init__(
        self, reference: Callable[..., Sequence[torch.Tensor]], in_force: settings.Settings
    ) -> None:
        """Prepare a call.

        Args:
            reference: gives the outputs from the inputs.
            in_force: the present settings.
        """
        self._reference = reference
        self.settings = in_force

    def run(self, *inputs: torch.Tensor | None) -> list[torch.Tensor]:
        """Compute the outputs, as :meth:`Plan.run` does."""
        with torch.no_grad():
            return list(self._reference(*inputs))


def copy_of(x: torch.Tensor) -> torch.Tensor:
    """A dense copy in memory of its own, whose address is a multiple of 16 bytes as all of torch's are."""
    return x.clone(memory_format=torch.contiguous_format)


def is_readable(x: torch.Tensor) -> bool:
    """Return True where kernels can read a tensor's rows where they lie, 16 bytes at a time."""
    return x.stride(-1) == 1 and checks.is_aligned(x)


def unreadable(**tensors: torch.Tensor | None) -> list[str]:
    """The names of tensors that kernels cannot read where they lie: rows by their strides, row values when dense."""
    return [
        name
        for name, x in tensors.items()
        if x is not None and not (is_readable(x) if x.dim() == 4 else x.is_contiguous())
    ]


def words_of(kind: type[ctypes.Structure], *pointers: str) -> list[int]:
    """Where the fields that hold or begin with an address lie in params, in 8-byte words."""
    return [getattr(kind, name).offset // 8 for name in pointers]


def table_of_plans(op: Op, direction: Direction) -> Table[Any, Plan | ReferencePlan]:
    """The memory of an operation's plans, by the kind of call."""
    return Table(f"plans.{op}.{direction}", bound=MAX_PLANS)
