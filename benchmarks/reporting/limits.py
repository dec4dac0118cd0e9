"""What a GPU could do at most: measured where a committed file holds it, by the specification elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attention_autotuner.arch.a100 import A100_SPEC
from attention_autotuner.arch.h100 import H100_SPEC, H200_SPEC
from attention_autotuner.arch.rtx4090 import RTX4090_SPEC
from attention_autotuner.arch.spec import ArchSpec

SPECS = {spec.name: spec for spec in (A100_SPEC, RTX4090_SPEC, H100_SPEC, H200_SPEC)}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A horizontal line in a plot.

    Attributes:
        title: what it is and where it comes from.
        tflops: floating-point operations a second, in units of 1e12.
    """

    title: str
    tflops: float


def limits_of(
    spec_name: str,
    bring_up: Mapping[str, Any] | None,
    kernel_log: Mapping[str, Any] | None = None,
) -> list[Limit]:
    """The tensor cores' limits in fp16, by the two instructions that reach them.

    Args:
        spec_name: of a result file.
        bring_up: the GPU's committed bring-up, where there is one.
        kernel_log: its development runs, one of which measured ``mma.sync`` alone.
    """
    measured = ceilings_of(bring_up)
    if kernel_log is not None and "mma_sync" in kernel_log:
        measured.setdefault("mma_fp16", kernel_log["mma_sync"]["tflops"] * 1e12)
    spec = SPECS.get(spec_name)
    found = []
    for instruction in ("mma.sync", "wgmma"):
        name = f"{instruction.removesuffix('.sync')}_fp16"
        if name in measured:
            found.append(Limit(title=f"{instruction}, measured", tflops=measured[name] / 1e12))
        elif spec is not None and (rate := peak_tflops(spec, instruction)) > 0.0:
            found.append(Limit(title=f"{instruction}, by the specification", tflops=rate))
    return found


def peak_tflops(spec: ArchSpec, instruction: str) -> float:
    """A specification's rate of one instruction over the whole chip at its sustained clock; 0 where there is none."""
    per_clock = (
        spec.wgmma_flops_per_clk_per_sm if instruction == "wgmma" else spec.mma_flops_per_clk_per_sm
    )
    return per_clock * spec.num_sms * spec.sm_clock_mhz / 1e6


def ceilings_of(bring_up: Mapping[str, Any] | None) -> dict[str, float]:
    """Name -> value in SI units of what a bring-up measured; empty without one."""
    if bring_up is None:
        return {}
    found = {}
    for name, each in bring_up.get("ceilings", {}).items():
        value = each.get("value") if isinstance(each, dict) else each
        if value is not None:
            found[name] = float(value)
    return found
