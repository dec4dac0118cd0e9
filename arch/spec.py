"""One GPU in numbers: an :class:`ArchSpec` is frozen data with units in its names and no behaviour.

Where a number comes from stands beside it, in the module that instantiates the spec; what all of compute capability 8.0
and later have alike is a default.
"""

from __future__ import annotations

from dataclasses import dataclass

# Sources of the defaults: [G] "CUDA C++ Programming Guide", technical specifications per compute capability; [T] the
# tuning guides of the NVIDIA Ampere, Ada and Hopper architectures; [I] CUDA C++ Programming Guide, throughput of native
# arithmetic instructions.


@dataclass(frozen=True, kw_only=True)
class ArchSpec:
    """Limits and peak rates of one GPU model.

    Attributes:
        name: the spec's own name, e.g. ``A100``.
        device_names: substrings of the driver's device name that identify it, most specific first.
        compute_capability: (major, minor).
        num_sms: streaming multiprocessors.
        smem_per_sm_bytes: shared memory of one SM that resident CTAs divide.
        smem_per_block_bytes: the most one CTA may ask for (opt-in limit).
        smem_reserved_per_block_bytes: what the system keeps of an SM's shared memory per resident CTA.
        registers_per_sm: 32-bit registers of one SM.
        max_registers_per_thread: the architecture's limit.
        max_threads_per_sm: resident threads.
        max_blocks_per_sm: resident CTAs.
        l2_bytes: L2 cache.
        sm_clock_mhz: sustained clock under tensor load that the rates below refer to.
        hbm_bytes_per_second: peak device-memory bandwidth.
        l2_bytes_per_clk: L2 read bandwidth of the whole chip per SM clock.
        smem_bytes_per_clk_per_sm: shared-memory bandwidth.
        mma_flops_per_clk_per_sm: fp16/bf16 mma.sync with fp32 accumulation.
        wgmma_flops_per_clk_per_sm: the same through wgmma; 0 where there is none.
        exp_per_clk_per_sm: ex2 results.
        fp32_lanes_per_clk_per_sm: fp32 instructions times lanes.
        launch_overhead_us: one kernel launch, host to start.
    """

    name: str
    device_names: tuple[str, ...]
    compute_capability: tuple[int, int]
    num_sms: int
    smem_per_sm_bytes: int
    smem_per_block_bytes: int
    smem_reserved_per_block_bytes: int = 1024  # [T] 1.4.2: 1 KB of each block belongs to the system
    registers_per_sm: int = 65536  # [G]
    max_registers_per_thread: int = 255  # [G]
    max_threads_per_sm: int
    max_blocks_per_sm: int
    l2_bytes: int
    sm_clock_mhz: float
    hbm_bytes_per_second: float
    l2_bytes_per_clk: float
    smem_bytes_per_clk_per_sm: float = 128.0  # 32 banks of 4 bytes, [G]
    mma_flops_per_clk_per_sm: float
    wgmma_flops_per_clk_per_sm: float = 0.0  # wgmma exists on compute capability 9.0 alone
    exp_per_clk_per_sm: float = 16.0  # [I] special functions
    fp32_lanes_per_clk_per_sm: float
    # Back to back as CUDA 12 and 13 drivers do it; host and driver dependent.
    launch_overhead_us: float = 4.0
