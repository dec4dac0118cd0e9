"""NVIDIA GeForce RTX 4090: the GPU's numbers and its policy."""

from __future__ import annotations

from .policy import Policy
from .spec import ArchSpec

# Sources: [W] "NVIDIA Ada GPU Architecture" whitepaper, appendix A; [G] "CUDA C++ Programming Guide", technical
# specifications per compute capability (8.9); [T] "NVIDIA Ada GPU Architecture Tuning Guide"; [I] CUDA C++ Programming
# Guide, throughput of native arithmetic instructions (8.9). The rest are the defaults.
RTX4090_SPEC = ArchSpec(
    name="RTX4090",
    device_names=("RTX 4090",),
    compute_capability=(8, 9),
    num_sms=128,  # [W]
    smem_per_sm_bytes=100 * 1024,  # [G], [T] 1.4.2
    smem_per_block_bytes=99 * 1024,  # [G]
    max_threads_per_sm=1536,  # [G]
    max_blocks_per_sm=24,  # [G]
    l2_bytes=72 * 1024**2,  # [W]
    sm_clock_mhz=2520.0,  # [W] boost clock
    hbm_bytes_per_second=1.008e12,  # [W]
    # No vendor figure. Chips and Cheese, "Microbenchmarking Nvidia's RTX 4090" (2022): about 5 TB/s near 2.7 GHz.
    l2_bytes_per_clk=1900.0,
    # [W] 165.2 TFLOP/s of fp16 with fp32 accumulation over 128 SMs at 2520 MHz; half the fp16-accumulate rate.
    mma_flops_per_clk_per_sm=512.0,
    fp32_lanes_per_clk_per_sm=128.0,  # [I]
)


class RTX4090(Policy):
    """Candidates for an RTX 4090, or for another GPU of compute capability 8.9 given its spec."""

    name = "RTX4090"
    build_arch = "89"
    default_spec = RTX4090_SPEC
