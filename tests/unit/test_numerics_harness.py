"""The verifier and the kernel pool of the GPU tests, on kernels that run on the host."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_autotuner.arch import resolve
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.core.abi import AttentionForwardParams
from attention_autotuner.core.outcome import BuildFailed
from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.attention.inputs import GROWTH, grow
from attention_autotuner.operations.shared.launching import GUARD
from attention_autotuner.serving import loader
from tests.numerics import cases, guarded_buffers, harness, kernel_pool
from tests.numerics.cases import Case

CPU = torch.device("cpu")
GPU_TESTS = sorted(path.stem for path in (Path(__file__).parents[1] / "gpu").glob("test_*.py"))
SMALL = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=13, seqlen_k=21, dim_qk=24, dim_v=16)


@pytest.mark.parametrize("layout", [*cases.LAYOUTS, "broadcast", "unaligned"])
def test_inputs_have_their_layout_and_lie_between_nans(layout: cases.Layout) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 5, 8)
    buffer = guarded_buffers.make_input(shape, layout, torch.float16, generator)
    assert buffer.view.shape == shape
    assert buffer.view.isfinite().all()
    rows = [s for n, s in zip(shape[:3], buffer.view.stride()[:3], strict=True) if n > 1]
    offset = buffer.view.storage_offset()
    assert (offset % 8 == 0 and all(s % 8 == 0 for s in rows)) == (layout != "unaligned")
    assert (0 in rows) == ("broadcast" in layout)
    distinct = 1
    for axis, extent in enumerate(shape):
        distinct *= 1 if axis in guarded_buffers.BROADCAST.get(layout, ()) else extent
    assert int(buffer.storage.isfinite().sum()) == distinct
    assert buffer.storage[:GUARD].isnan().all()
    assert buffer.storage[-GUARD:].isnan().all()


LAYOUTS_OF_CASES = [
    Case(problem=SMALL),
    Case(problem=SMALL, inputs="transposed", output="padded", scale=-0.3),
    Case(problem=SMALL, inputs="padded", output="transposed", scale=0.0, lse=False),
    Case(problem=SMALL, inputs="batch_broadcast", scale=1.7),
    Case(problem=SMALL, inputs="heads_broadcast", output="padded", lse=False),
    Case(problem=SMALL, inputs="unaligned", scale=0.1),
]


@pytest.mark.parametrize("case", LAYOUTS_OF_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("mask", ["none", "bottom_right", "top_left"])
def test_a_right_kernel_passes(
    fake_kernel: Callable[..., Path], case: Case, mask: cases.Mask
) -> None:
    problem = cases.with_mask(case.problem, mask)
    for seqlen_q in (SMALL.seqlen_q, 33):
        whole = replace(case, problem=replace(problem, seqlen_q=seqlen_q))
        kernel = loader.load(fake_kernel())
        assert harness.errors_of(kernel, whole, seed=0, device=CPU) == []


class Misbehaving:
    """A kernel that computes its outputs and then corrupts memory."""

    def __init__(self, kernel: loader.LoadedKernel, mischief: Callable[[Any, int], None]) -> None:
        self._kernel, self._mischief, self._launches = kernel, mischief, 0
        self.workspace_bytes = kernel.workspace_bytes

    def launch(
        self, params: AttentionForwardParams, workspace: int, stream: int, device: int
    ) -> None:
        self._kernel.launch(params, workspace, stream, device)
        self._mischief(params, self._launches)
        self._launches += 1


def poke(address: int, bits: int) -> None:
    ctypes.c_uint16.from_address(address).value = bits


def skip_an_element(params: AttentionForwardParams, launch: int) -> None:
    poke(params.o.data, 0x7E00)


def write_before(params: AttentionForwardParams, launch: int) -> None:
    poke(params.o.data - 2, 0)


def write_into_the_gap(params: AttentionForwardParams, launch: int) -> None:
    poke(params.o.data + 2 * SMALL.dim_v, 0)


def write_past_lse(params: AttentionForwardParams, launch: int) -> None:
    poke(params.lse + 4 * params.batch * params.heads_q * params.seqlen_q, 0)


def change_q(params: AttentionForwardParams, launch: int) -> None:
    poke(params.q.data, 0)


def differ(params: AttentionForwardParams, launch: int) -> None:
    here = ctypes.c_uint16.from_address(params.o.data)
    here.value ^= launch  # the last bit, the second time only


def be_off(params: AttentionForwardParams, launch: int) -> None:
    here = ctypes.c_uint16.from_address(params.o.data)
    here.value ^= 0x0100


def be_off_in_lse(params: AttentionForwardParams, launch: int) -> None:
    ctypes.c_float.from_address(params.lse).value += 0.05


@pytest.mark.parametrize(
    ("mischief", "complaint"),
    [
        (skip_an_element, "o: 1 of"),
        (write_before, "wrote beside o"),
        (write_into_the_gap, "wrote beside o"),
        (write_past_lse, "wrote beside lse"),
        (change_q, "q was changed"),
        (differ, "two runs differ in o"),
        (be_off, "o: largest error"),
        (be_off_in_lse, "lse: largest error"),
    ],
)
def test_every_misbehaviour_is_found(
    fake_kernel: Callable[..., Path], mischief: Callable[[Any, int], None], complaint: str
) -> None:
    kernel: Any = Misbehaving(loader.load(fake_kernel()), mischief)
    case = Case(problem=SMALL, output="padded")
    assert any(complaint in error for error in harness.errors_of(kernel, case, seed=0, device=CPU))


def test_the_pool_builds_the_kernels_of_the_collected_tests_in_one_batch(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    present = resolve("RTX4090")
    limit = present.spec.smem_per_block_bytes
    gpu = SimpleNamespace(compute_capability=(8, 9), smem_per_block_bytes=limit)
    batches: list[list[str]] = []

    def build(kernels: list[Any], target: BuildTarget, **options: Any) -> list[Any]:
        batches.append([kernel.name for kernel in kernels])
        assert target == BuildTarget(arch="89")
        return [
            BuildFailed(reason="no luck") if "d80x80" in kernel.name else artifact_of(kernel.name)
            for kernel in kernels
        ]

    def artifact_of(name: str) -> Artifact:
        return Artifact(
            name=name,
            digest=name,
            path=fake_kernel(),
            report=parse_ptxas(""),
            kernel_digest="",
            target=BuildTarget(arch="89"),
            toolchain={},
            build_seconds=12.5,
            build_peak_bytes=2**30,
        )

    monkeypatch.setattr(kernel_pool, "probe", lambda: gpu)
    monkeypatch.setattr(kernel_pool, "build", build)
    monkeypatch.setattr(kernel_pool, "find_toolchain", lambda in_force: None)
    dims = {"good": (64, 64), "failing": (80, 80), "large": (256, 512)}
    parameters = {
        name: Case(
            problem=Problem(dim_qk=dim_qk, dim_v=dim_v), policy="H200" if name == "large" else ""
        )
        for name, (dim_qk, dim_v) in dims.items()
    }
    items: Any = [
        SimpleNamespace(
            callspec=SimpleNamespace(
                params={"case": parameters["good"], "n": 3, "policy": present}
            ),
            module=SimpleNamespace(PROBLEMS=(Problem(dim_qk=32, dim_v=32),)),
        ),
        SimpleNamespace(callspec=SimpleNamespace(params={"case": parameters["failing"]})),
        SimpleNamespace(callspec=SimpleNamespace(params={"case": parameters["large"]})),
        SimpleNamespace(),
    ]
    pool = kernel_pool.KernelPool(present)
    assert pool.summary() == "no kernel was built"
    pool.build(kernel_pool.needed(items, present))
    assert len(batches) == 1
    assert len(batches[0]) == 3
    good, failing, large = (case.candidate(present) for case in parameters.values())
    assert -1 in pool.kernel(good, -1)._prepared
    with pytest.raises(pytest.fail.Exception, match="no luck"):
        pool.kernel(failing, -1)
    with pytest.raises(pytest.skip.Exception, match="bytes of shared memory"):
        pool.kernel(large, -1)
    assert "2 of 3 kernels" in pool.summary()
    assert "slowest 12.5 s" in pool.summary()


@pytest.mark.parametrize("name", GPU_TESTS)
def test_default_kernels_can_be_built_for_the_problems_of_a_module(name: str) -> None:
    items: Any = [SimpleNamespace(module=importlib.import_module(f"tests.gpu.{name}"))]
    for candidate in kernel_pool.needed(items, resolve("H200")):
        assert candidate.name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_grow_along_sequences_longer_than_fp16_counts(dtype: torch.dtype) -> None:
    keys = torch.ones(1, 2, 131_072, 1, dtype=dtype)
    grow(keys, seed=0)
    first, second = keys[0, :, :, 0].float()
    assert torch.equal(second, first.flip(0))
    assert first[0].item() == pytest.approx(GROWTH[0], rel=0.01)
    assert first[-1].item() == GROWTH[1]
    assert bool((first.diff() >= 0).all())
