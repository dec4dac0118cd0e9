"""The tables that ``bring-up`` ends with."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..arch.measured_specs import LIMITS
from ..arch.spec import ArchSpec
from ..core.problem import Problem
from ..tuning.bring_up import BroughtUp
from ..tuning.peaks import Peak
from ..tuning.spec_measuring import expected_peaks
from ..tuning.sweep import Settled, SweepResult, measured_us
from ..tuning.sweep_plan import Plan
from .console import cell, microseconds, named, print_line, print_table

# Prefixes by thousands, for figures of hardware.
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_PHASES = {
    "ceilings": "limits, peaks and spec",
    "plan": "choosing what to build",
    "build": "building (beside the rest)",
    "wait": "waiting for builds",
    "verify": "verifying",
    "race": "racing",
    "confirm": "confirming",
    "stop": "waiting for compilers to end",
    "total": "in all",
}


def print_report(result: BroughtUp) -> None:
    """Print the spec, the peaks, the picks, and the time that it took."""
    print_spec(result)
    print_peaks(result)
    if result.sweep is not None:
        print_picks(result.sweep)
    elif result.why_no_sweep:
        print_line(f"nothing was tuned: {result.why_no_sweep}")
    spent = {title: result.seconds.get(name) for name, title in _PHASES.items()}
    spent["of it on the GPU"] = result.gpu_seconds
    rows = [[title, f"{value:.1f}"] for title, value in spent.items() if value is not None]
    print_table("time", ["phase", "seconds"], rows)
    for path in result.files.values():
        print_line(f"wrote {path}")
    if result.interrupted:
        print_line("interrupted: what was measured is kept, and the next run goes on from there")
    elif result.sweep is not None and result.sweep.exhausted:
        print_line("the budget was spent: the next run goes on from there")


def print_spec(result: BroughtUp) -> None:
    """Print every field of the spec, what it was taken for before, and where it comes from."""
    before = result.described.spec
    spec, sources = result.measured.spec, result.measured.sources
    shown = [
        item.name
        for item in fields(ArchSpec)
        if item.name in LIMITS or isinstance(getattr(spec, item.name), float)
    ]
    print_table(
        f"{result.properties.name}: policy {result.policy.name}, built for {result.policy.build_arch}",
        ["field", "value", "before", "source"],
        [
            [name, figure(getattr(spec, name)), figure(getattr(before, name)), sources[name]]
            for name in shown
        ],
    )


def print_peaks(result: BroughtUp) -> None:
    """Print every peak beside what the spec before had promised."""
    promised = expected_peaks(result.described)
    rows = []
    for name, peak in result.peaks.items():
        expected = promised.get(name)
        if not isinstance(peak, Peak):
            rows.append([name, *["-"] * 5, f"{peak.kind}: {peak.reason}"])
            continue
        measured = [with_prefix(peak.value, peak.unit), f"{100 * peak.spread / peak.value:.2f}"]
        clock = f"{peak.sm_clock_hz / 1e6:.0f}" if peak.sm_clock_hz else "-"
        before = ["-", "-"]
        if expected:
            before = [with_prefix(expected, peak.unit), f"{peak.value / expected:.2f}"]
        rows.append([name, *measured, clock, *before, ""])
    kept = " (of an earlier run)" if result.reused else ""
    print_table(
        f"peaks{kept}",
        ["peak", "measured", "spread %", "SM MHz", "spec before", "ratio", "fate"],
        rows,
    )


def print_picks(sweep: SweepResult) -> None:
    """Print what serves each problem, and by how much it is faster than the default."""
    done = sum(settled.status in ("measured", "recorded") for settled in sweep.settled)
    print_table(
        f"picks for {done} of {len(sweep.settled)} problems, {sweep.kernels} kernels built",
        ["problem", "status", "us", "default us", "TFLOP/s", "gain %", "tied with", "pick"],
        [_cells(settled) for settled in sweep.settled],
    )


def _cells(settled: Settled) -> list[str]:
    record = settled.record
    if record is None:
        return [settled.problem.describe(), settled.status, *["-"] * 5, settled.reason]
    us = measured_us(record, record.pick)
    default_us = measured_us(record, record.default)
    rate = settled.problem.flops / us / 1e6 if us else None
    gain = None if settled.gain is None else 100 * settled.gain
    pick = "the default" if record.pick == record.default else named(record.pick)
    tied = str(len({*record.ties} - {record.pick}))
    figures = [microseconds(us), microseconds(default_us), cell(rate, ".0f"), cell(gain, ".1f")]
    return [settled.problem.describe(), settled.status, *figures, tied, pick]


def print_dry_run(said: dict[str, Any], problems: tuple[Problem, ...], plan: Plan) -> None:
    """Print what a bring-up would do."""
    rows = []
    for row in said["problems"]:
        best = [microseconds(row["best_us"]), row["limiter"]]
        default = [microseconds(row["default_us"]), named(row["best"])]
        rows.append([row["problem"], str(row["legal"]), *best, *default])
    print_table(
        f"{said['gpu_name']}: policy {said['policy']}, built for {said['build_arch']}",
        ["problem", "legal", "best us", "limiter", "default us", "best by the model"],
        rows,
    )
    classes = len({(p.padded_dim_qk, p.padded_dim_v) for p in problems})
    pairs = "one pair" if classes == 1 else f"{classes} pairs"
    print_line(
        f"{len(problems)} problems of {pairs} of head dims: {len(plan.candidates)} kernels in "
        f"{len(plan.groups)} pools, at most {plan.class_limit} in each beside the defaults"
    )
    print_line(
        f"about {plan.build_seconds:.0f} s of building with {plan.jobs} jobs, "
        f"{plan.gpu_seconds:.0f} s on the GPU, {plan.seconds:.0f} s in all"
    )
    for kernel in said["built"]:
        print_line(f"{named(kernel['name'])}: {kernel['fate']}")


def figure(value: float) -> str:
    """A number of a spec, with as many digits as matter."""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def with_prefix(value: float, unit: str) -> str:
    """A rate with the prefix of its size, e.g. ``4.27 Tbytes/s``; a time in microseconds."""
    if unit == "s":
        return f"{value * 1e6:.2f} us"
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"
