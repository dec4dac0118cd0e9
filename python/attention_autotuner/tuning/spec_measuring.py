"""From what a device says and what was measured on it to its spec, with the source of every field.

Rates are a clock's worth, in the clocks that each measurement ran at: a GPU that lowers its clock under tensor load has
the same rates per clock, and :attr:`~..arch.spec.ArchSpec.sm_clock_mhz` is the clock under that load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ..arch.measured_specs import LIMITS, MeasuredSpec, limits_of, user_path
from ..arch.policy import Policy
from ..arch.probe import DeviceProperties
from ..arch.resolution import KNOWN, forget_measured, policy_with
from ..arch.spec import ArchSpec
from ..codegen.files import write_json
from ..core.trust import make_folder
from .environment import Environment
from .locking import storing
from .peaks import Peak, Peaks

MHZ = 1e6


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The derivation of a field of a spec from a peak.

    Attributes:
        peaks: those that the field is the rate of; it is taken from the first.
        per_clock: whether the field is a clock's worth.
        per_sm: whether the field is one SM's share.
        per_unit: of the peak's unit, in one of the field's.
    """

    peaks: tuple[str, ...]
    per_clock: bool = True
    per_sm: bool = True
    per_unit: float = 1.0

    def scale(self, clock_hz: float, num_sms: int) -> float:
        """The peak's value where the field is 1."""
        clocks = clock_hz if self.per_clock else 1.0
        return self.per_unit * clocks * (num_sms if self.per_sm else 1)


RATES: Mapping[str, Measured] = {
    "mma_flops_per_clk_per_sm": Measured(peaks=("mma_fp16", "mma_bf16")),
    "wgmma_flops_per_clk_per_sm": Measured(peaks=("wgmma_fp16", "wgmma_bf16")),
    "exp_per_clk_per_sm": Measured(peaks=("exp",)),
    "fp32_lanes_per_clk_per_sm": Measured(peaks=("fp32",), per_unit=2.0),  # an FMA counts twice
    "smem_bytes_per_clk_per_sm": Measured(peaks=("smem",)),
    "l2_bytes_per_clk": Measured(peaks=("l2",), per_sm=False),
    "hbm_bytes_per_second": Measured(peaks=("hbm_copy",), per_clock=False, per_sm=False),
    "launch_overhead_us": Measured(peaks=("launch",), per_clock=False, per_sm=False, per_unit=1e-6),
}
CLOCK_FROM = "mma_fp16"


def expected_peaks(policy: Policy) -> dict[str, float]:
    """The peaks that a policy's spec promises, each in its unit; wgmma only where there is some."""
    spec = policy.spec
    promised: dict[str, float] = {}
    for name, how in RATES.items():
        value = getattr(spec, name) * how.scale(spec.sm_clock_mhz * MHZ, spec.num_sms)
        promised |= dict.fromkeys(how.peaks, value)
    return {name: value for name, value in promised.items() if value > 0}


def measured_spec(
    policy: Policy, properties: DeviceProperties, peaks: Peaks, environment: Environment
) -> MeasuredSpec:
    """The spec of a device.

    Args:
        policy: what the device gets without measuring: its policy, and what could not be measured.
        properties: of the device.
        peaks: what was measured; failures leave the policy's numbers.
        environment: of the measurement.
    """
    known = any(type(policy) is known_policy for _, known_policy in KNOWN)
    before = "policy's" if known else "generation's"
    date = (environment.time_utc or "")[:10]
    here = f"measured on {properties.name}, {date}, driver {environment.driver or 'unknown'}"
    spec = policy.spec
    values: dict[str, float] = {}
    sources = {
        "name": "the device's name without the vendor's words" if not known else "the policy's",
        "device_names": "driver" if not known else "the policy's",
        "compute_capability": "driver",
        "max_registers_per_thread": "CUDA C++ Programming Guide, per compute capability",
        **dict.fromkeys(LIMITS, "driver"),
    }
    for name, how in RATES.items():
        peak = peaks.get(how.peaks[0])
        if isinstance(peak, Peak) and (peak.sm_clock_hz > 0 or not how.per_clock):
            values[name] = peak.value / how.scale(peak.sm_clock_hz, properties.num_sms)
            sources[name] = f"{here}: {how.peaks[0]}"
    clock = peaks.get(CLOCK_FROM)
    if isinstance(clock, Peak) and clock.sm_clock_hz > 0:
        values["sm_clock_mhz"] = clock.sm_clock_hz / MHZ
        sources["sm_clock_mhz"] = f"{here}: under {CLOCK_FROM}"
    unmeasured = f"not measured, the {before}"
    return MeasuredSpec(
        spec=replace(spec, **{**limits_of(properties), **values}),
        sources={item.name: sources.get(item.name, unmeasured) for item in fields(ArchSpec)},
        policy=policy.name if known else None,
        environment=environment.to_json(),
    )


def keep(measured: MeasuredSpec, device_name: str, cache_dir: Path) -> Policy:
    """Make a spec the user's own: from now on this GPU is what was measured.

    Returns:
        The policy with it.

    Raises:
        StoreError: the folder cannot be written; what was there before stays.
    """
    path = user_path(cache_dir, device_name)
    with storing(f"write the measured spec {path}"):
        make_folder(path.parent)
        write_json(path, measured.to_json())
    forget_measured()
    return policy_with(measured)
