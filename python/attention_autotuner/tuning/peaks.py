"""The peaks of a GPU, measured: a small CUDA library is compiled for it and run in a process of its own.

The library is ``templates/peaks/peaks.cu``; it lies in the cache under ``ceilings/<arch>.<digest16>`` and, like a
kernel's, its folder's existence is its validity.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..arch.resolution import native_arch
from ..codegen.artifact import BuildTarget
from ..codegen.environment import template_root
from ..codegen.files import store_errors
from ..codegen.render import include_closure, include_root
from ..codegen.store import Store
from ..codegen.toolchain import Toolchain
from ..codegen.tools import run_tool
from ..core.abi import STATUS_BAD_DEVICE, STATUS_CUDA_ERROR
from ..core.identity import digest16
from ..core.outcome import Infeasible, LaunchFailed, Outcome
from ..core.trust import is_whole, seal
from ..errors import BuildError, ToolchainError
from . import peaks_worker
from .rounds import FaultError
from .worker import Limits, Worker

logger = logging.getLogger(__name__)

# The launch cost comes first: it is about the host, too, and a GPU that was just loaded answers otherwise.
NAMES = (
    "launch",
    "mma_fp16",
    "mma_bf16",
    "wgmma_fp16",
    "wgmma_bf16",
    "exp",
    "fp32",
    "smem",
    "l2",
    "hbm_copy",
)
SECONDS = 1.0  # of timed samples for each, after a warm-up of 0.4 s
START_SECONDS = 60.0  # for a process to come up
# For CUDA to come up, and for the warm-up and set-up of one, beside its samples.
EACH_SECONDS = 60.0
COMPILE_SECONDS = 600.0
LOG_CHARACTERS = 2000
LIBRARY = "peaks.so"

Progress = Callable[[str, "Peak | Outcome"], None]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """One measured rate.

    Attributes:
        value: median of the samples, in ``unit``.
        unit: ``FLOP/s``, ``results/s``, ``bytes/s`` or ``s``.
        spread: half the distance between the quartiles, in ``unit``.
        samples: how many timings.
        sm_clock_hz: of the SM meanwhile; 0 where it was not looked at.
        seconds: that the timings add up to.
    """

    value: float
    unit: str
    spread: float
    samples: int
    sm_clock_hz: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


Peaks = Mapping[str, Peak | Outcome]


def names_for(compute_capability: tuple[int, int]) -> tuple[str, ...]:
    """The peaks that can be measured on a GPU: wgmma on capability 9.0 alone."""
    return tuple(
        name for name in NAMES if not name.startswith("wgmma") or compute_capability == (9, 0)
    )


def target_of(compute_capability: tuple[int, int]) -> BuildTarget:
    """The build target of the library: the GPU itself, with what is its architecture's alone on 9.0."""
    arch = native_arch(compute_capability)
    return BuildTarget(arch="90a", ptx=False) if arch == "90" else BuildTarget(arch=arch)


def build_library(target: BuildTarget, *, toolchain: Toolchain, store: Store) -> Path:
    """The library for a target, compiled unless the cache has it.

    Raises:
        BuildError: it does not compile; the message ends with what the compiler said.
        StoreError: the cache cannot be written, or is not to be trusted.
    """
    source = template_root() / "peaks" / "peaks.cu"
    text = source.read_text(encoding="utf-8")
    identity = digest16("peaks", text, include_closure(text), target.flags(), toolchain.identity())
    folder = store.root / "ceilings" / f"{target.arch}.{identity}"
    if folder.is_dir():
        if is_whole(folder):
            return folder / LIBRARY
        logger.warning("%s is not what was built there: it is built again", folder)
    with store_errors(folder), store.staging() as staging:
        store.discard(folder)
        _compile(source, staging / LIBRARY, target, toolchain)
        seal(staging)
        store.move_in(staging, folder)  # losing the race against another process is as good
    return folder / LIBRARY


def _compile(source: Path, library: Path, target: BuildTarget, toolchain: Toolchain) -> None:
    command: list[str | Path] = [
        toolchain.nvcc,
        *toolchain.cuda_flags,
        "-ccbin",
        toolchain.host_cxx,
    ]
    command += [*target.flags(), "-O3", "-std=c++17", "-DNDEBUG", f"-I{include_root()}"]
    command += ["-cudart", "static", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    command += ["-Xlinker=-z,defs,--exclude-libs,ALL,--gc-sections", source, "-o", library]
    with tempfile.TemporaryDirectory(prefix="attention_autotuner_") as folder:
        try:
            done = run_tool(command, seconds=COMPILE_SECONDS, temporary=Path(folder))
        except ToolchainError as error:
            raise BuildError(f"{source.name} does not compile: {error}") from error
    if done.returncode != 0:
        raise BuildError(
            f"{source.name} does not compile for {target.arch}: {done.stdout[-LOG_CHARACTERS:]}"
        )


def measure_peaks(
    library: Path,
    names: Sequence[str],
    *,
    seconds: float = SECONDS,
    progress: Progress = lambda name, result: None,
) -> dict[str, Peak | Outcome]:
    """Measure peaks of the first visible GPU.

    One that breaks CUDA or kills its process is marked, and the rest are measured in another process.

    Args:
        library: from :func:`build_library`.
        names: of :data:`NAMES`.
        seconds: of timed samples for each.
        progress: told each as it comes.

    Returns:
        For each name, in order: its peak, or why there is none.
    """
    results: dict[str, Peak | Outcome] = {}
    limits = Limits(launch_seconds=EACH_SECONDS + seconds, other_seconds=START_SECONDS)
    with closing(Worker(0, limits=limits, tasks=peaks_worker.__name__)) as worker:
        for name in names:
            try:
                answer = worker.call("measure", library=str(library), which=name, seconds=seconds)
                results[name] = _result(answer)
                if answer.get("status", 0) >= STATUS_CUDA_ERROR:
                    worker.renew()
            except FaultError as fault:
                results[name] = fault.outcome
            progress(name, results[name])
    return results


def _result(answer: Mapping[str, Any]) -> Peak | Outcome:
    if "status" not in answer:
        return Peak(**answer)
    reason = f"{answer['reason']} (status {answer['status']})"
    if answer["status"] == STATUS_BAD_DEVICE:
        return Infeasible(reason=reason)
    return LaunchFailed(reason=reason)
