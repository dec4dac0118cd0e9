"""Device properties of GPUs for tests, as their drivers report them (CUDA's deviceQuery)."""

from __future__ import annotations

from attention_autotuner.arch import DeviceProperties

A100_80GB = DeviceProperties(
    name="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    num_sms=108,
    smem_per_sm_bytes=164 * 1024,
    smem_per_block_bytes=163 * 1024,
    smem_reserved_per_block_bytes=1024,
    registers_per_sm=65536,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    l2_bytes=40 * 1024**2,
    sm_clock_khz=1_410_000,
    memory_clock_khz=1_593_000,
    memory_bus_bits=5120,
)
RTX3090 = DeviceProperties(
    name="NVIDIA GeForce RTX 3090",
    compute_capability=(8, 6),
    num_sms=82,
    smem_per_sm_bytes=100 * 1024,
    smem_per_block_bytes=99 * 1024,
    smem_reserved_per_block_bytes=1024,
    registers_per_sm=65536,
    max_threads_per_sm=1536,
    max_blocks_per_sm=16,
    l2_bytes=6 * 1024**2,
    sm_clock_khz=1_695_000,
    memory_clock_khz=9_751_000,
    memory_bus_bits=384,
)
H200 = DeviceProperties(
    name="NVIDIA H200",
    compute_capability=(9, 0),
    num_sms=132,
    smem_per_sm_bytes=228 * 1024,
    smem_per_block_bytes=227 * 1024,
    smem_reserved_per_block_bytes=1024,
    registers_per_sm=65536,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    l2_bytes=60 * 1024**2,
    sm_clock_khz=1_980_000,
    memory_clock_khz=3_201_000,
    memory_bus_bits=6144,
)
