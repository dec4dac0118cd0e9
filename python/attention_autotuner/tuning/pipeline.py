"""The side effects of a search: build, verify, measure, confirm. A search takes any :class:`Pipeline`.

:class:`LocalPipeline` is this machine's; tests use others. Modules that need torch are imported when a step first needs
them, so that a search on a machine without a GPU never loads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from ..arch.policy import Policy
from ..arch.probe import current_device
from ..arch.resolution import native_arch
from ..codegen.build import BuildTarget, build
from ..codegen.render import RenderedKernel
from ..codegen.report import CompilerReport
from ..codegen.store import Store
from ..codegen.toolchain import find_toolchain
from ..core.candidate import Candidate
from ..core.outcome import LaunchFailed, Outcome
from ..core.problem import Problem
from ..errors import ArtifactError, UnsupportedArchitectureError
from ..settings import Settings
from .environment import Environment, collect
from .racing import Timing
from .worker import time_all_in_worker

LOGGER = logging.getLogger(__name__)
B = TypeVar("B")
CONFIRM_SECONDS = 3.0  # of timing rounds in the second process
CONFIRM_EACH_SECONDS = 1.5  # the same, where it confirms many


class Built(Protocol):
    """The fields of a built artifact that a search reads (``codegen``'s Artifact has it)."""

    @property
    def path(self) -> Path:
        """The library, or the folder that holds it."""

    @property
    def report(self) -> CompilerReport:
        """The compiler's report."""

    @property
    def code_digest(self) -> str | None:
        """Identity of its machine code, where that is known."""

    @property
    def launch_knobs(self) -> Mapping[str, int]:
        """The launch knobs of the candidate that it is launched for."""


def launched(result: B, candidate: Candidate) -> B:
    """A result of a build, or a failure, as one of a candidate: several may have the artifact in common."""
    if isinstance(result, Outcome) or not candidate.launch_knobs:
        return result
    return cast("B", replace(cast("Any", result), launch_knobs=candidate.launch_knobs))


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """A pick that a second process is to confirm.

    Attributes:
        problem: what it is for.
        pick, default: candidate names and what was built of them.
    """

    problem: Problem
    pick: tuple[str, Built]
    default: tuple[str, Built]

    @classmethod
    def of(cls, problem: Problem, pick: str, default: str, built: Mapping[str, Built]) -> Doubt:
        """The doubt about a pick, with what was built by name."""
        return cls(problem=problem, pick=(pick, built[pick]), default=(default, built[default]))


class Pipeline(Protocol):
    """The steps of a search that touch compiler and GPU.

    Attributes:
        environment: what stands beside every figure.
    """

    environment: Environment

    def build(
        self, kernels: Sequence[RenderedKernel], progress: Callable[[int, int, str], None]
    ) -> Sequence[Built | Outcome]:
        """Build kernels, in their order; called with (done, total, message) as it goes.

        A sweep calls this from several threads.
        """

    def can_measure(self) -> bool:
        """True where a GPU that runs these kernels is here, with torch to drive it."""

    def verify(self, problem: Problem, built: Built, *, deterministic: bool) -> Outcome:
        """Check a kernel against the reference, and for equal bits of two runs where it claims them."""

    def measure(
        self,
        problem: Problem,
        built: dict[str, Built],
        *,
        budget_seconds: float,
        keep: Collection[str],
        on_round: Callable[[int, list[str]], None],
    ) -> tuple[list[Timing], bool]:
        """Race kernels given in tie-breaking order; the timings, and whether Ctrl-C cut it short."""

    def measure_steps(
        self, problem: Problem, steps: Mapping[str, tuple[Built, Built]], *, budget_seconds: float
    ) -> tuple[list[Timing], bool]:
        """Race pairs of a forward and a backward kernel, each pair run back to back.

        Args:
            problem: the backward one.
            steps: name -> forward and backward kernel, in tie-breaking order.
            budget_seconds: of the rounds.

        Returns:
            The timings, and whether Ctrl-C cut it short.
        """

    def confirm_all(self, doubts: Sequence[Doubt]) -> list[float | None]:
        """The default's time over the pick's for each, in a second, fresh process; None where that failed."""


def running(policy: Policy, environment: Environment) -> Policy:
    """A policy with those families that the GPU of an environment runs; the policy itself where there is none.

    Raises:
        UnsupportedArchitectureError: it runs none.
    """
    if environment.capability is None:
        return policy
    restricted = policy.on(environment.capability)
    if not restricted.families:
        raise UnsupportedArchitectureError(
            f"kernels of {policy.spec.name} ({', '.join(policy.families)}) do not run on {environment.gpu_name}, "
            f"which has compute capability {environment.compute_capability}"
        )
    return restricted


class LocalPipeline:
    """This machine: its compiler, its kernel store, and the CUDA device that is current when this is made.

    Args:
        policy: whose build target is used where there is no GPU; with one, kernels are built for it natively.
        settings: where the store is, and how the compiler is found.
    """

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self._settings = settings
        self._device = current_device()
        self.environment = collect(self._device)
        arch = policy.build_arch
        if self.environment.capability is not None:
            arch = native_arch(self.environment.capability)
        self._target = BuildTarget(arch=arch)

    def build(
        self, kernels: Sequence[RenderedKernel], progress: Callable[[int, int, str], None]
    ) -> Sequence[Built | Outcome]:
        """See :meth:`Pipeline.build`."""
        toolchain = find_toolchain(self._settings)
        if (self.environment.nvcc, self.environment.cutlass) != (
            toolchain.nvcc_version,
            toolchain.cutlass_version,
        ):  # looked at first: several threads may build while another measures
            self.environment = replace(
                self.environment, nvcc=toolchain.nvcc_version, cutlass=toolchain.cutlass_version
            )
        return build(
            list(kernels),
            self._target,
            toolchain=toolchain,
            store=Store(self._settings.cache_dir),
            jobs=self._settings.jobs,
            progress=lambda done, total, name, seconds: progress(
                done, total, f"{name} in {seconds:.0f} s"
            ),
        )

    def can_measure(self) -> bool:
        """See :meth:`Pipeline.can_measure`."""
        return self.environment.gpu_name is not None and find_spec("torch") is not None

    def verify(self, problem: Problem, built: Built, *, deterministic: bool) -> Outcome:
        """See :meth:`Pipeline.verify`."""
        from ..serving.loader import load
        from .verify import verify

        try:
            kernel = load(built.path).with_launch_knobs(built.launch_knobs)
        except ArtifactError as error:
            return LaunchFailed(reason=str(error))
        return verify(problem, kernel, deterministic=deterministic)

    def measure(
        self,
        problem: Problem,
        built: dict[str, Built],
        *,
        budget_seconds: float,
        keep: Collection[str],
        on_round: Callable[[int, list[str]], None],
    ) -> tuple[list[Timing], bool]:
        """See :meth:`Pipeline.measure`."""
        from .measure import InProcessMeasurer, KernelEntry

        measurer = InProcessMeasurer(on_round=on_round)
        entries = [
            KernelEntry(
                name=name, path=kernel.path, problem=problem, launch_knobs=kernel.launch_knobs
            )
            for name, kernel in built.items()
        ]
        timings = measurer.measure(problem, entries, budget_seconds=budget_seconds, keep=keep)
        self.environment = replace(
            collect(self._device), nvcc=self.environment.nvcc, cutlass=self.environment.cutlass
        )
        return timings, measurer.interrupted

    def measure_steps(
        self, problem: Problem, steps: Mapping[str, tuple[Built, Built]], *, budget_seconds: float
    ) -> tuple[list[Timing], bool]:
        """See :meth:`Pipeline.measure_steps`."""
        from .measure import InProcessMeasurer, StepEntry

        measurer = InProcessMeasurer()
        entries = [
            StepEntry(
                name=name,
                forward=forward.path,
                backward=backward.path,
                problem=problem,
                launch_knobs=(forward.launch_knobs, backward.launch_knobs),
            )
            for name, (forward, backward) in steps.items()
        ]
        timings = measurer.measure(
            problem, entries, budget_seconds=budget_seconds, keep=list(steps)
        )
        return timings, measurer.interrupted

    def confirm_all(self, doubts: Sequence[Doubt]) -> list[float | None]:
        """See :meth:`Pipeline.confirm_all`; where one kernel takes the process down, each has one of its own."""
        ratios = self._confirmed(doubts)
        if len(doubts) > 1 and not any(ratios):
            return [ratio for doubt in doubts for ratio in self._confirmed([doubt])]
        return ratios

    def _confirmed(self, doubts: Sequence[Doubt]) -> list[float | None]:
        races = [
            (
                doubt.problem,
                {name: (b.path, b.launch_knobs) for name, b in (doubt.default, doubt.pick)},
            )
            for doubt in doubts
        ]
        seconds = CONFIRM_SECONDS if len(doubts) == 1 else CONFIRM_EACH_SECONDS
        try:
            answers = time_all_in_worker(races, budget_seconds=seconds, device=self._device)
        except ArtifactError as error:
            LOGGER.warning("what was picked is not confirmed: %s", error)
            return [None] * len(doubts)
        ratios: list[float | None] = []
        for doubt, timings in zip(doubts, answers, strict=True):
            timed = {timing.name: timing.ratio_to_best for timing in timings if timing.outcome.ok}
            both = len(timed) == 2
            ratios.append(timed[doubt.default[0]] / timed[doubt.pick[0]] if both else None)
        return ratios
