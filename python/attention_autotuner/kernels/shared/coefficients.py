"""The cost model's fitted constants: one small table, where each came from, and how to fit it anew.

Everything else in the model is arithmetic on the candidate, the problem and the spec. Constants are fitted in log
space, so that a factor of two counts the same in both directions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import log
from statistics import fmean


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Fitted constants of the sm80 family.

    Attributes:
        tensor_efficiency: share of the spec's mma rate that a dense stream of mma.sync reaches.
        smem_efficiency: share of the spec's shared-memory rate that ldmatrix and cp.async reach.
        unit_sharpness: exponent p of (a^p + b^p)^(1/p), the time of two units that feed each other (tensor and shared
            memory; exp and ALU): large when the lesser vanishes behind the greater, 1 when they take turns.
        warp_overlap_power: how fast the part that one warp cannot overlap vanishes as warps per scheduler grow.
        ahead_exposure: factor of the softmax where the next Q K^T is issued before it: below 1 where the overlap gains,
            above where a second score tile's registers cost more.
        scores_alu_instructions: fp32 instructions per score: scale, maximum, sum, conversion.
        warp_tile_instructions: address and control instructions of one warp per K/V tile.
        row_tile_instructions: of one warp per K/V tile and 16 rows: row maxima over lanes, the vote, the new scale.
        barrier_clk: a CTA-wide barrier with the skew of the warps that it waits for, clocks.
        load_latency_clk: from a cp.async to its data, out of L2, clocks.
        cta_clk: start and end of a CTA beyond its loads and stores, clocks.
        persistent_loss: share of a CTA tile's time that looping over tiles costs beside their static imbalance.
        memory_overlap_loss: share of the lesser of compute and memory time that adds to the greater.
        kv_cache_share: share of the L2 that concurrent heads' K and V can hold.
        spill_clk_per_byte: clocks of one SM per spilled byte, thread and K/V tile, over 4096.
    """

    tensor_efficiency: float
    smem_efficiency: float
    unit_sharpness: float
    warp_overlap_power: float
    ahead_exposure: float
    scores_alu_instructions: float
    warp_tile_instructions: float
    row_tile_instructions: float
    barrier_clk: float
    load_latency_clk: float
    cta_clk: float
    persistent_loss: float
    memory_overlap_loss: float
    kv_cache_share: float
    spill_clk_per_byte: float


# Start values by hand (latencies as micro-benchmarks of these parts publish them); see FITTED for what is fitted.
BY_HAND = Coefficients(
    tensor_efficiency=0.95,
    smem_efficiency=0.9,
    unit_sharpness=2.0,
    warp_overlap_power=1.0,
    ahead_exposure=0.5,
    scores_alu_instructions=4.0,
    warp_tile_instructions=80.0,
    row_tile_instructions=40.0,
    barrier_clk=40.0,
    load_latency_clk=600.0,
    cta_clk=1500.0,
    persistent_loss=0.03,
    memory_overlap_loss=0.1,
    kv_cache_share=0.6,
    spill_clk_per_byte=1.0,
)

# Fitted by calibrate() to the logs in tests/data/tuning_logs (A100 and RTX 4090, another kernel of the same
# instructions) and to nine rates of these kernels on an H200 (docs/kernel_log.md), then rounded. Neither has candidates
# with qk_ahead or persistent CTAs: these two follow what the kernel log says of them, behind at every head dim and
# 3-9 % behind.
FITTED = replace(
    BY_HAND,
    tensor_efficiency=1.0,
    smem_efficiency=0.99,
    unit_sharpness=2.5,
    warp_overlap_power=1.27,
    ahead_exposure=1.2,
    scores_alu_instructions=7.0,
    barrier_clk=195.0,
    load_latency_clk=400.0,
    cta_clk=800.0,
    persistent_loss=0.03,
    memory_overlap_loss=0.17,
)

# What calibrate() may move, and between which bounds. The others have no influence on the data at hand.
BOUNDS: dict[str, tuple[float, float]] = {
    "tensor_efficiency": (0.8, 1.0),
    "smem_efficiency": (0.7, 1.0),
    "unit_sharpness": (1.2, 6.0),
    "warp_overlap_power": (0.1, 3.0),
    "ahead_exposure": (0.2, 1.6),
    "scores_alu_instructions": (3.5, 7.0),
    "warp_tile_instructions": (40.0, 300.0),
    "barrier_clk": (20.0, 300.0),
    "load_latency_clk": (400.0, 1000.0),
    "cta_clk": (500.0, 5000.0),
    "persistent_loss": (0.0, 0.1),
    "memory_overlap_loss": (0.05, 0.4),
    "kv_cache_share": (0.2, 1.0),
}

ABSOLUTE_WEIGHT = 0.2  # of a problem's mean log error beside the spread around it: ranking matters more than level


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured candidate for :func:`calibrate`.

    Attributes:
        group: what is ranked together, e.g. one problem on one GPU.
        measured_us: the measured time.
        predict: the model's time in microseconds under given coefficients.
    """

    group: str
    measured_us: float
    predict: Callable[[Coefficients], float]


def loss(samples: Sequence[Sample], coefficients: Coefficients) -> float:
    """Mean squared log error: the spread inside each group, plus a lesser share of each group's mean.

    Slow candidates count less (weight best / measured), since only the order at the top matters.
    """
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    best: dict[str, float] = {}
    for sample in samples:
        best[sample.group] = min(best.get(sample.group, sample.measured_us), sample.measured_us)
    for sample in samples:
        error = log(sample.predict(coefficients) / sample.measured_us)
        groups[sample.group].append((error, best[sample.group] / sample.measured_us))
    losses = []
    for pairs in groups.values():
        weight = sum(w for _, w in pairs)
        mean = sum(e * w for e, w in pairs) / weight
        spread = sum(w * (e - mean) ** 2 for e, w in pairs) / weight
        losses.append(spread + ABSOLUTE_WEIGHT * mean**2)
    return fmean(losses)


def calibrate(
    samples: Sequence[Sample],
    start: Coefficients = BY_HAND,
    *,
    bounds: dict[str, tuple[float, float]] | None = None,
    sweeps: int = 12,
) -> Coefficients:
    """Fit the coefficients to measurements by a bounded coordinate search.

    Each sweep tries a step up and a step down for every coefficient and keeps what lowers :func:`loss`; a sweep that
    keeps nothing halves the steps. Deterministic.

    Args:
        samples: measured candidates; at least two.
        start: where to begin.
        bounds: which coefficients may move and how far; :data:`BOUNDS` by default.
        sweeps: how many rounds at most.

    Raises:
        ValueError: fewer than two samples, or a bound names no coefficient.
    """
    if len(samples) < 2:
        raise ValueError(f"calibration needs at least 2 samples, got {len(samples)}")
    limits = BOUNDS if bounds is None else bounds
    known = {field.name for field in fields(Coefficients)}
    if not limits.keys() <= known:
        raise ValueError(f"no coefficients named {sorted(limits.keys() - known)}")
    current, lowest = start, loss(samples, start)
    step = 0.25
    for _ in range(sweeps):
        moved = False
        for name, (low, high) in limits.items():
            for direction in (step, -step):
                value = getattr(current, name) + direction * (high - low)
                trial = replace(current, **{name: min(high, max(low, value))})
                if trial == current:
                    continue
                found = loss(samples, trial)
                if found < lowest:
                    current, lowest, moved = trial, found, True
                    break
        if not moved:
            step /= 2
    return current
