"""The sanitizer's script over kernels that run on the host: its arithmetic, its judgement, its command line."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attention_autotuner import loader
from attention_autotuner.arch import resolve
from attention_autotuner.arch.legality import check_kernel, check_limits
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.outcome import BuildFailed
from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.errors import ArtifactError
from attention_autotuner.reference import attention
from tests.gpu import sanitize

FakeKernel = Callable[..., Path]


class HostMemory:
    """Tensors in the process's own memory."""

    def __init__(self) -> None:
        self.held: dict[int, npt.NDArray[Any]] = {}

    def upload(self, data: npt.NDArray[Any]) -> int:
        copy = data.copy()
        self.held[copy.ctypes.data] = copy
        return int(copy.ctypes.data)

    def download(self, address: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self.held[address].reshape(like.shape).copy()

    def free(self) -> None:
        self.held.clear()


def test_every_kind_compiles_and_fits_every_gpu() -> None:
    for one in sanitize.KINDS.values():
        assert check_kernel(one) is None
        assert check_limits(one, resolve("RTX4090").spec) is None


def test_the_kinds_cover_every_loop_and_every_way_of_holding_operands() -> None:
    ones = sanitize.KINDS.values()
    assert {one.forward.num_stages for one in ones} == {1, 2, 3}
    for knob in ("q_in_registers", "qk_ahead", "persistent"):
        assert {getattr(one.forward, knob) for one in ones} == {True, False}
    for knob, values in (("warps_n", {1, 2}), ("v_slices", {1, 2})):
        assert {getattr(one.forward, knob) for one in ones} == values
    assert {one.copy_bytes for one in ones} == {2, 16}
    assert {one.forward.block_m // one.forward.warps_m for one in ones} == {16, 32}
    sliced = [one for one in ones if one.forward.k_slice < one.class_qk]
    assert {one.forward.warps_n for one in sliced} == {1, 2}


def test_the_reference_is_attention() -> None:
    call = sanitize.calls_of(sanitize.KINDS["one-stage"])[2]
    shapes = ((1, 1, 91, 56), (1, 1, 40, 56), (1, 1, 40, 56))
    q, k, v = (
        np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate(shapes)
    )
    o, lse = sanitize.reference(q, k, v, call)
    expected_o, expected_lse = attention(
        *(torch.from_numpy(x) for x in (q, k, v)), softmax_scale=call.scale, causal=True
    )
    np.testing.assert_allclose(o, expected_o.numpy(), atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_rounding_is_torchs(dtype: str, torch_dtype: torch.dtype) -> None:
    values = np.random.default_rng(0).standard_normal(4096, np.float32) * 100
    rounded = torch.from_numpy(values).to(torch_dtype)
    found = sanitize.encode(values, dtype)
    assert torch.equal(torch.from_numpy(found.view(np.int16)), rounded.view(torch.int16))
    np.testing.assert_array_equal(sanitize.decode(found, dtype), rounded.float().numpy())


@pytest.mark.parametrize("kind", ["one-stage", "unaligned"])
def test_a_right_kernel_passes(fake_kernel: FakeKernel, kind: str) -> None:
    memory = HostMemory()
    kernel = loader.load(fake_kernel())
    for call in sanitize.calls_of(sanitize.KINDS[kind]):
        assert sanitize.run(kernel, call, memory) == []
        assert memory.held == {}


def test_persistent_kernels_get_more_tiles_than_a_gpu_holds() -> None:
    one = sanitize.KINDS["persistent"]
    call = sanitize.calls_of(one)[-1]
    tiles = call.batch * call.heads_q * -(-call.seqlen_q // one.forward.block_m)
    spec = resolve("RTX4090").spec
    resident = spec.num_sms * (spec.max_threads_per_sm // one.forward.num_threads)
    assert tiles > resident


def test_a_wrong_kernel_is_told(
    fake_kernel: FakeKernel, capsys: pytest.CaptureFixture[str]
) -> None:
    idle = str(fake_kernel("-DNO_WORK"))
    assert sanitize.run_all({"one-stage": idle}, HostMemory()) == 1
    said = capsys.readouterr()
    assert "one-stage, (1, 2, 1, 1, False): o is off" in said.err
    assert "lse is off" in said.err
    assert sanitize.run_all({"one-stage": str(fake_kernel())}, HostMemory()) == 0


def test_building_writes_a_manifest_and_running_reads_it(
    fake_kernel: FakeKernel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    library = fake_kernel()
    failing = "qk-ahead"

    def build(kernels: list[Any], target: BuildTarget, **options: Any) -> list[Any]:
        assert target == BuildTarget(arch="90")
        artifact = Artifact(
            name="fake",
            digest="",
            path=library,
            report=parse_ptxas(""),
            kernel_digest="",
            target=target,
            toolchain={},
            build_seconds=1.0,
            build_peak_bytes=0,
        )
        bad = sanitize.KINDS[failing].name
        return [BuildFailed(reason="no") if each.name == bad else artifact for each in kernels]

    monkeypatch.setattr(sanitize, "build", build)
    monkeypatch.setattr(sanitize, "find_toolchain", lambda: None)
    monkeypatch.setattr(sanitize, "DeviceMemory", HostMemory)
    store = ["--store", str(tmp_path)]
    with pytest.raises(SystemExit):
        sanitize.main(store)
    assert "run with --build first" in capsys.readouterr().err
    assert sanitize.main([*store, "--build", "--arch", "90"]) == 1
    assert f"{failing}: " in capsys.readouterr().err
    manifest = json.loads((tmp_path / sanitize.MANIFEST).read_text())
    assert len(manifest) == len(sanitize.KINDS) - 1
    with pytest.raises(SystemExit):
        sanitize.main(store)
    assert f"{failing} did not build" in capsys.readouterr().err
    assert sanitize.main([*store, "--only", "one-stage", "q-in-registers"]) == 0


def test_a_call_of_the_driver_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: 100

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    with pytest.raises(ArtifactError, match="cuInit of the CUDA driver returned 100"):
        sanitize.DeviceMemory()
