"""Products of matrices on a GPU: kernels of every layout, tile and schedule, and the public function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attention_autotuner
from attention_autotuner import settings
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.gemm_sm90.knobs import GemmSm90Knobs
from attention_autotuner.operations.gemm.problem import of_sizes
from tests.launchers import verify
from tests.numerics.kernel_pool import KernelPool

pytestmark = pytest.mark.gpu

KNOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "cooperative": ("nn", {"block_m": 128, "block_n": 256, "stages": 4}),
    "cluster": ("nn", {"block_m": 128, "block_n": 256, "stages": 4, "cluster": 2}),
    "cluster_tt": ("tt", {"block_m": 128, "block_n": 256, "stages": 4, "cluster": 2}),
    "tall": ("tn", {"block_m": 256, "block_n": 128, "stages": 4, "output": "direct"}),
    "ping_pong": ("nt", {"block_m": 128, "block_n": 128, "stages": 5, "schedule": "ping_pong"}),
    "low": ("nt", {"block_m": 64, "block_n": 192, "stages": 6, "schedule": "ping_pong"}),
    "low_cluster": (
        "tn",
        {"block_m": 64, "block_n": 128, "stages": 6, "schedule": "ping_pong", "cluster": 2},
    ),
}
SIZES = [(2048, 2048, 512), (296, 1032, 4104), (8, 8, 8)]


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize("name", KNOBS)
def test_kernels(pool: KernelPool, name: str, device: torch.device) -> None:
    operands: Any
    operands, values = KNOBS[name]
    a, b = (side == "t" for side in operands)
    knobs = GemmSm90Knobs(transposed_a=a, transposed_b=b, **values)
    for dtype in ("bf16", "fp16") if name == "cluster" else ("bf16",):
        for sizes in SIZES:
            problem = of_sizes(*sizes, dtype=dtype, operands=operands)
            candidate = Candidate.of(problem, knobs)
            for launched in ({}, {"splits": 3, "row_blocks": 4}):
                kernel = pool.kernel(candidate.launched(launched))
                outcome = verify(problem, kernel, deterministic=True, device=device)
                assert outcome.ok, f"{problem.describe()}: {outcome.reason}"


def test_the_function_serves_products_and_gradients(device: torch.device) -> None:
    with settings.override(strict_kernels=True):
        a = torch.randn(328, 136, device=device, dtype=torch.bfloat16, requires_grad=True)
        b = torch.randn(264, 136, device=device, dtype=torch.bfloat16, requires_grad=True)
        product = attention_autotuner.matmul(a, b.T)
        grad = torch.randn_like(product)
        mine = (product, *torch.autograd.grad(product, (a, b), grad))
        expected = a @ b.T
        theirs = (expected, *torch.autograd.grad(expected, (a, b), grad))
        for ours, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(ours, other, atol=0.3, rtol=0.02)
