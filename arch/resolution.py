"""From what a caller calls a GPU to the policy for it."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import replace
from pathlib import Path

from .. import settings
from ..core.memo import TABLES, Table, remembered
from ..errors import ArchSpecError, UnsupportedArchitectureError
from . import measured_specs, rates
from .a100 import A100, A100_SPEC
from .h100 import H100, H100_SPEC, H200_SPEC
from .measured_specs import MeasuredSpec, limits_of
from .policy import FAMILIES, Policy, check_capability, runs_on
from .probe import DeviceProperties, current_device, probe
from .rtx4090 import RTX4090, RTX4090_SPEC
from .spec import ArchSpec

_log = logging.getLogger(__name__)

# Specs that come with the package, and the policy each belongs to. H200 stands before H100: names are matched in order.
KNOWN: tuple[tuple[ArchSpec, type[Policy]], ...] = (
    (A100_SPEC, A100),
    (RTX4090_SPEC, RTX4090),
    (H200_SPEC, H100),
    (H100_SPEC, H100),
)

# What nvcc 13.0 compiles for natively (nvcc --list-gpu-arch).
NATIVE_ARCHS = (80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
# Two descriptions of one memory's speed differ by this much at most: datasheets round, clocks are nominal.
BANDWIDTH_TOLERANCE = 0.05

_VENDOR_WORDS = re.compile(r"nvidia|geforce|tensor core gpu|[^a-z0-9]", re.IGNORECASE)
# By the cache folder, which measured specs lie in, and the name.
PROBED: Table[tuple[Path, str], Policy] = Table("policies.probed")


def names() -> list[str]:
    """The names that :func:`resolve` takes on every machine."""
    return sorted(spec.name for spec, _ in KNOWN)


def plain_name(device_name: str) -> str:
    """A device's name without the vendor's words and punctuation, e.g. ``RTX3090``."""
    return _VENDOR_WORDS.sub("", device_name)


def resolve(device_type: str | Policy | type[Policy] | None) -> Policy:
    """The policy that a ``device_type`` stands for.

    A name's spec is the one that was measured, where there is such a file: the user's own before the package's.

    Args:
        device_type: a policy, its class, the name of a GPU with a spec here (``"A100"``, ``"rtx 4090"``, ``"H200"``;
            case and punctuation do not matter), the name of the GPU that is present, or None for that GPU.

    Raises:
        UnsupportedArchitectureError: the name is unknown, or None was given and there is no GPU, or it is too old.
        ArchSpecError: the GPU's measured spec is damaged.
    """
    if isinstance(device_type, Policy):
        return device_type
    if isinstance(device_type, type) and issubclass(device_type, Policy):
        return device_type()
    if device_type is None:
        return detect()
    if not isinstance(device_type, str):
        raise UnsupportedArchitectureError(
            "device_type must be a name, a Policy, a Policy class or None, got "
            f"{type(device_type).__name__}"
        )
    wanted, cache_dir = plain_name(device_type).lower(), settings.current().cache_dir
    measured = _measured_policy(wanted, cache_dir) if wanted else None
    if measured is not None:
        return measured
    for spec, policy in KNOWN:
        if spec.name.lower() == wanted:
            return policy(spec)
    present = ""
    try:
        detect()
    except UnsupportedArchitectureError as error:
        present = "; " + str(error).partition(";")[0]
    here = {name: policy for (folder, name), policy in PROBED.items() if folder == cache_dir}
    if wanted in here:
        return here[wanted]
    known = ", ".join([*names(), *sorted(policy.name for policy in here.values())])
    raise UnsupportedArchitectureError(
        f"unknown device_type {device_type!r}; known here: {known}{present}"
    )


def detect(device: int | None = None) -> Policy:
    """The policy for a GPU of this machine.

    Args:
        device: index among the visible devices; None is the one that torch or cupy works on, else the first.

    Its spec is the one that was measured on it, where there is such a file: the user's own before the package's.

    Raises:
        UnsupportedArchitectureError: there is no GPU, no device of that index, or it is older than 8.0.
        ArchSpecError: the GPU's measured spec is damaged.
    """
    return _detect(current_device() if device is None else device, settings.current().cache_dir)


@remembered("policies.detected")
def _detect(device: int, cache_dir: Path) -> Policy:
    properties = probe(device)
    policy = from_properties(properties)
    measured = measured_specs.for_device(properties.name, cache_dir)
    if measured is not None and measured.fits(properties):
        policy = policy_with(replace(measured, spec=measured.on(properties)))
    elif measured is not None:
        _log.info("%s is not as it was measured: that spec is left alone", properties.name)
    key = (cache_dir, plain_name(policy.spec.name).lower())
    if key not in PROBED:
        PROBED.remember(key, policy)
    return policy


@functools.cache
def from_properties(properties: DeviceProperties) -> Policy:
    """The policy for a device that describes itself.

    A GPU with a spec here gets that spec, corrected where the device's own limits differ (fewer SMs of a partition or
    another board, another memory); any other gets a policy of its own from its limits and its generation's rates.

    Raises:
        UnsupportedArchitectureError: the compute capability is below 8.0.
    """
    p = properties
    check_capability(p.name, p.compute_capability)
    for spec, policy in KNOWN:
        if spec.compute_capability == p.compute_capability and any(
            name in p.name for name in spec.device_names
        ):
            return policy(_corrected(spec, p))
    _log.info(
        "%s has no spec of its own: its limits are probed, its rates its generation's", p.name
    )
    return policy_of_its_own(_derived(p))


def policy_of_its_own(spec: ArchSpec) -> Policy:
    """A policy for a GPU that belongs to none of the known ones, within its own limits."""

    class Probed(Policy):
        """Candidates for a GPU that has no policy here, within its own limits."""

        name = spec.name
        build_arch = native_arch(spec.compute_capability)
        families = tuple(family for family in FAMILIES if runs_on(family, spec.compute_capability))
        default_spec = spec

    return Probed()


def policy_with(measured: MeasuredSpec) -> Policy:
    """The policy that a measured spec names, with that spec.

    Raises:
        ArchSpecError: there is no policy of that name.
    """
    if measured.policy is None:
        return policy_of_its_own(measured.spec)
    for _, policy in KNOWN:
        if policy.name == measured.policy:
            return policy(measured.spec)
    known = ", ".join(dict.fromkeys(policy.name for _, policy in KNOWN))
    raise ArchSpecError(f"policy must be one of {known} or null, got {measured.policy!r}")


def forget_measured() -> None:
    """Read measured specs again when they are next asked for: one was written."""
    for name in ("policies.detected", "policies.measured", "policies.probed"):
        TABLES[name].clear()


@remembered("policies.measured", bound=64)
def _measured_policy(name: str, cache_dir: Path) -> Policy | None:
    measured = measured_specs.named(name, cache_dir)
    return None if measured is None else policy_with(measured)


def native_arch(compute_capability: tuple[int, int]) -> str:
    """The compute capability to compile for: the GPU's, or the newest older one that the compiler knows (by PTX).

    Raises:
        UnsupportedArchitectureError: the GPU's is below 8.0.
    """
    check_capability("this GPU", compute_capability)
    major, minor = compute_capability
    return str(max(arch for arch in NATIVE_ARCHS if arch <= 10 * major + minor))


def _corrected(spec: ArchSpec, p: DeviceProperties) -> ArchSpec:
    bandwidth = p.hbm_bytes_per_second
    same_memory = abs(bandwidth / spec.hbm_bytes_per_second - 1.0) <= BANDWIDTH_TOLERANCE
    if same_memory or not bandwidth:
        bandwidth = spec.hbm_bytes_per_second
    clock_mhz = min(spec.sm_clock_mhz, p.sm_clock_khz / 1e3 or spec.sm_clock_mhz)
    corrected = replace(
        spec, sm_clock_mhz=clock_mhz, hbm_bytes_per_second=bandwidth, **limits_of(p)
    )
    if corrected != spec:
        _log.info("%s differs from the spec %s; its own limits are used", p.name, spec.name)
    return corrected


def _derived(p: DeviceProperties) -> ArchSpec:
    capability = p.compute_capability
    return ArchSpec(
        name=plain_name(p.name),
        device_names=(p.name,),
        compute_capability=capability,
        sm_clock_mhz=p.sm_clock_khz / 1e3 or rates.FALLBACK_SM_CLOCK_MHZ,
        hbm_bytes_per_second=p.hbm_bytes_per_second or rates.FALLBACK_HBM_BYTES_PER_SECOND,
        l2_bytes_per_clk=rates.L2_BYTES_PER_CLK_PER_SM * p.num_sms,
        mma_flops_per_clk_per_sm=rates.mma_flops_per_clk_per_sm(
            capability, geforce="geforce" in p.name.lower()
        ),
        wgmma_flops_per_clk_per_sm=rates.wgmma_flops_per_clk_per_sm(capability),
        fp32_lanes_per_clk_per_sm=rates.fp32_lanes_per_clk_per_sm(capability),
        **limits_of(p),
    )
