"""A GPU that nobody described: its limits, its peaks, its spec, and the picks of a sweep, within one budget.

:class:`Machine` is what this does to the world. What comes out is kept in the cache, and written as files that can be
put into the package.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..arch import measured_specs
from ..arch.measured_specs import MeasuredSpec
from ..arch.policy import Policy
from ..arch.probe import DeviceProperties, probe
from ..arch.resolution import from_properties, policy_with
from ..codegen.files import write_json
from ..codegen.jobs import available_cores, job_count
from ..codegen.store import Store
from ..codegen.toolchain import find_toolchain
from ..core.identity import slug
from ..core.outcome import Outcome
from ..core.problem import Problem
from ..core.trust import read_json
from ..errors import AttentionAutotunerError
from ..settings import Settings
from . import peaks as peaks_module
from .environment import Environment, collect
from .locking import storing
from .peaks import Peak, Peaks
from .pipeline import LocalPipeline, Pipeline
from .printing import printed
from .progress import Listener, Progress
from .records import RecordStore
from .shipped import shipped_name
from .shipping import evidence_path, ship, shipped
from .spec_measuring import expected_peaks, keep, measured_spec
from .sweep import Sweep, SweepResult
from .sweep_plan import Plan, make_plan

SCHEMA = 1  # of the report
BUDGET_SECONDS = 540.0
GPU_PHASES = ("ceilings", "verify", "race", "confirm")
FOLDER = "bring_up"  # under the cache folder
# The part of a report that is about a sweep, where there was none.
NO_SWEEP: dict[str, Any] = {"kernels": None, "failures": {}, "problems": [], "exhausted": False}


@dataclass(kw_only=True)
class Machine:
    """This machine and its first visible GPU; tests bring up another.

    Attributes:
        settings: where the cache is, and how the compiler is found.
    """

    settings: Settings

    def properties(self) -> DeviceProperties:
        """The limits that the GPU reports."""
        return probe(0)

    def environment(self) -> Environment:
        """The environment that stands beside every figure."""
        return collect()

    def measure_peaks(
        self,
        capability: tuple[int, int],
        seconds: float,
        progress: Callable[[str, Peak | Outcome], None],
    ) -> Peaks:
        """Build the library and measure everything that this compute capability has."""
        library = peaks_module.build_library(
            peaks_module.target_of(capability),
            toolchain=find_toolchain(self.settings),
            store=Store(self.settings.cache_dir),
        )
        names = peaks_module.names_for(capability)
        return peaks_module.measure_peaks(library, names, seconds=seconds, progress=progress)

    def pipeline(self, policy: Policy) -> Pipeline:
        """The pipeline that builds, verifies and measures kernels here."""
        return LocalPipeline(policy, self.settings)

    def jobs(self) -> int:
        """Compilations at once: a core is left to what is measured meanwhile."""
        cores = available_cores()
        if self.settings.jobs is not None:
            return self.settings.jobs
        return job_count(max(1, cores - 1) if cores > 2 else cores)


@dataclass(frozen=True, kw_only=True)
class BroughtUp:
    """The result of bringing a GPU up.

    Attributes:
        properties: the GPU's own limits.
        described: the policy that it would have had without this.
        policy: the policy that it has now.
        measured: its spec with sources.
        peaks: what was measured.
        reused: the peaks are an earlier run's.
        plan: what the sweep was to do; None where nothing can be measured.
        sweep: how it ended; None likewise.
        seconds: wall time by phase, with ``total``.
        environment: of the run.
        interrupted: stopped by Ctrl-C.
        files: what was written, by what it is.
    """

    properties: DeviceProperties
    described: Policy
    policy: Policy
    measured: MeasuredSpec
    peaks: Peaks
    reused: bool
    plan: Plan | None
    sweep: SweepResult | None
    seconds: Mapping[str, float]
    environment: Environment
    interrupted: bool
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def why_no_sweep(self) -> str:
        """Why there was none; empty where there was."""
        no_sweep = "kernels cannot be run here: torch is missing, or sees no GPU"
        return no_sweep if self.sweep is None else ""

    @property
    def gpu_seconds(self) -> float:
        """Seconds in which the GPU was measured on or checked with."""
        return sum(self.seconds.get(phase, 0.0) for phase in GPU_PHASES)

    @property
    def roofline(self) -> dict[str, float]:
        """The fastest tensor rate that was measured, FLOP/s, and the copy's bandwidth, bytes/s."""
        rates = {name: peak.value for name, peak in self.peaks.items() if isinstance(peak, Peak)}
        tensor = [rate for name, rate in rates.items() if "mma_" in name]
        roofline = {"tensor_flops_per_second": max(tensor)} if tensor else {}
        if "hbm_copy" in rates:
            roofline["hbm_bytes_per_second"] = rates["hbm_copy"]
        return roofline

    def to_json(self) -> dict[str, Any]:
        """The report."""
        return {
            "schema": SCHEMA,
            "gpu_name": self.properties.name,
            "policy": self.policy.name,
            "properties": asdict(self.properties),
            "environment": self.environment.to_json(),
            "seconds": dict(self.seconds),
            "gpu_seconds": self.gpu_seconds,
            "ceilings_reused": self.reused,
            "ceilings": {name: result.to_json() for name, result in self.peaks.items()},
            "peaks": self.roofline,
            "expected": expected_peaks(self.described),
            "spec": self.measured.to_json()["spec"],
            "sources": dict(self.measured.sources),
            "plan": None if self.plan is None else self.plan.to_json(),
            **(NO_SWEEP if self.sweep is None else self.sweep.to_json()),
            "why_no_sweep": self.why_no_sweep,
            "interrupted": self.interrupted,
            "files": {name: str(path) for name, path in self.files.items()},
        }


def bring_up(
    machine: Machine,
    problems: Sequence[Problem],
    settings: Settings,
    *,
    budget_seconds: float = BUDGET_SECONDS,
    peak_seconds: float = peaks_module.SECONDS,
    output: Path | None = None,
    again: bool = False,
    listener: Listener | None = None,
) -> BroughtUp:
    """Probe, measure, describe, tune, and write it all down.

    Args:
        machine: where.
        problems: what to tune for.
        settings: whose cache keeps the spec and the records.
        budget_seconds: wall time for all of it.
        peak_seconds: of timed samples for each peak.
        output: folder for the files; by default one in the cache.
        again: measure what was measured before, too.
        listener: told about progress.

    Raises:
        UnsupportedArchitectureError: there is no GPU, or it is older than 8.0.
        ToolchainError, BuildError, StoreError: the compiler is missing or fails; a folder cannot be written.
        RecordError: the picks that the folder holds are damaged; nothing was measured.
    """
    progress = Progress(printed(listener) if settings.print_tuning else listener, None)
    start = time.monotonic()
    seconds: dict[str, float] = {}
    properties = machine.properties()
    described = from_properties(properties)
    environment = machine.environment()
    folder = output or settings.cache_dir / FOLDER / slug(properties.name)
    _check_folder(measured_specs.user_path(settings.cache_dir, properties.name).parent)
    _check_folder(folder)
    shipped(folder, properties.name)  # or what was tuned could not be put beside it
    kept = None if again else _kept(properties, environment, folder, settings)
    if kept is not None:
        measured, peaks, policy = kept
    else:
        peaks = _measure_peaks(machine, properties, peak_seconds, progress)
        measured = measured_spec(described, properties, peaks, environment)
        policy = keep(measured, properties.name, settings.cache_dir)
    seconds["ceilings"] = time.monotonic() - start
    plan = sweep = None
    pipeline = machine.pipeline(policy)
    if pipeline.can_measure():
        before = time.monotonic()
        left = budget_seconds - (before - start)
        plan = make_plan(problems, policy, budget_seconds=left, jobs=machine.jobs())
        seconds["plan"] = time.monotonic() - before
        sweep = Sweep(
            plan=plan,
            policy=policy,
            pipeline=pipeline,
            records=RecordStore(settings.cache_dir / "records"),
            budget_seconds=left - seconds["plan"],
            fresh=again or settings.always_tune,
            printing=settings.print_tuning,
            progress=progress,
        ).run()
        seconds |= sweep.seconds
    seconds["total"] = time.monotonic() - start
    result = BroughtUp(
        properties=properties,
        described=described,
        policy=policy,
        measured=measured,
        peaks=peaks,
        reused=kept is not None,
        plan=plan,
        sweep=sweep,
        seconds=seconds,
        environment=pipeline.environment,
        interrupted=sweep is not None and sweep.interrupted,
        files=_files(folder, properties.name),
    )
    _write(result, folder)
    return result


def _measure_peaks(
    machine: Machine, properties: DeviceProperties, seconds: float, shown: Progress
) -> Peaks:
    names = peaks_module.names_for(properties.compute_capability)

    def progress(name: str, result: Peak | Outcome) -> None:
        said = f"{result.value:.3e} {result.unit}" if isinstance(result, Peak) else result.reason
        shown.tell("peaks", names.index(name) + 1, len(names), f"{name}: {said}")

    shown.tell("peaks", 0, len(names), "compiling")
    return machine.measure_peaks(properties.compute_capability, seconds, progress)


# --- files ----------------------------------------------------------------------------------------


def _files(folder: Path, gpu_name: str) -> dict[str, Path]:
    name = slug(gpu_name)
    return {
        "spec": folder / f"{name}.spec.json",
        "picks": folder / shipped_name(gpu_name),
        "evidence": evidence_path(folder, gpu_name),
        "properties": folder / f"{name}.properties.json",
        "report": folder / f"{name}.bring_up.json",
    }


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before minutes are spent on what goes into it."""
    with storing(f"write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def _write(result: BroughtUp, folder: Path) -> None:
    """Write the files: the spec for ``arch/measured``, the picks for ``tuned``, properties, and the report."""
    paths = result.files
    with storing(f"write to {folder}"):
        write_json(paths["spec"], result.measured.to_json())
        write_json(paths["properties"], asdict(result.properties))
        settled = () if result.sweep is None else result.sweep.settled
        sure = [item.record for item in settled if item.status in ("measured", "recorded")]
        ship(folder, result.properties.name, [record for record in sure if record is not None])
        write_json(paths["report"], result.to_json())


def _kept(
    properties: DeviceProperties, environment: Environment, folder: Path, settings: Settings
) -> tuple[MeasuredSpec, Peaks, Policy] | None:
    """The measurements of an earlier run on this GPU under this driver, if its spec and its report are both here."""
    path = measured_specs.user_path(settings.cache_dir, properties.name)
    report = _files(folder, properties.name)["report"]
    try:
        measured = measured_specs.read(path)
        policy = policy_with(measured)
        said = read_json(report)
        peaks = {name: Peak(**data) for name, data in said["ceilings"].items()}
    except (AttentionAutotunerError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # missing, damaged, or a peak that failed: measured again, and replaced
    same = measured.environment.get("driver") == environment.driver and measured.fits(properties)
    return (measured, peaks, policy) if same else None
