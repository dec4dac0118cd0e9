"""The sanitizer's script over kernels that run on the host: its arithmetic, its judgement, its command line."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attention_autotuner.arch import resolve
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.core.outcome import BuildFailed
from attention_autotuner.errors import ArtifactError
from attention_autotuner.kernels.legality import check_kernel
from attention_autotuner.kernels.registry import kernel_of
from attention_autotuner.kernels.scores_backward_sm80.knobs import PASSES_OF_PLAN
from attention_autotuner.kernels.shared.knobs import CtaOrder
from attention_autotuner.kernels.shared.rules import needs_violation
from attention_autotuner.reference import attention, attention_backward
from attention_autotuner.serving import loader
from tests.gpu import (
    bare_launch,
    bare_retention,
    sanitize,
    sanitize_retention,
    sanitize_sm90,
)
from tests.numerics.emulation import HostBackward
from tests.numerics.retention_emulation import HOSTS

FakeKernel = Callable[..., Path]


class HostMemory:
    """Tensors in the process's own memory."""

    def __init__(self) -> None:
        self.held: dict[int, npt.NDArray[Any]] = {}

    def upload(self, data: npt.NDArray[Any]) -> int:
        margin = np.empty(data.nbytes + 256, np.uint8)
        start = -margin.ctypes.data % 256
        copy = margin[start : start + data.nbytes].view(data.dtype)
        copy[:] = data.ravel()
        self.held[copy.ctypes.data] = copy
        return int(copy.ctypes.data)

    def download(self, address: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self.held[address].reshape(like.shape).copy()

    def free(self) -> None:
        self.held.clear()


@pytest.mark.parametrize("kind", sanitize.KINDS)
def test_every_kind_compiles_and_fits_every_gpu_that_runs_it(kind: str) -> None:
    candidate = sanitize.KINDS[kind]
    assert check_kernel(candidate) is None
    gpu = "RTX4090" if candidate.family == "sm80" else "H100"
    for launch in kernel_of(candidate).passes(candidate):
        assert needs_violation(launch.needs, resolve(gpu).spec) is None


def test_the_kinds_cover_every_loop_and_every_way_of_holding_operands() -> None:
    ones = sanitize.FORWARD.values()
    assert {candidate.knobs.num_stages for candidate in ones} == {1, 2, 3}
    for knob in ("q_in_registers", "qk_ahead", "persistent"):
        assert {getattr(candidate.knobs, knob) for candidate in ones} == {True, False}
    for knob, values in (("warps_n", {1, 2}), ("v_slices", {1, 2})):
        assert {getattr(candidate.knobs, knob) for candidate in ones} == values
    assert {candidate.copy_bytes for candidate in ones} == {2, 16}
    assert {candidate.knobs.block_m // candidate.knobs.warps_m for candidate in ones} == {16, 32}
    sliced = [candidate for candidate in ones if candidate.knobs.k_slice < candidate.padded_dim_qk]
    assert {candidate.knobs.warps_n for candidate in sliced} == {1, 2}


def test_the_kinds_cover_every_plan_and_every_way_of_feeding_a_pass() -> None:
    ones = [candidate.knobs for candidate in sanitize.BACKWARD.values()]
    keys = [candidate.keys for candidate in ones if candidate.keys is not None]
    rows = [
        pass_knobs
        for candidate in ones
        for pass_knobs in (candidate.dq, candidate.dk, candidate.dv)
        if pass_knobs is not None
    ]
    assert {candidate.plan for candidate in ones} == set(PASSES_OF_PLAN)
    assert {candidate.cta_order for candidate in ones} == set(get_args(CtaOrder))
    assert {pass_knobs.num_stages for pass_knobs in keys} == {1, 2, 3}
    assert {pass_knobs.query_subtiles for pass_knobs in keys} == {1, 2}
    assert {pass_knobs.num_stages for pass_knobs in rows} == {1, 2}
    assert {pass_knobs.column_warps for pass_knobs in rows} == {1, 2}
    assert {pass_knobs.slices for pass_knobs in rows} == {1, 2}
    for plan in PASSES_OF_PLAN:
        of_plan = [
            candidate for candidate in sanitize.BACKWARD.values() if candidate.knobs.plan == plan
        ]
        assert {candidate.copy_bytes for candidate in of_plan} == {2, 16}
    assert {candidate.dtype for candidate in sanitize.BACKWARD.values()} == {"fp16", "bf16"}


def test_the_references_are_attention_and_its_gradients() -> None:
    call = sanitize.calls_of(sanitize.KINDS["two_kernels"])[1]
    source = np.random.default_rng(0)
    values = {
        name: source.standard_normal(call.shapes[name], np.float32)
        for name in ("q", "k", "v", "dout")
    }
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    read = tuple(tensors[name] for name in ("q", "k", "v"))
    options: Any = {"softmax_scale": call.scale, "causal": True}
    o, lse = attention(*read, **options)
    computed = bare_launch.forward_reference(values, call)
    np.testing.assert_allclose(computed["o"], o.numpy(), atol=1e-5)
    np.testing.assert_allclose(computed["lse"], lse.numpy(), atol=1e-5)
    dlse = torch.randn(lse.shape)
    gradients = attention_backward(tensors["dout"], dlse, *read, **options)
    host_values = values | {"o": o.numpy(), "dlse": dlse.numpy()}
    for (name, value), expected in zip(
        bare_launch.backward_reference(host_values, call).items(), gradients, strict=True
    ):
        np.testing.assert_allclose(value, expected.numpy(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_rounding_is_torchs(dtype: str, torch_dtype: torch.dtype) -> None:
    values = np.random.default_rng(0).standard_normal(4096, np.float32) * 100
    rounded = torch.from_numpy(values).to(torch_dtype)
    computed = bare_launch.encode(values, dtype)
    assert torch.equal(torch.from_numpy(computed.view(np.int16)), rounded.view(torch.int16))
    np.testing.assert_array_equal(bare_launch.decode(computed, dtype), rounded.float().numpy())


@pytest.mark.parametrize("kind", ["one-stage", "unaligned"])
def test_a_right_kernel_passes(fake_kernel: FakeKernel, kind: str) -> None:
    memory = HostMemory()
    kernel = loader.load(fake_kernel())
    for call in sanitize.calls_of(sanitize.KINDS[kind]):
        assert bare_launch.run(kernel, call, memory) == []
        assert memory.held == {}


@pytest.mark.parametrize("kind", [*sanitize_retention.RETNET, *sanitize_retention.RETENTION])
def test_a_right_kernel_of_retention_passes_and_a_wrong_one_is_told(kind: str) -> None:
    candidate = sanitize.KINDS[kind]
    dtype = torch.float16 if candidate.dtype == "fp16" else torch.bfloat16
    base = HOSTS[candidate.op, candidate.direction]

    class Hardwired(base):  # type: ignore[misc, valid-type]  # one of four
        """Takes every scale for that of heads of 64."""

        def compute(self, p: Any) -> None:
            p.scale = 0.125
            super().compute(p)

    right: Any = base(dtype)
    wrong: Any = Hardwired(dtype)
    for call in sanitize_retention.retention_calls_of(candidate):
        memory = HostMemory()
        assert bare_retention.run(right, call, memory) == []
        assert memory.held == {}
    (*_, call) = sanitize_retention.retention_calls_of(candidate)
    assert bare_retention.run(wrong, call, HostMemory()) != []


@pytest.mark.parametrize("kind", ["fused-one-stage", "split-unaligned", "fused-three-stages-bf16"])
def test_a_right_backward_kernel_passes_and_a_wrong_one_is_told(kind: str) -> None:
    candidate = sanitize.KINDS[kind]
    dtype = torch.float16 if candidate.dtype == "fp16" else torch.bfloat16

    class Forgetful(HostBackward):
        """Knows nothing of a gradient of LSE."""

        def launch(self, params: Any, workspace: int, stream: int, device: int) -> None:
            params.dlse = None
            super().launch(params, workspace, stream, device)

    right: Any = HostBackward(dtype)
    wrong: Any = Forgetful(dtype)
    for call in sanitize.calls_of(candidate):
        memory = HostMemory()
        assert bare_launch.run(right, call, memory) == []
        assert memory.held == {}
    (_, call, *_) = sanitize.calls_of(candidate)
    said = bare_launch.run(wrong, call, HostMemory())
    assert {pass_knobs.split()[0] for pass_knobs in said} == {"dq", "dk"}


def test_persistent_kernels_get_more_tiles_than_a_gpu_holds() -> None:
    candidate = sanitize.KINDS["persistent"]
    call = sanitize.calls_of(candidate)[-1]
    p = call.problem
    tiles = p.batch * p.heads_q * -(-p.seqlen_q // candidate.knobs.block_m)
    spec = resolve("RTX4090").spec
    resident = spec.num_sms * (spec.max_threads_per_sm // candidate.knobs.num_threads)
    assert tiles > resident


def test_a_wrong_kernel_is_told(
    fake_kernel: FakeKernel, capsys: pytest.CaptureFixture[str]
) -> None:
    idle = str(fake_kernel("-DNO_WORK"))
    assert sanitize.run_all({"one-stage": idle}, HostMemory()) == 1
    said = capsys.readouterr()
    assert "one-stage, attention forward fp16 b1 h2/1 s1 d56: o is off" in said.err
    assert "lse is off" in said.err
    assert sanitize.run_all({"one-stage": str(fake_kernel())}, HostMemory()) == 0


@dataclass(frozen=True)
class Flags:
    """The fields of a toolchain that the sanitizer's builds change."""

    cuda_flags: tuple[str, ...] = ("-Lhere",)


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
        assert options["toolchain"].cuda_flags == ("-Lhere", sanitize.CHECK_RACES)
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
        return [
            BuildFailed(reason="no") if pass_knobs.name == bad else artifact
            for pass_knobs in kernels
        ]

    monkeypatch.setattr(sanitize, "build", build)
    monkeypatch.setattr(sanitize, "find_toolchain", Flags)
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
    backward = ["--direction", "backward", "--op", "attention"]
    assert sanitize.main([*store, "--build", "--arch", "90", *backward]) == 0
    built = set(json.loads((tmp_path / sanitize.MANIFEST).read_text()))
    assert built == set(sanitize.BACKWARD) | {
        k for k in sanitize_sm90.WGMMA if "wgmma-backward" in k
    }
    assert sanitize.main([*store, "--build", "--arch", "90", "--op", "retention"]) == 0
    built = set(json.loads((tmp_path / sanitize.MANIFEST).read_text()))
    assert built == set(sanitize_retention.RETENTION) | {
        kind for kind in sanitize_sm90.WGMMA if "wgmma-retention" in kind
    }


def test_a_call_of_the_driver_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: 100

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    with pytest.raises(ArtifactError, match="cuInit of the CUDA driver returned 100"):
        bare_launch.DeviceMemory()
