"""Loading kernel libraries, with a host-side stand-in compiled by gcc."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from attention_autotuner.core import abi
from attention_autotuner.errors import ArtifactError, DeviceMemoryError
from attention_autotuner.serving import loader
from tests.fake_pipeline import FakeBuilt, report

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
FakeKernel = Callable[..., Path]


def built_as(digest: str, path: Path) -> FakeBuilt:
    return FakeBuilt(digest=digest, path=path, report=report())


def calls(kernel: loader.LoadedKernel, name: str) -> int:
    return int(getattr(ctypes.CDLL(str(kernel.path)), f"fake_{name}_count")())


def test_load_describes_the_kernel(fake_kernel: FakeKernel) -> None:
    kernel = loader.load(fake_kernel())
    assert kernel.info == loader.KernelDescription(
        name="fake",
        padded_dim_qk=64,
        padded_dim_v=48,
        block_m=128,
        block_n=32,
        num_threads=256,
        static_smem_bytes=1024,
        dynamic_smem_bytes=49152,
        copy_bytes=16,
    )


def test_load_takes_artifacts_folders_and_files_and_loads_once(fake_kernel: FakeKernel) -> None:
    path = fake_kernel()
    assert loader.load(path) is loader.load(str(path)) is loader.load(path.parent)
    built = built_as("a" * 64, path)
    assert loader.load(built) is loader.load(built_as("a" * 64, path.parent))
    assert loader.load(built) is not loader.load(built_as("b" * 64, path))


def test_load_is_thread_safe(fake_kernel: FakeKernel) -> None:
    path = fake_kernel()
    kernels: list[loader.LoadedKernel] = []
    threads = [Thread(target=lambda: kernels.append(loader.load(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels) == 8
    assert len(set(map(id, kernels))) == 1


def test_a_rebuilt_file_is_loaded_again(fake_kernel: FakeKernel, tmp_path: Path) -> None:
    target = tmp_path / "kernel.so"
    shutil.copy(fake_kernel(), target)
    first = loader.load(target)
    shutil.copy(fake_kernel("-DWORKSPACE_BYTES=64"), tmp_path / "next.so")
    (tmp_path / "next.so").replace(target)
    second = loader.load(target)
    params = abi.AttentionForwardParams()
    assert (first.workspace_bytes(params), second.workspace_bytes(params)) == (0, 64)


def test_prepare_runs_once_a_device(fake_kernel: FakeKernel) -> None:
    kernel = loader.load(fake_kernel())
    assert 0 not in kernel._prepared
    for device in (0, 0, 1, 0):
        kernel.prepare(device)
    assert 0 in kernel._prepared
    assert 1 in kernel._prepared
    assert calls(kernel, "prepared") == 2


def test_a_failed_prepare_is_typed_and_tried_again(fake_kernel: FakeKernel) -> None:
    kernel = loader.load(fake_kernel("-DPREPARE_STATUS=4"))
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"prepare it on cuda:0: some other status.*4"):
            kernel.prepare(0)
    assert 0 not in kernel._prepared
    assert calls(kernel, "prepared") == 2


def test_launch_failures_are_typed(fake_kernel: FakeKernel) -> None:
    params = abi.AttentionForwardParams()
    with pytest.raises(ArtifactError, match=r"cannot launch it: a bad shape \(status 2"):
        loader.load(fake_kernel("-DLAUNCH_STATUS=2")).launch(params, 0, 0, 0)
    with pytest.raises(DeviceMemoryError, match="status 1002"):
        loader.load(fake_kernel("-DLAUNCH_STATUS=1002")).launch(params, 0, 0, 0)
    with pytest.raises(MemoryError):
        loader.load(fake_kernel("-DLAUNCH_STATUS=1002")).launch(params, 0, 0, 0)


def test_another_major_version_is_refused(fake_kernel: FakeKernel) -> None:
    with pytest.raises(
        ArtifactError, match=rf"built for ABI 2001, this package speaks {abi.ABI_VERSION}"
    ):
        loader.load(fake_kernel("-DVERSION=2001"))


def test_a_newer_minor_version_is_served(fake_kernel: FakeKernel) -> None:
    assert loader.load(fake_kernel("-DVERSION=1007")).info.name == "fake"


def test_what_is_no_kernel_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot load the kernel library"):
        loader.load(tmp_path / "absent.so")
    with pytest.raises(ArtifactError, match="cannot load the kernel library"):
        loader.load(tmp_path)
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"\x7fELF damaged")
    with pytest.raises(ArtifactError, match=r"cannot load the kernel library .*damaged\.so"):
        loader.load(damaged)
    with pytest.raises(ArtifactError, match="cannot load"):
        loader.load(built_as("c" * 64, tmp_path / "absent.so"))


def test_a_library_that_lacks_an_entry_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "kernel.so"
    (tmp_path / "empty.c").write_text("int unrelated;\n")
    command = ["gcc", "-shared", "-fPIC", str(tmp_path / "empty.c"), "-o", str(library)]
    subprocess.run(command, check=True)
    with pytest.raises(ArtifactError, match="lacks attention_autotuner_abi_version"):
        loader.load(library)
