"""Peak rates per SM by compute capability, for GPUs that have no spec of their own.

The driver reports limits but no rates. Tensor rates are dense fp16 with fp32 accumulation, in floating-point operations
per clock and SM, worked back from the vendor's TFLOP/s, SM counts and boost clocks.
"""

from __future__ import annotations

from .h100 import H100_SPEC

# RTX 3090 and RTX 4090 measure 14 to 17 bytes a clock and SM (Chips and Cheese, "Microbenchmarking Nvidia's RTX 4090").
L2_BYTES_PER_CLK_PER_SM = 16.0
# Where the driver does not tell the clock or the memory's speed: middling for the GPUs of these years.
FALLBACK_SM_CLOCK_MHZ = 1500.0
FALLBACK_HBM_BYTES_PER_SECOND = 5.0e11


def mma_flops_per_clk_per_sm(compute_capability: tuple[int, int], *, geforce: bool) -> float:
    """Rate of mma.sync. GeForce parts run fp32 accumulation at half the rate of their professional siblings."""
    if compute_capability in ((8, 0), (8, 7)):
        return 2048.0  # "NVIDIA A100 Tensor Core GPU Architecture"; "Jetson AGX Orin Series Technical Brief"
    if compute_capability == (9, 0):
        return H100_SPEC.mma_flops_per_clk_per_sm
    if compute_capability[0] in (10, 11):
        return 2048.0  # no vendor figure for mma.sync beside tcgen05; taken as one generation-neutral SM
    # 8.6, 8.9, 12.x. RTX 3090: 71 TFLOP/s, 82 SMs, 1695 MHz. RTX 4090: 165, 128, 2520. RTX 5090: 209.5, 170, 2407.
    # A40: 149.7, 84, 1740. L40S: 362, 142, 2520. ("NVIDIA Ampere GA102", "NVIDIA Ada" and "NVIDIA RTX Blackwell GPU
    # Architecture" whitepapers; A40 and L40S datasheets.)
    return 512.0 if geforce else 1024.0


def wgmma_flops_per_clk_per_sm(compute_capability: tuple[int, int]) -> float:
    """Rate of wgmma, which compute capability 9.0 alone has."""
    return H100_SPEC.wgmma_flops_per_clk_per_sm if compute_capability == (9, 0) else 0.0


def fp32_lanes_per_clk_per_sm(compute_capability: tuple[int, int]) -> float:
    """Single-precision lanes ("CUDA C++ Programming Guide", arithmetic throughput)."""
    return 64.0 if compute_capability == (8, 0) else 128.0
