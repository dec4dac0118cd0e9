"""Entries of a race: anything with a name that can be prepared for a list of inputs and then run on one of them.

A built kernel of ours (:class:`KernelEntry`), a forward and a backward kernel as one step (:class:`StepEntry`), or a
peer of the benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ..core.problem import Problem
from ..operations.params import field_names
from ..operations.shared.launching import Inputs, Outputs, bind
from ..serving import loader

Makers = Mapping[str, Callable[[], Any]]


class Entry(Protocol):
    """Something to time."""

    @property
    def name(self) -> str:
        """Unique in a measurement."""

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Load what is needed; called once, outside any timing.

        Args:
            inputs: the sets that :meth:`run` will be asked for.
            outputs: memory for each set's results and for workspaces, shared by all entries; a peer that allocates its
                own leaves it.
        """

    def run(self, index: int) -> None:
        """Enqueue the work on the current stream for input set ``index``, without synchronising."""


@dataclass
class KernelEntry:
    """A built kernel of ours; what is timed is the whole launch, with all that it enqueues.

    Attributes:
        name: the candidate's name.
        path: the library, or the folder that holds it.
        problem: what it computes.
        launch_knobs: that it is launched with.
    """

    name: str
    path: Path
    problem: Problem
    launch_knobs: Mapping[str, int] = field(default_factory=dict)
    _launches: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Load the library and bind one launch per input set."""
        kernel = loader.load(self.path).with_launch_knobs(self.launch_knobs)
        kernel.prepare(inputs[0].device.index or 0)
        self._launches = [
            bind(kernel, self.problem, read_set, memory)
            for read_set, memory in zip(inputs, outputs, strict=True)
        ]

    def run(self, index: int) -> None:
        """Launch on the current stream."""
        self._launches[index]()


class StepEntry:
    """A forward and a backward kernel of ours, one after the other on the same tensors, as in training.

    Args:
        name: how it is reported.
        forward, backward: the libraries, or the folders that hold them.
        problem: the backward problem; measured on its inputs.
        launch_knobs: of both.
        makers: name -> makes the memory of an output of the forward; torch's by default.
    """

    def __init__(
        self,
        *,
        name: str,
        forward: Path,
        backward: Path,
        problem: Problem,
        launch_knobs: Sequence[Mapping[str, int]] = ({}, {}),
        makers: Makers | None = None,
    ) -> None:
        self.name = name
        self._makers = makers
        self._forward = KernelEntry(
            name=name,
            path=forward,
            problem=replace(problem, direction="forward", deterministic=False),
            launch_knobs=launch_knobs[0],
        )
        self._backward = KernelEntry(
            name=name, path=backward, problem=problem, launch_knobs=launch_knobs[1]
        )

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Load both; the forward writes what the backward reads of it, or else memory of its own."""
        forward = self._forward.problem
        makers, names = self._makers, set(field_names(forward))
        if makers is None:
            from ..operations.bindings import output_makers  # needs torch, which a worker has not

            makers = output_makers(forward, inputs[0].device)
        read, written = [], []
        for read_set, memory in zip(inputs, outputs, strict=True):
            tensors = {n: t for n, t in read_set.tensors.items() if n in names and n not in makers}
            scalars = {n: value for n, value in read_set.scalars.items() if n in names}
            read.append(Inputs(tensors=tensors, scalars=scalars))
            made = {
                name: read_set.tensors[name] if name in read_set.tensors else make()
                for name, make in makers.items()
            }
            written.append(Outputs(tensors=made, workspace=memory.workspace))
        self._forward.prepare(read, written)
        self._backward.prepare(inputs, outputs)

    def run(self, index: int) -> None:
        """Launch both on the current stream."""
        self._forward.run(index)
        self._backward.run(index)


def entry_of(
    name: str,
    libraries: Sequence[Mapping[str, Any]],
    problem: Problem,
    makers: Makers | None = None,
) -> Entry:
    """The entry of a library, or of a step's forward and backward, as :func:`.isolated.crossing` gives them.

    The makers are those of :class:`StepEntry`.
    """
    paths = [Path(library["path"]) for library in libraries]
    knobs = [library["launch_knobs"] for library in libraries]
    if len(paths) == 1:
        return KernelEntry(name=name, path=paths[0], problem=problem, launch_knobs=knobs[0])
    forward, backward = paths
    return StepEntry(
        name=name,
        forward=forward,
        backward=backward,
        problem=problem,
        launch_knobs=knobs,
        makers=makers,
    )
