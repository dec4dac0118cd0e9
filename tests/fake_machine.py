"""Fake machine on which a GPU is brought up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attention_autotuner.arch import DeviceProperties, Policy
from attention_autotuner.codegen.build import Progress
from attention_autotuner.codegen.render import RenderedKernel
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.settings import Settings
from attention_autotuner.tuning.bring_up import Machine
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.peaks import Peak, Peaks, names_for
from attention_autotuner.tuning.pipeline import Built, Doubt
from attention_autotuner.tuning.racing import Timing
from tests.devices import H200
from tests.fake_pipeline import FakePipeline

ENVIRONMENT = Environment(
    gpu_name="NVIDIA H200",
    num_sms=132,
    compute_capability="9.0",
    driver="580.95.05",
    torch="2.13.0",
    time_utc="2026-11-21T12:00:00+00:00",
)


def peak(value: float, unit: str, mhz: float) -> Peak:
    return Peak(
        value=value, unit=unit, spread=value / 500, samples=11, sm_clock_hz=mhz * 1e6, seconds=1.0
    )


# Near published figures of an H200: 2688 FLOP a clock of mma.sync, copies of 4.27 TB/s, GEMMs of 730 to 797 TFLOP/s.
PEAKS: dict[str, Peak | Outcome] = {
    "launch": peak(2.3e-6, "s", 0),
    "mma_fp16": peak(632e12, "FLOP/s", 1785),
    "mma_bf16": peak(630e12, "FLOP/s", 1780),
    "wgmma_fp16": peak(790e12, "FLOP/s", 1480),
    "wgmma_bf16": peak(785e12, "FLOP/s", 1475),
    "exp": peak(4.15e12, "results/s", 1980),
    "fp32": peak(66.1e12, "FLOP/s", 1965),
    "smem": peak(33.2e12, "bytes/s", 1980),
    "l2": peak(7.1e12, "bytes/s", 1900),
    "hbm_copy": peak(4.27e12, "bytes/s", 0),
}


@dataclass
class FakeSweepPipeline(FakePipeline):
    """A pipeline that confirms many picks at once and may be slow to build; several threads request builds."""

    environment: Environment = ENVIRONMENT
    build_seconds: float = 0.0
    confirm_ratio: Callable[[Doubt], float | None] = lambda doubt: 1.1
    asked: list[list[str]] = field(default_factory=list)
    raced_while_building: int = 0
    _building: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def build(
        self,
        kernels: Sequence[RenderedKernel],
        progress: Progress,
        stop: Callable[[], bool] = lambda: False,
    ) -> Sequence[Built | Outcome]:
        with self._lock:
            self._building += 1
        time.sleep(self.build_seconds)
        with self._lock:
            self._building -= 1
            return super().build(kernels, progress, stop)

    def measure(self, *arguments: Any, **options: Any) -> tuple[list[Timing], bool]:
        self.raced_while_building += self._building > 0
        return super().measure(*arguments, **options)

    def confirm_all(self, doubts: Sequence[Doubt]) -> list[float | None]:
        self.asked.append([doubt.pick[0] for doubt in doubts])
        return [self.confirm_ratio(doubt) for doubt in doubts]


@dataclass(kw_only=True)
class FakeMachine(Machine):
    """A machine with one GPU whose kernels a :class:`FakeSweepPipeline` times."""

    settings: Settings = field(default_factory=Settings)
    device: DeviceProperties = H200
    peaks: Peaks = field(default_factory=lambda: dict(PEAKS))
    work: FakeSweepPipeline = field(default_factory=FakeSweepPipeline)
    job_count: int = 2
    measured: list[tuple[str, ...]] = field(default_factory=list)
    policies: list[Policy] = field(default_factory=list)

    def properties(self) -> DeviceProperties:
        return self.device

    def environment(self) -> Environment:
        return self.work.environment

    def measure_peaks(
        self,
        capability: tuple[int, int],
        seconds: float,
        progress: Callable[[str, Peak | Outcome], None],
    ) -> Peaks:
        names = names_for(capability)
        self.measured.append(names)
        for name in names:
            progress(name, self.peaks[name])
        return {name: self.peaks[name] for name in names}

    def pipeline(self, policy: Policy) -> FakeSweepPipeline:
        self.policies.append(policy)
        return self.work

    def jobs(self) -> int:
        return self.job_count
