"""The side effects of a search: build, verify, measure, confirm. A search takes any :class:`Pipeline`.

:class:`LocalPipeline` is this machine's; tests use others. Modules that need torch are imported when a step first needs
them, so that a search on a machine without a GPU never loads it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from math import inf
from threading import Thread
from typing import Any, Protocol

from ..arch.policy import Policy
from ..arch.probe import cuda_driver, current_device
from ..codegen.artifact import Artifact
from ..codegen.build import BuildTarget, Progress, build
from ..codegen.render import RenderedKernel
from ..codegen.store import Store
from ..codegen.toolchain import find_toolchain
from ..codegen.tools import Stop
from ..core.candidate import Candidate
from ..core.outcome import Outcome
from ..core.problem import Problem
from ..errors import (
    ArtifactError,
    MissingPackageError,
    SettingsError,
    UnsupportedArchitectureError,
)
from ..settings import Settings
from . import isolated
from .environment import Environment, collect
from .idle import require_rest, require_room
from .racing import History, Timing
from .rounds import OnRound
from .validity import target_of
from .worker import TASKS, Worker

LOGGER = logging.getLogger(__name__)
Built = Artifact
Raced = tuple[list[Timing], bool]
"""Timings, and whether Ctrl-C cut the race short."""
CONFIRM_SECONDS = 3.0  # of timing rounds in the second process
CONFIRM_EACH_SECONDS = 1.5  # the same, where it confirms many


def launched(result: Built | Outcome, candidate: Candidate) -> Built | Outcome:
    """A result of a build, or a failure, as one of a candidate: several may have the artifact in common."""
    if isinstance(result, Outcome) or not candidate.launch_knobs:
        return result
    return replace(result, launch_knobs=candidate.launch_knobs)


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
        deadline: of ``time.monotonic``, seconds; checks and races that run then are ended.
        gpu_id: names the GPU among all there are; one process at a time measures on it.
    """

    environment: Environment
    deadline: float

    @property
    def gpu_id(self) -> str:
        """See above."""

    def build(
        self,
        kernels: Sequence[RenderedKernel],
        progress: Progress,
        stop: Stop = lambda: False,
    ) -> Sequence[Built | Outcome]:
        """Build kernels, in their order; called with (done, total, name, seconds) as each is built.

        Once ``stop`` is true the rest is ``Postponed``. A sweep calls this from several threads.
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
        on_round: OnRound,
        history: History | None = None,
    ) -> Raced:
        """Race kernels given in tie-breaking order; the timings, and whether Ctrl-C cut it short.

        What the history has counts, and it gets every round and failure as it comes.
        """

    def measure_steps(
        self,
        problem: Problem,
        steps: Mapping[str, tuple[Built, Built]],
        *,
        budget_seconds: float,
        history: History | None = None,
    ) -> Raced:
        """Race pairs of a forward and a backward kernel, each pair run back to back.

        Args:
            problem: the backward one.
            steps: name -> forward and backward kernel, in tie-breaking order.
            budget_seconds: of the rounds.
            history: see :meth:`measure`.

        Returns:
            The timings, and whether Ctrl-C cut it short.
        """

    def confirm_all(self, doubts: Sequence[Doubt]) -> Iterable[float | Outcome | None]:
        """The default's time over the pick's for each, in a second, fresh process.

        Returns:
            For each, as it comes, the ratio, or the outcome of a pick that failed there; None where nothing could be
            found out.
        """


def running(policy: Policy, environment: Environment) -> Policy:
    """A policy with those families that the GPU of an environment runs; the policy itself where there is none.

    Raises:
        UnsupportedArchitectureError: it runs none.
    """
    if environment.capability is None:
        return policy
    return policy.on_gpu(environment.gpu_name, environment.capability)


def _require_cupy() -> None:
    if find_spec("cupy") is None:
        raise MissingPackageError(
            "a search runs its candidates in a process that needs the package cupy, which is not installed: "
            "pip install 'attention-autotuner[tune]', or search in your own process with in_process=True "
            "(ATTENTION_AUTOTUNER_IN_PROCESS=1), which a candidate that faults ends",
            name="cupy",
        )


class LocalPipeline:
    """This machine: its compiler, its kernel store, and the CUDA device that is current when this is made.

    Kernels run in a worker, or in this process where the settings say so; the latter ends with a kernel that faults.

    Args:
        policy: whose build target is used where there is no GPU; with one, kernels are built for it natively.
        settings: where the store is, how the compiler is found, and what candidates may take of the GPU.

    Raises:
        SettingsError: ``memory_bytes`` for candidates that run in this process.
    """

    def __init__(self, policy: Policy, settings: Settings) -> None:
        if settings.in_process and settings.memory_bytes is not None:
            raise SettingsError(
                f"memory_bytes={settings.memory_bytes}: bounds the process of a search, and with in_process=True there "
                "is none"
            )
        self._settings = settings
        self._device = current_device()
        self._at_rest = settings.allow_busy
        self.deadline = inf
        tasks = isolated.TORCH_TASKS if settings.in_process else TASKS
        self._worker = Worker(self._device, tasks=tasks)
        self._worker.memory_bytes = settings.memory_bytes
        self._runner = isolated.InProcess(self._device) if settings.in_process else self._worker
        weakref.finalize(self, self._worker.close)
        self.environment = collect(self._device)
        self._target = target_of(self.environment) or BuildTarget(arch=policy.build_arch)

    @property
    def gpu_id(self) -> str:
        """The UUID of the GPU, where the driver says it."""
        with contextlib.suppress(UnsupportedArchitectureError):
            return f"GPU-{cuda_driver().uuid(self._device)}"
        return f"{platform.node()}-{self._device}"

    def build(
        self,
        kernels: Sequence[RenderedKernel],
        progress: Progress,
        stop: Stop = lambda: False,
    ) -> Sequence[Built | Outcome]:
        """See :meth:`Pipeline.build`; the worker starts meanwhile.

        Raises:
            BusyError: the GPU takes no second process.
            MissingPackageError: cupy is missing, which the worker needs.
        """
        if self.can_measure():
            if self._runner is self._worker:
                _require_cupy()
                require_room(self._device)
            self._runner.start()
            Thread(target=import_module, args=(f"{__package__}.remote",)).start()  # with torch
        toolchain = find_toolchain(self._settings)
        before = self.environment
        after = replace(before, nvcc=toolchain.nvcc_version, cutlass=toolchain.cutlass_version)
        if after != before:  # looked at first: several threads may build while another measures
            self.environment = after
        return build(
            list(kernels),
            self._target,
            toolchain=toolchain,
            store=Store(self._settings.cache_dir),
            jobs=self._settings.jobs,
            progress=progress,
            stop=stop,
        )

    def can_measure(self) -> bool:
        """See :meth:`Pipeline.can_measure`."""
        return self.environment.gpu_name is not None and find_spec("torch") is not None

    def _begin(self, deadline: float) -> None:
        """Wait for the GPU to rest before it is first used, and give the worker its deadline.

        Raises:
            BusyError: somebody else is at work on it.
        """
        if not self._at_rest:
            require_rest(self._device)
            self._at_rest = True
        self._worker.deadline = deadline

    def verify(self, problem: Problem, built: Built, *, deterministic: bool) -> Outcome:
        """See :meth:`Pipeline.verify`."""
        self._begin(self.deadline)
        return isolated.verify(self._runner, problem, built, deterministic=deterministic)

    def measure(self, problem: Problem, built: dict[str, Built], **options: Any) -> Raced:
        """See :meth:`Pipeline.measure`."""
        self._begin(self.deadline)
        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
            LOGGER.warning("CUDA_LAUNCH_BLOCKING is set: times hold the host's waits, too")
        entries = {name: (kernel,) for name, kernel in built.items()}
        answer = isolated.measure(self._runner, problem, entries, **options)
        before = self.environment
        self.environment = replace(collect(self._device), nvcc=before.nvcc, cutlass=before.cutlass)
        return answer

    def measure_steps(
        self, problem: Problem, steps: Mapping[str, tuple[Built, Built]], **options: Any
    ) -> Raced:
        """See :meth:`Pipeline.measure_steps`."""
        self._begin(inf)  # a step's budgets are its searches'
        return isolated.measure(self._runner, problem, steps, keep=steps, **options)

    def confirm_all(self, doubts: Sequence[Doubt]) -> Iterator[float | Outcome | None]:
        """See :meth:`Pipeline.confirm_all`."""
        seconds = CONFIRM_SECONDS if len(doubts) == 1 else CONFIRM_EACH_SECONDS
        left = len(doubts)
        try:
            self._worker.renew()
            for doubt in doubts:
                ratio, left = self._confirmed(doubt, seconds), left - 1
                yield ratio
        except ArtifactError as error:
            LOGGER.warning("what was picked is not confirmed: %s", error)
            yield from [None] * left

    def _confirmed(self, doubt: Doubt, seconds: float) -> float | Outcome | None:
        entries = {name: (built,) for name, built in (doubt.default, doubt.pick)}
        timings, interrupted = isolated.measure(
            self._worker, doubt.problem, entries, budget_seconds=seconds, keep=list(entries), seed=1
        )
        if interrupted:
            raise KeyboardInterrupt
        by_name = {timing.name: timing for timing in timings}
        default, pick = by_name[doubt.default[0]], by_name[doubt.pick[0]]
        if not pick.outcome.ok:
            return pick.outcome
        if not default.outcome.ok or not default.samples or not pick.samples:
            return None
        return default.ratio_to_best / pick.ratio_to_best
