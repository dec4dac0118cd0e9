"""Kernels for the GPU tests: all kernels of the collected tests, built in one parallel batch and loaded once."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pytest

from attention_autotuner import settings
from attention_autotuner.arch import Policy, probe
from attention_autotuner.arch.resolution import native_arch
from attention_autotuner.codegen.artifact import Artifact, BuildTarget, artifact_digest
from attention_autotuner.codegen.build import build
from attention_autotuner.codegen.entries import LOG
from attention_autotuner.codegen.render import kernel_digest, render
from attention_autotuner.codegen.store import Store
from attention_autotuner.codegen.toolchain import Toolchain, find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.resources import smem_bytes
from attention_autotuner.serving import loader

CARRIED = "candidates.json"  # next to the kernels of a store that was built for another machine


class NeedsKernel(Protocol):
    """A test's parameter that runs a kernel."""

    def candidate(self, present: Policy) -> Candidate:
        """The kernel under the policy of the present GPU."""


class KernelPool:
    """Built kernels of the present GPU, in the store of the settings in force, where dispatch finds them too.

    Args:
        present: policy of the present GPU.
        carried: store with kernels that another machine built for this GPU, see :func:`adopt`; None without one.
    """

    def __init__(self, present: Policy, carried: Path | None = None) -> None:
        self.present = present
        self.built: dict[Candidate, Artifact | Outcome] = {}
        self.seconds = 0.0
        gpu = probe()
        self._target = BuildTarget(arch=native_arch(gpu.compute_capability))
        self._smem_limit = gpu.smem_per_block_bytes
        self.adopted = 0
        if carried is not None:
            in_force = settings.current()
            self.adopted = adopt(
                carried, Store(in_force.cache_dir), self._target, find_toolchain(in_force)
            )

    def build(self, candidates: Iterable[Candidate]) -> None:
        """Build the kernels that fit this GPU's shared memory, in one batch."""
        fitting = [
            candidate
            for candidate in dict.fromkeys(candidates)
            if smem_bytes(candidate) <= self._smem_limit
        ]
        self.built.update(zip(fitting, self.build_for(fitting, self._target), strict=True))

    def build_for(
        self, candidates: Sequence[Candidate], target: BuildTarget
    ) -> list[Artifact | Outcome]:
        """Build for a target of the caller's choice."""
        in_force = settings.current()
        start = time.monotonic()
        results = build(
            [render(candidate) for candidate in candidates],
            target,
            toolchain=find_toolchain(in_force),
            store=Store(in_force.cache_dir),
            jobs=in_force.jobs,
        )
        self.seconds += time.monotonic() - start
        return results

    def kernel(self, candidate: Candidate, device: int = 0) -> loader.LoadedKernel:
        """A prepared kernel; fails the test when the build failed, skips it when the kernel cannot run on this GPU."""
        if smem_bytes(candidate) > self._smem_limit:
            pytest.skip(
                f"{candidate.name} needs {smem_bytes(candidate)} bytes of shared memory a CTA"
            )
        if candidate not in self.built:
            self.build([candidate])
        artifact = self.built[candidate]
        if not isinstance(artifact, Artifact):
            pytest.fail(f"{candidate.name}: {artifact}")
        kernel = loader.load(artifact)
        kernel.prepare(device)
        return kernel.with_launch_knobs(candidate.launch_knobs)

    def summary(self) -> str:
        """One line for the terminal summary."""
        artifacts = [artifact for artifact in self.built.values() if isinstance(artifact, Artifact)]
        if not artifacts:
            return "no kernel was built"
        slowest = max(artifacts, key=lambda artifact: artifact.build_seconds)
        largest = max(artifact.build_peak_bytes for artifact in artifacts) / 2**30
        spilling = sum(bool(artifact.report.loop_spills) for artifact in artifacts)
        return (
            f"{len(artifacts)} of {len(self.built)} kernels in {self.seconds:.0f} s, {self.adopted} carried here; "
            f"slowest {slowest.build_seconds:.1f} s ({slowest.name}), largest {largest:.2f} GiB, {spilling} spill in "
            "their main loop"
        )


def adopt(carried: Path, store: Store, target: BuildTarget, toolchain: Toolchain) -> int:
    """Put kernels that another machine built into a store, where builds and dispatch find them.

    The kernels have the same source and target and keep the record of their compiler; they are stored as if the present
    compiler had built them, so this is for tests with stores of their own.

    Args:
        carried: folder that ``tests.gpu.prebuild`` wrote.
        store: the store to put them into.
        target: the build target; kernels for other targets are left out.
        toolchain: the present toolchain.

    Returns:
        The number of kernels with the present source.

    Raises:
        FileNotFoundError: the folder was not written by ``tests.gpu.prebuild``.
        StoreError: a store cannot be read or written.
    """
    source, taken = Store(carried), 0
    configs = json.loads((carried / CARRIED).read_text(encoding="utf-8"))
    random.shuffle(configs)  # processes that do the same at once share the work
    for config in configs:
        kernel = render(candidate_from_config(config))
        artifacts = source.find(kernel.candidate, kernel_digest(kernel), target)
        if not artifacts:
            continue
        taken += 1
        if store.get(kernel, target, toolchain) is None:
            log = artifacts[0].path.with_name(LOG).read_text(encoding="utf-8")
            store.publish(
                source=kernel.text,
                library=artifacts[0].path,
                log=log,
                artifact=replace(artifacts[0], digest=artifact_digest(kernel, target, toolchain)),
            )
    return taken


def needed(items: Sequence[pytest.Item], present: Policy) -> list[Candidate]:
    """The kernels that collected tests need.

    A test declares its kernels by a parameter of the protocol :class:`NeedsKernel` or with a method ``kernels_of``, a
    module by ``PROBLEMS``, whose default kernels dispatch will look up.
    """
    wanted: dict[Candidate, None] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        parameters: dict[str, Any] = callspec.params if callspec is not None else {}
        for value in parameters.values():
            if hasattr(value, "kernels_of"):
                wanted |= dict.fromkeys(value.kernels_of(present))
            elif hasattr(value, "candidate"):
                wanted.setdefault(value.candidate(present))
    modules = (getattr(item, "module", None) for item in items)
    listed = (getattr(module, "PROBLEMS", ()) for module in modules)
    problems: dict[Problem, None] = dict.fromkeys(chain(*listed))
    for problem in problems:
        wanted.setdefault(present.default(problem))
    return list(wanted)
