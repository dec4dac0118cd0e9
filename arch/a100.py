"""NVIDIA A100: the GPU's numbers and its policy."""

from __future__ import annotations

from .policy import Policy
from .spec import ArchSpec

# Sources: [W] "NVIDIA A100 Tensor Core GPU Architecture" whitepaper; [D] "NVIDIA A100 80GB" datasheet; [G] "CUDA C++
# Programming Guide", technical specifications per compute capability (8.0); [T] "NVIDIA Ampere GPU Architecture Tuning
# Guide"; [I] CUDA C++ Programming Guide, throughput of native arithmetic instructions (8.0). The rest are the defaults.
A100_SPEC = ArchSpec(
    name="A100",
    device_names=("A100", "A800"),  # the A800 is an A100 with a slower NVLink
    compute_capability=(8, 0),
    num_sms=108,  # [W] table 5
    smem_per_sm_bytes=164 * 1024,  # [G], [T] 1.4.2
    smem_per_block_bytes=163 * 1024,  # [G]
    max_threads_per_sm=2048,  # [G]
    max_blocks_per_sm=32,  # [G]
    l2_bytes=40 * 1024**2,  # [W]
    sm_clock_mhz=1410.0,  # [W] boost clock, which it holds under load
    hbm_bytes_per_second=2.039e12,  # [D] SXM, 80 GB
    l2_bytes_per_clk=5120.0,  # [W] "L2 cache read bandwidth is 5120 bytes/clk"
    mma_flops_per_clk_per_sm=2048.0,  # [W] 1024 dense fp16 FMA; times 108 SMs at 1410 MHz: 312 TFLOP/s
    fp32_lanes_per_clk_per_sm=64.0,  # [I]
)


class A100(Policy):
    """Candidates for an A100, or for another GPU of compute capability 8.0 given its spec."""

    name = "A100"
    build_arch = "80"
    default_spec = A100_SPEC
