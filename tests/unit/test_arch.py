from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

from attention_autotuner import arch
from attention_autotuner.arch import A100, H100, RTX4090, DeviceProperties, Policy, resolution
from attention_autotuner.arch.a100 import A100_SPEC
from attention_autotuner.arch.h100 import H100_SPEC, H200_SPEC
from attention_autotuner.arch.probe import ATTRIBUTES, current_device, probe
from attention_autotuner.arch.rtx4090 import RTX4090_SPEC
from attention_autotuner.arch.spec import ArchSpec
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedArchitectureError
from attention_autotuner.serving import runtime
from tests.devices import A100_80GB, H200, RTX3090

SPECS = [A100_SPEC, RTX4090_SPEC, H100_SPEC, H200_SPEC]

L40S = replace(
    RTX3090,
    name="NVIDIA L40S",
    compute_capability=(8, 9),
    num_sms=142,
    max_blocks_per_sm=24,
    l2_bytes=96 * 1024**2,
    sm_clock_khz=2_520_000,
    memory_clock_khz=9_001_000,
)
RTX5090 = replace(
    RTX3090,
    name="NVIDIA GeForce RTX 5090",
    compute_capability=(12, 0),
    num_sms=170,
    max_blocks_per_sm=24,
    l2_bytes=96 * 1024**2,
    sm_clock_khz=2_407_000,
    memory_clock_khz=14_001_000,
    memory_bus_bits=512,
)
TESLA_T4 = replace(RTX3090, name="Tesla T4", compute_capability=(7, 5))


class FakeDriver:
    """A driver with the given devices."""

    def __init__(self, *devices: DeviceProperties) -> None:
        self.devices = devices

    def version(self) -> int:
        return 13000

    def count(self) -> int:
        return len(self.devices)

    def name(self, device: int) -> str:
        return self.devices[device].name

    def attribute(self, device: int, attribute: int) -> int:
        name = next(name for name, number in ATTRIBUTES.items() if number == attribute)
        if name.startswith("compute_capability"):
            return self.devices[device].compute_capability[name.endswith("minor")]
        return int(getattr(self.devices[device], name))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeviceProperties]]:
    """The list of GPUs that this machine pretends to have."""
    present: list[DeviceProperties] = []
    monkeypatch.setattr(
        resolution, "probe", lambda device: probe(device, driver=FakeDriver(*present))
    )
    monkeypatch.setattr(resolution, "current_device", lambda: 0)
    with runtime.fresh():
        yield present


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_specs_are_sane(spec: ArchSpec) -> None:
    for item in fields(ArchSpec):
        value = getattr(spec, item.name)
        if isinstance(value, (int, float)) and item.name != "wgmma_flops_per_clk_per_sm":
            assert value > 0, item.name
    assert spec.smem_per_block_bytes + spec.smem_reserved_per_block_bytes <= spec.smem_per_sm_bytes
    assert spec.max_threads_per_sm % 32 == 0
    assert spec.max_registers_per_thread == 255
    assert (spec.wgmma_flops_per_clk_per_sm > 0) == (spec.compute_capability == (9, 0))


@pytest.mark.parametrize(
    ("spec", "field", "tflops"),
    [
        (A100_SPEC, "mma_flops_per_clk_per_sm", 312.0),
        (RTX4090_SPEC, "mma_flops_per_clk_per_sm", 165.2),
        (H100_SPEC, "wgmma_flops_per_clk_per_sm", 989.4),
    ],
)
def test_rates_clocks_and_sms_multiply_to_the_vendors_peak(
    spec: ArchSpec, field: str, tflops: float
) -> None:
    rate = getattr(spec, field) * spec.num_sms * spec.sm_clock_mhz * 1e6
    assert rate == pytest.approx(tflops * 1e12, rel=2e-3)


@pytest.mark.parametrize(
    ("device_type", "policy", "spec"),
    [
        ("A100", A100, A100_SPEC),
        ("a100", A100, A100_SPEC),
        ("RTX4090", RTX4090, RTX4090_SPEC),
        ("NVIDIA GeForce RTX 4090", RTX4090, RTX4090_SPEC),
        ("rtx-4090", RTX4090, RTX4090_SPEC),
        ("H100", H100, H100_SPEC),
        ("h200", H100, H200_SPEC),
        (A100, A100, A100_SPEC),
        (H100(H200_SPEC), H100, H200_SPEC),
    ],
)
def test_resolve_takes_names_classes_and_instances(
    device_type: str | Policy | type[Policy], policy: type[Policy], spec: ArchSpec
) -> None:
    resolved = arch.resolve(device_type)
    assert type(resolved) is policy
    assert resolved.spec == spec


def test_resolve_returns_a_policy_instance_itself() -> None:
    policy = RTX4090()
    assert arch.resolve(policy) is policy


def test_resolve_names_what_it_does_not_know(devices: list[DeviceProperties]) -> None:
    devices.append(RTX3090)
    with pytest.raises(
        UnsupportedArchitectureError, match=r"'V100'.*A100, H100, H200, RTX4090, RTX3090"
    ):
        arch.resolve("V100")
    with pytest.raises(UnsupportedArchitectureError, match="got int"):
        arch.resolve(8)  # type: ignore[arg-type]  # a wrong type is the point


def test_resolve_none_is_the_gpu_that_is_present(devices: list[DeviceProperties]) -> None:
    devices.append(H200)
    policy = arch.resolve(None)
    assert isinstance(policy, H100)
    assert policy.spec.name == "H200"


def test_resolve_takes_the_name_of_the_present_unknown_gpu(
    devices: list[DeviceProperties],
) -> None:
    devices.append(RTX3090)
    assert arch.resolve("rtx3090").spec.num_sms == 82
    assert arch.resolve("NVIDIA GeForce RTX 3090") is arch.resolve(None)


def test_without_a_gpu_detect_says_so(devices: list[DeviceProperties]) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="device 0 does not exist; 0 visible"):
        arch.detect()


def test_detect_takes_a_device_index(devices: list[DeviceProperties]) -> None:
    devices.extend([RTX3090, L40S])
    assert arch.detect(1).spec.name == "L40S"
    assert arch.detect(0).spec.name == "RTX3090"
    with pytest.raises(UnsupportedArchitectureError, match="device 2 does not exist; 2 visible"):
        arch.detect(2)


def test_an_old_gpu_is_refused_by_name(devices: list[DeviceProperties]) -> None:
    devices.append(TESLA_T4)
    with pytest.raises(UnsupportedArchitectureError, match=r"at least 8\.0, Tesla T4 has 7\.5"):
        arch.resolve(None)


def test_probe_asks_the_driver_for_every_property() -> None:
    assert probe(1, driver=FakeDriver(L40S, H200)) == H200


def test_the_current_device_is_the_one_torch_or_cupy_works_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 3)
    )
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            is_available=lambda: True, runtime=types.SimpleNamespace(getDevice=lambda: 2)
        )
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert current_device() == 3
    torch.cuda.is_initialized = lambda: False
    assert current_device() == 2
    cupy.cuda.is_available = lambda: False
    assert current_device() == 0


@pytest.mark.parametrize(
    ("properties", "name", "build_arch", "tflops", "bandwidth"),
    [
        (RTX3090, "RTX3090", "86", 71.0, 936e9),
        (L40S, "L40S", "89", 366.0, 864e9),
        (RTX5090, "RTX5090", "120", 209.5, 1792e9),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_gpu_gets_a_policy_within_its_own_limits(
    properties: DeviceProperties, name: str, build_arch: str, tflops: float, bandwidth: float
) -> None:
    policy = arch.from_properties(properties)
    spec = policy.spec
    assert (policy.name, spec.name, policy.build_arch) == (name, name, build_arch)
    assert spec.compute_capability == properties.compute_capability
    assert spec.smem_per_block_bytes == 99 * 1024
    assert spec.max_blocks_per_sm == properties.max_blocks_per_sm
    peak = spec.mma_flops_per_clk_per_sm * spec.num_sms * spec.sm_clock_mhz * 1e6
    assert peak == pytest.approx(tflops * 1e12, rel=0.02)
    assert spec.hbm_bytes_per_second == pytest.approx(bandwidth, rel=0.01)
    legal = policy.legal(Problem(dim_qk=128, dim_v=128))
    assert len(legal) > 100
    assert policy.default(Problem(dim_qk=256, dim_v=512)).family == "sm80"


def test_a_driver_that_hides_clocks_still_gives_a_policy() -> None:
    silent = replace(RTX3090, sm_clock_khz=0, memory_clock_khz=0)
    spec = arch.from_properties(silent).spec
    assert spec.sm_clock_mhz > 0
    assert spec.hbm_bytes_per_second > 0
    known = arch.from_properties(replace(H200, sm_clock_khz=0, memory_clock_khz=0)).spec
    assert known == H200_SPEC


def test_a_known_gpu_keeps_its_spec() -> None:
    assert arch.from_properties(H200).spec == H200_SPEC


def test_a_part_of_a_known_gpu_has_its_own_limits() -> None:
    part = replace(H200, name="NVIDIA H200 MIG 3g.71gb", num_sms=60, l2_bytes=30 * 1024**2)
    policy = arch.from_properties(part)
    assert isinstance(policy, H100)
    assert policy.spec == replace(H200_SPEC, num_sms=60, l2_bytes=30 * 1024**2)


def test_a_board_with_slower_memory_has_its_own_bandwidth() -> None:
    small = replace(A100_80GB, name="NVIDIA A100-SXM4-40GB", memory_clock_khz=1_215_000)
    spec = arch.from_properties(small).spec
    assert spec.hbm_bytes_per_second == pytest.approx(1555e9, rel=0.01)
    assert replace(spec, hbm_bytes_per_second=A100_SPEC.hbm_bytes_per_second) == A100_SPEC


@pytest.mark.parametrize(
    ("capability", "native"),
    [((8, 0), "80"), ((8, 6), "86"), ((9, 0), "90"), ((12, 1), "121"), ((13, 0), "121")],
)
def test_kernels_are_built_for_the_newest_arch_the_compiler_knows(
    capability: tuple[int, int], native: str
) -> None:
    assert resolution.native_arch(capability) == native


def test_nothing_is_built_for_a_gpu_without_the_instructions_of_8_0() -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"at least 8\.0, this GPU has 7\.5"):
        resolution.native_arch((7, 5))


def test_policies_of_the_three_architectures_offer_hundreds_of_candidates() -> None:
    for name in ("A100", "RTX4090", "H100"):
        assert len(arch.resolve(name).legal(Problem())) >= 200


def test_a_cupy_that_has_no_gpu_leaves_the_first_device() -> None:
    pytest.importorskip("cupy")
    program = (
        "import cupy; from attention_autotuner.arch.probe import current_device as d; print(d())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_a_process_asks_its_driver_once_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[FakeDriver] = []

    def start() -> FakeDriver:
        started.append(FakeDriver(L40S, H200))
        return started[-1]

    monkeypatch.setattr(sys.modules[probe.__module__], "cuda_driver", start)
    with runtime.fresh():
        assert [probe(0), probe(1), probe(1), probe(0)] == [L40S, H200, H200, L40S]
    assert len(started) == 2
