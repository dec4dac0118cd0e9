"""The kernel that serves a problem on a device, loaded and ready.

Decisions of this process come first, then the cache hierarchy of :mod:`.picks`. :func:`kernel_for` loads the pick's
library from the store, or builds it. Dispatch tunes only if the mode says so, and reads no file for a known decision.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from .. import errors
from .. import settings as settings_module
from ..arch import Policy, detect, probe
from ..arch.resolution import native_arch
from ..codegen.bundle import LAYERS
from ..codegen.installed import bundles as installed_bundles
from ..codegen.obtain import at_hand, obtain
from ..codegen.toolchain import Toolchain, find_toolchain
from ..core.candidate import Candidate
from ..core.memo import Bounded, Table, remembered
from ..core.problem import Problem
from ..kernels.resources import smem_bytes
from ..settings import Settings
from ..tuning import search
from ..tuning.bundled import bundled_pick
from ..tuning.environment import Environment, collect
from .loader import LoadedKernel, load
from .picks import CacheHierarchy, Pick
from .siblings import warm_sibling
from .untuned import Buckets, take_untuned

_log = logging.getLogger(__name__)

MAX_MEMO = 16384  # decisions remembered; beyond that the oldest are dropped
MAX_SETTINGS = 16  # different settings whose decisions are remembered
_WARM_UP = "call it once outside graph capture, with the same shapes and dtype"


def lookup(
    problem: Problem, policy: Policy, *, device: int = 0, settings: Settings | None = None
) -> Pick:
    """Decide which candidate serves a problem; builds and loads nothing.

    Args:
        problem: as called.
        policy: whose candidates and records; compared by identity, so keep the object for the next call.
        device: CUDA device index, for the environment that records are compared with.
        settings: those in force by default.

    Raises:
        NoCandidateError: the policy has nothing legal for it.
    """
    decisions = _decisions(settings or settings_module.current())
    pick = decisions.picks.get((problem, policy, device))
    return pick if pick is not None else decisions.decide(problem, policy, device)


def kernel_for(
    problem: Problem,
    policy: Policy,
    *,
    device: int,
    must_be_warm: bool = False,
    settings: Settings | None = None,
) -> LoadedKernel:
    """The kernel that serves a problem, loaded and prepared; built first where the store lacks it.

    Args:
        problem: as called.
        policy: whose candidates and records.
        device: CUDA device index; must be the calling thread's current device.
        must_be_warm: do nothing that is illegal under CUDA-graph capture.
        settings: those in force by default.

    Raises:
        NotWarmError: ``must_be_warm``, and no kernel of the problem's class has been built, loaded and prepared.
        UnsupportedArchitectureError: the policy's kernels cannot run on the device.
        NoCandidateError: neither the tuned pick nor the default can be had; the message says why for each.
        UntunedError: no measured pick is known, and the settings want one.
        ToolchainError, StoreError: a kernel must be built, and there is no compiler or no writable cache.
        BuildError, ArtifactError: the default, being the pick, does not build or load.
    """
    decisions = _decisions(settings or settings_module.current())
    kernel = decisions.served.get((problem, policy, device))
    return kernel or decisions.serve(problem, policy, device, must_be_warm)


def pinned_kernel(
    candidate: Candidate, policy: Policy, *, device: int, must_be_warm: bool = False
) -> LoadedKernel:
    """The kernel of a candidate that the caller names and that alone serves; otherwise as :func:`kernel_for`."""
    return _decisions(settings_module.current()).pinned(candidate, policy, device, must_be_warm)


class _Decisions:
    """The decisions of this process under given settings.

    Warm reads are single dict look-ups and take no lock; everything else holds it.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.picks: Bounded[Any, Pick] = Bounded(MAX_MEMO)
        self.served: Bounded[Any, LoadedKernel] = Bounded(MAX_MEMO)
        self._lock = threading.RLock()
        self._rounded: Bounded[Any, Pick] = Bounded(MAX_MEMO)
        self._buckets = Buckets()
        self._kernels: dict[tuple[Candidate, int], LoadedKernel] = {}
        self._failed: dict[tuple[Candidate, int], str] = {}
        self._searched: set[Any] = set()
        self._hierarchy = CacheHierarchy(settings)

    def forget(self) -> None:
        """Drop the picks, keep the kernels."""
        with self._lock:
            self.served.clear()
            self._forget_picks()
            self._searched.clear()
            self._failed.clear()

    def _forget_picks(self) -> None:
        """Drop the picks, but for those that are frozen."""
        for key in list(self._rounded):
            if self.settings.mode_of(key[0].direction) != "frozen":
                del self._rounded[key]
        self._buckets.clear()
        self.picks.clear()

    def decide(self, problem: Problem, policy: Policy, device: int) -> Pick:
        """The pick for the problem's rounded lengths, remembered for both."""
        with self._lock:
            rounded = (problem.rounded(), policy, device)
            pick = self._rounded.get(rounded)
            if pick is None:
                here = environment_of(device, self.settings)
                there = self._hierarchy.environment_of(policy, here)
                bucket = (problem.bucketed(), policy, device)
                known = self._buckets.unrecorded.get(bucket)
                pick, _ = self._hierarchy.choose(problem, policy, there, unrecorded=known)
                self._rounded.remember(rounded, pick)
                self._buckets.note(bucket, pick)
                served = f"{rounded[0].describe()}, from {pick.layer}"
                reason = pick.reason or "it is first"
                _log.debug("%s serves %s: %s", pick.candidate.name, served, reason)
            self.picks.remember((problem, policy, device), pick)
        return pick

    def serve(
        self, problem: Problem, policy: Policy, device: int, must_be_warm: bool
    ) -> LoadedKernel:
        """See :func:`kernel_for`."""
        with self._lock:
            policy, asked = running_on(policy, device), policy
            pick = lookup(problem, policy, device=device, settings=self.settings)
            if self._wants_search(problem, policy, device, pick):
                if must_be_warm:
                    raise errors.NotWarmError(
                        f"{problem.describe()} is to be tuned first: {_WARM_UP}"
                    )
                pick = self._search(problem, policy, device)
            if pick.layer == "default":
                take_untuned(problem, policy.name, self.settings)
            try:
                kernel = self._first_that_works(problem, policy, device, pick, must_be_warm)
            except errors.NotWarmError:
                frozen = self.settings.mode_of(problem.direction) == "frozen"
                if frozen or not (warm := warm_sibling(problem, policy, self._kernels, device)):
                    raise
                return warm
            self.served.remember((problem, asked, device), kernel)
        return kernel

    def pinned(
        self, candidate: Candidate, policy: Policy, device: int, must_be_warm: bool
    ) -> LoadedKernel:
        """See :func:`pinned_kernel`."""
        with self._lock:
            return self._ready(candidate, policy, device, must_be_warm)

    def _wants_search(self, problem: Problem, policy: Policy, device: int, pick: Pick) -> bool:
        return (
            self.settings.mode_of(problem.direction) == "tune"
            and self.settings.effort != "none"
            and (pick.layer == "default" or self.settings.always_tune)
            and (problem.bucketed(), policy, device) not in self._searched
        )

    def _search(self, problem: Problem, policy: Policy, device: int) -> Pick:
        """Tune, then decide again; a search that fails is logged and leaves the default in place."""
        self._searched.add((problem.bucketed(), policy, device))
        _log.warning("tuning for %s (mode is tune)", problem.describe())
        try:
            with settings_module.override(**vars(self.settings)):
                search.tune(problem, policy)
        except errors.AttentionAutotunerError as error:
            _log.warning("tuning for %s failed: %s", problem.describe(), error)
        self._forget_picks()
        return self.decide(problem, policy, device)

    def _first_that_works(
        self, problem: Problem, policy: Policy, device: int, pick: Pick, must_be_warm: bool
    ) -> LoadedKernel:
        """The pick's kernel, or, if it cannot be had, a bundle's or the default's."""
        # Frozen, what is at hand, or fails today, decides nothing.
        if self.settings.mode_of(problem.direction) == "frozen":
            return self._ready(pick.candidate, policy, device, must_be_warm)
        stand_in = self._stand_in(problem, policy, device, pick)
        if stand_in is not None:
            try:
                return self._ready(stand_in, policy, device, must_be_warm)
            except errors.DeviceMemoryError:
                raise
            except errors.ArtifactError as error:
                self._failed[stand_in, device] = str(error)
                _log.warning("a kernel of a bundle cannot be used: %s", error)
        if pick.layer == "default" or pick.candidate == policy.untuned(problem):
            return self._ready(pick.candidate, policy, device, must_be_warm)
        reason = self._failed.get((pick.candidate, device))
        if reason is None:
            try:
                return self._ready(pick.candidate, policy, device, must_be_warm)
            except errors.DeviceMemoryError:
                raise  # it would work another time, and the default would not work now
            except (errors.ArtifactError, errors.BuildError) as error:
                reason = self._failed[pick.candidate, device] = str(error)
                _log.warning("the tuned pick cannot be used, the default serves: %s", error)
        try:
            return self._ready(policy.untuned(problem), policy, device, must_be_warm)
        except (errors.ArtifactError, errors.BuildError) as error:
            raise errors.NoCandidateError(
                f"no kernel for {problem.describe()}: the tuned pick: {reason}; the default: {error}"
            ) from error

    def _stand_in(
        self, problem: Problem, policy: Policy, device: int, pick: Pick
    ) -> Candidate | None:
        """The kernel that an installed bundle has for a problem whose pick would have to be compiled first.

        The user's own record is compiled wherever it can be: it was measured to be worth that. Where mode is off, only
        a bundle's defaults count.
        """
        settings, arch = self.settings, native_arch(probe(device).compute_capability)
        bundles = installed_bundles(settings)
        if (
            not bundles
            or (pick.candidate, device) in self._kernels
            or at_hand(pick.candidate, arch, settings=settings) is not None
            or (pick.layer == "record" and _toolchain(settings) is not None)
        ):
            return None
        layers = LAYERS if settings.mode_of(problem.direction) != "off" else LAYERS[-1:]
        for bundle in bundles:
            if bundle.arch != policy.name:
                continue
            bundled = bundled_pick(bundle, problem, layers=layers, proven=settings.strict_proof)
            if (
                bundled is not None
                and bundled.candidate.family in policy.families
                and (bundled.candidate, device) not in self._failed
                and at_hand(bundled.candidate, arch, settings=settings) is not None
            ):
                _log.info(
                    "%s of %s serves %s in place of %s, which has yet to be built (`attention-autotuner warmup`)",
                    bundled.candidate.name,
                    bundle.root,
                    problem.describe(),
                    pick.candidate.name,
                )
                return bundled.candidate
        return None

    def _ready(
        self, candidate: Candidate, policy: Policy, device: int, must_be_warm: bool
    ) -> LoadedKernel:
        kernel = self._kernels.get((candidate, device))
        if kernel is not None:
            return kernel
        if must_be_warm:
            raise errors.NotWarmError(
                f"{candidate.name} has to be built, loaded or prepared first: {_WARM_UP}"
            )
        gpu = probe(device)
        needed, offered = smem_bytes(candidate), gpu.smem_per_block_bytes
        if needed > offered:
            raise errors.UnsupportedArchitectureError(
                f"{candidate.name} of {policy.spec.name} needs {needed} bytes of shared memory, {gpu.name} gives a CTA "
                f"{offered}: use device_type=None for the GPU at hand"
            )
        artifact = obtain(candidate, native_arch(gpu.compute_capability), settings=self.settings)
        kernel, wanted = load(artifact), candidate.compiled.name
        if kernel.info.name != wanted:
            # Another kernel, of the other direction even, would take these params for its own.
            raise errors.ArtifactError(f"{kernel.path} holds {kernel.info.name}, wanted {wanted}")
        kernel.prepare(device)
        if candidate.launch_knobs:
            kernel = kernel.with_launch_knobs(candidate.launch_knobs)
        self._kernels[candidate, device] = kernel
        return kernel


_lock = threading.Lock()


class _DecisionTable(Table[Settings, _Decisions]):
    """The decisions of this process by settings.

    Attributes:
        latest: the settings asked for last and their decisions, to be compared by identity.
        generation: grows whenever earlier answers may be out of date, and never falls.
    """

    def __init__(self) -> None:
        super().__init__("dispatch.decisions", bound=MAX_SETTINGS)
        self.latest: tuple[Settings | None, _Decisions | None] = (None, None)
        self.generation = 0

    def clear(self) -> None:
        """Forget all decisions, and with them what follows from them."""
        with _lock:
            super().clear()
            self.latest = (None, None)
            self.generation += 1

    def invalidate(self) -> None:
        """Have all decisions made again."""
        with _lock:
            for decisions in self.values():
                decisions.forget()
            self.generation += 1


_by_settings = _DecisionTable()


def _decisions(settings: Settings) -> _Decisions:
    """The decisions under these settings; hashing them each time would cost more than the look-up."""
    known, decisions = _by_settings.latest
    if known is not settings or decisions is None:
        with _lock:
            decisions = _by_settings.get(settings)
            if decisions is None:
                decisions = _Decisions(settings)
                _by_settings.remember(settings, decisions)
            _by_settings.latest = (settings, decisions)
    return decisions


@remembered("dispatch.environments")
def environment_of(device: int, settings: Settings) -> Environment:
    """This machine's environment; the compiler's version matters only where versions are strict."""
    toolchain = _toolchain(settings) if settings.strict_versions else None
    if toolchain is None:  # where nothing is compiled, there is no version to compare
        return collect(device, state=False)
    return collect(
        device, state=False, nvcc=toolchain.nvcc_version, cutlass=toolchain.cutlass_version
    )


def _toolchain(settings: Settings) -> Toolchain | None:
    """The compiler here and what belongs to it, if any."""
    try:
        return find_toolchain(settings)
    except errors.ToolchainError:
        return None


@remembered("dispatch.policies")
def running_on(policy: Policy, device: int) -> Policy:
    """A policy with those families that the device runs; warns, once, of a policy made for another GPU.

    Raises:
        UnsupportedArchitectureError: it runs none.
    """
    gpu = probe(device)
    running = policy.on_gpu(gpu.name, gpu.compute_capability)
    present = detect(device)
    if present.spec.name != policy.spec.name:
        _log.warning(
            "kernels chosen for %s run on %s: right, but not the fastest it can do",
            policy.spec.name,
            gpu.name,
        )
    return running


def generation() -> int:
    """A number that grows whenever earlier answers may be out of date."""
    return _by_settings.generation


def invalidate() -> None:
    """Make every decision again from now on, e.g. after records changed; kernels stay loaded and prepared."""
    _by_settings.invalidate()
