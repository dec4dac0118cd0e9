"""NVIDIA H100 and H200: two GPUs' numbers under one policy, as they share the chip and differ in memory."""

from __future__ import annotations

from dataclasses import replace

from .policy import FAMILIES, Policy
from .spec import ArchSpec

# Sources: [W] "NVIDIA H100 Tensor Core GPU Architecture" whitepaper; [D] "NVIDIA H100" datasheet; [G] "CUDA C++
# Programming Guide", technical specifications per compute capability (9.0); [T] "NVIDIA Hopper Tuning Guide"; [I] CUDA
# C++ Programming Guide, throughput of native arithmetic instructions (9.0); [B] Luo et al., "Benchmarking and
# Dissecting the Nvidia Hopper GPU Architecture", arXiv 2402.13499, and its successor arXiv 2501.12084. The rest
# are the defaults; of those, [B] measures 127.9 bytes a clock of shared memory.
H100_SPEC = ArchSpec(
    name="H100",
    device_names=("H100", "H800"),  # the H800 is an H100 with a slower NVLink
    compute_capability=(9, 0),
    num_sms=132,  # [W] SXM5
    smem_per_sm_bytes=228 * 1024,  # [G], [T] 1.4.2
    smem_per_block_bytes=227 * 1024,  # [G]
    max_threads_per_sm=2048,  # [G]
    max_blocks_per_sm=32,  # [G]
    l2_bytes=50 * 1024**2,  # [W] SXM5
    sm_clock_mhz=1830.0,  # [W] the boost clock behind its tensor rates
    hbm_bytes_per_second=3.352e12,  # [D] SXM5, 80 GB HBM3
    l2_bytes_per_clk=4472.0,  # [B] measured on an H800
    mma_flops_per_clk_per_sm=2576.0,  # [B] mma.sync reaches 62.9 % of the tensor cores' 4096 on average
    wgmma_flops_per_clk_per_sm=4096.0,  # [W] 989.4 TFLOP/s over 132 SMs at 1830 MHz
    fp32_lanes_per_clk_per_sm=128.0,  # [I]
)

H200_SPEC = replace(
    H100_SPEC,
    name="H200",
    device_names=("H200",),
    l2_bytes=60 * 1024**2,  # read off the device
    hbm_bytes_per_second=4.8e12,  # "NVIDIA H200 Tensor Core GPU" datasheet; a copy reaches 4.27e12, measured
)


class H100(Policy):
    """Candidates for an H100 or H200, or for another GPU of compute capability 9.0 given its spec."""

    name = "H100"
    build_arch = "90"
    families = FAMILIES
    default_spec = H100_SPEC
