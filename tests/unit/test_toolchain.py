from __future__ import annotations

import importlib.util
import logging
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from attention_autotuner import settings
from attention_autotuner.codegen import cutlass, toolchain, wheels
from attention_autotuner.codegen.cutlass import PINNED_VERSION, find_cutlass
from attention_autotuner.codegen.toolchain import (
    find_cmake,
    find_disassembler,
    find_host_cxx,
    find_ninja,
    find_nvcc,
    find_toolchain,
)
from attention_autotuner.codegen.tools import clean_environment
from attention_autotuner.codegen.wheels import WHEELS, WHEELS_CU12, check_wheels
from attention_autotuner.errors import (
    ToolchainError,
    UnsupportedArchitectureError,
    UntrustedError,
)
from attention_autotuner.serving import runtime
from attention_autotuner.settings import Settings

FAKE_NVCC = """#!/bin/sh
case "$*" in
  --version) echo "Cuda compilation tools, release {release}, V{version}" ;;
  *--dryrun*) echo '#$ TOP={root}/bin/..' ;;
  *) exit 1 ;;
esac
"""


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def _toolkit(root: Path, version: str = "13.0.88", *, lib64: bool = True) -> Path:
    """A CUDA root whose nvcc answers like the real one."""
    release = version.rpartition(".")[0]
    _script(root / "bin" / "nvcc", FAKE_NVCC.format(release=release, version=version, root=root))
    library = root / ("lib64" if lib64 else "lib") / "libcudart_static.a"
    library.parent.mkdir()
    library.touch()
    return root


def _headers(root: Path, version: str = PINNED_VERSION) -> Path:
    """A folder that looks like a CUTLASS checkout."""
    numbers_of = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    defines = "".join(f"#define CUTLASS_{name} {number}\n" for name, number in numbers_of)
    for name, text in {"cute/layout.hpp": "", "cutlass/version.h": defines}.items():
        path = root / "include" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return root


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any nvcc: an empty folder as PATH, which tests may fill."""
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    for name in ("CUDA_HOME", "CUDA_PATH", "CUDAHOSTCXX", "CXX"):
        monkeypatch.delenv(name, raising=False)
    real_places = toolchain.nvcc_places
    monkeypatch.setattr(
        toolchain,
        "nvcc_places",
        lambda: (place for place in real_places() if not place.is_relative_to("/usr/local")),
    )
    monkeypatch.setattr("attention_autotuner.codegen.wheels.wheel_roots", list)
    monkeypatch.setattr("attention_autotuner.codegen.wheels.cu12_places", list)
    monkeypatch.setattr(toolchain, "driver_release", lambda: None)
    runtime.forget("toolchain")
    return path


def test_nvcc_places_in_their_order(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, from_path, home, cuda_path, named_place = (
        _toolkit(tmp_path / name, f"13.0.{number}")
        for number, name in enumerate(("wheels/nvidia/cu13", "a", "b", "c", "d"))
    )
    monkeypatch.setattr(
        "attention_autotuner.codegen.wheels.check_wheels", lambda root: root / "bin" / "nvcc"
    )
    monkeypatch.setattr("attention_autotuner.codegen.wheels.wheel_roots", lambda: [wheels])
    assert find_nvcc().root == wheels
    monkeypatch.setenv("CUDA_PATH", str(cuda_path))
    assert find_nvcc().root == cuda_path
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert find_nvcc().root == home
    monkeypatch.setenv("PATH", f"{from_path / 'bin'}:/usr/bin:/bin")
    assert find_nvcc().root == from_path
    assert find_nvcc(named_place).root == named_place
    assert find_nvcc(str(named_place / "bin" / "nvcc")).version == "13.0.4"


def test_a_wrapper_is_asked_for_its_root(bare: Path, tmp_path: Path) -> None:
    real = _toolkit(tmp_path / "cuda")
    wrapper = _script(bare / "nvcc", f'#!/bin/sh\nexec {real}/bin/nvcc "$@"\n')
    compiler = find_nvcc()
    assert (compiler.path, compiler.root, compiler.flags) == (wrapper, real, ())


def test_a_root_with_lib_alone_is_told_to_the_linker(bare: Path, tmp_path: Path) -> None:
    root = _toolkit(tmp_path / "cu13", lib64=False)
    assert find_nvcc(root).flags == (f"-L{root}/lib",)


def test_no_nvcc_says_what_to_install(bare: Path) -> None:
    with pytest.raises(ToolchainError) as caught:
        find_nvcc()
    assert "no usable nvcc" in str(caught.value)
    assert all(wheel in str(caught.value) for wheel in WHEELS)


def test_unusable_compilers_are_passed_over_and_named(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _script(bare / "nvcc", "#!/bin/sh\necho boom; exit 3\n")
    old = _toolkit(tmp_path / "old", "11.8.89")
    monkeypatch.setenv("CUDA_HOME", str(old))
    with pytest.raises(ToolchainError) as caught:
        find_nvcc()
    assert "boom" in str(caught.value)
    assert "11.8.89, older than 12.0" in str(caught.value)
    good = _toolkit(tmp_path / "good")
    monkeypatch.setenv("CUDA_PATH", str(good))
    assert find_nvcc().root == good


def test_a_given_nvcc_is_not_replaced_by_another(bare: Path, tmp_path: Path) -> None:
    _toolkit(tmp_path / "good")
    (bare / "nvcc").symlink_to(tmp_path / "good" / "bin" / "nvcc")
    with pytest.raises(ToolchainError, match="no-such-nvcc"):
        find_nvcc(tmp_path / "no-such-nvcc")
    text = tmp_path / "text"
    text.write_text("not a program")
    text.chmod(0o755)
    with pytest.raises(ToolchainError, match="cannot run"):
        find_nvcc(text)


def _install_wheels(root: Path, versions: dict[str, str]) -> None:
    for file, name in wheels._WHEEL_FILES.items():
        if name in versions:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).touch()
    for name, version in versions.items():
        info = root.parents[1] / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_incomplete_and_mixed_wheels_are_refused(tmp_path: Path) -> None:
    whole = {wheel.split("==")[0]: "13.0.88" for wheel in WHEELS}
    root = tmp_path / "whole" / "nvidia" / "cu13"
    _install_wheels(root, whole)
    check_wheels(root)
    for missing in whole:
        root = tmp_path / missing / "nvidia" / "cu13"
        _install_wheels(root, {name: v for name, v in whole.items() if name != missing})
        with pytest.raises(ToolchainError, match=missing):
            check_wheels(root)
    root = tmp_path / "mixed" / "nvidia" / "cu13"
    _install_wheels(root, {**whole, "nvidia-nvvm": "13.1.4"})
    with pytest.raises(ToolchainError, match=r"mixes CUDA releases.*nvidia-nvvm==13\.1\.4"):
        check_wheels(root)


def _drive(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """Put a driver here that runs kernels of a CUDA release."""
    monkeypatch.setattr(toolchain, "driver_release", lambda: (major, minor))


def test_the_first_compiler_whose_kernels_the_driver_runs(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    new, old = _toolkit(tmp_path / "new", "13.0.88"), _toolkit(tmp_path / "old", "12.6.85")
    monkeypatch.setenv("CUDA_HOME", str(new))
    _drive(monkeypatch, 12, 4)
    with pytest.raises(ToolchainError) as caught:
        find_nvcc()
    for part in ("CUDA 13.0.88", "kernels of CUDA 12 at most", WHEELS_CU12[3]):
        assert part in str(caught.value)
    monkeypatch.setenv("CUDA_PATH", str(old))
    assert find_nvcc().root == old
    # What the setting names may compile for another machine.
    assert find_nvcc(new).root == new
    assert "names it all the same" in caplog.text
    _drive(monkeypatch, 13, 0)
    assert find_nvcc().root == new


def test_a_driver_runs_kernels_of_its_major_release_and_of_earlier_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _drive(monkeypatch, 12, 0)
    assert toolchain.driver_runs({"nvcc": "12.9.86+13.0.88"})
    assert not toolchain.driver_runs({"nvcc": "13.0.88"})
    _drive(monkeypatch, 13, 1)
    assert toolchain.driver_runs({"nvcc": "12.9.86"})
    monkeypatch.setattr(toolchain, "driver_release", lambda: None)
    assert toolchain.driver_runs({"nvcc": "13.0.88"})


def test_the_driver_says_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UnsupportedArchitectureError("no driver")

    runtime.forget("toolchain")
    monkeypatch.setattr(toolchain, "cuda_driver", lambda: SimpleNamespace(version=lambda: 12040))
    assert toolchain.driver_release() == (12, 4)
    runtime.forget("toolchain")
    monkeypatch.setattr(toolchain, "cuda_driver", refuse)
    assert toolchain.driver_release() is None
    runtime.forget("toolchain")


def _install_cu12(place: Path, versions: dict[str, str]) -> None:
    front = place / "cu13"
    for root, files in ((front, wheels._FRONT_END), (place, wheels._CU12_FILES)):
        for file, name in files.items():
            if name in versions:
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                (root / file).touch()
    for name, version in versions.items():
        info = place.parent / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_wheels_of_cuda_12_are_put_together_once(tmp_path: Path) -> None:
    place = tmp_path / "site packages" / "nvidia"
    _install_cu12(place, dict(wheel.split("==") for wheel in WHEELS_CU12))
    (place / "cu13" / "include" / "crt" / "host_runtime.h").touch()
    (place / "cuda_nvcc" / "include" / "crt" / "host_runtime.h").touch()
    with settings.override(cache_dir=tmp_path / "cache"):
        nvcc = wheels.merge_cu12(place)
        assert wheels.merge_cu12(place) == nvcc
    root = nvcc.parents[1]
    assert [path.name for path in root.parent.iterdir()] == [root.name]
    assert nvcc.resolve() == place / "cu13" / "bin" / "nvcc"
    header = (root / "include" / "cuda_runtime.h").read_text()
    for number in ("MAJOR__ 12", "MINOR__ 9", "BUILD__ 86"):
        assert f"#define __CUDACC_VER_{number}\n" in header
    assert (root / "include" / "crt" / "host_runtime.h").resolve().is_relative_to(place / "cu13")
    assert (
        (root / "include" / "crt" / "host_config.h").resolve().is_relative_to(place / "cuda_nvcc")
    )
    # Its path, too, says what it is.
    answers = _toolkit(tmp_path / "answers") / "bin" / "nvcc"
    _script(answers, FAKE_NVCC.format(release="13.0", version="13.0.88", root=root))
    nvcc.unlink()
    nvcc.symlink_to(answers)
    compiler = find_nvcc(nvcc)
    assert (compiler.version, compiler.root) == ("12.9.86+13.0.88", root)
    assert compiler.flags == (f"-L{root}/lib", "--no-compress")
    # The code generator is called by its real name, blanks and all, after the PTX was renamed.
    real = place / "cuda_nvcc" / "bin" / "ptxas"
    _script(real, '#!/bin/sh\nhead -n 1 "$2"\n')
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(".version 9.0\n.target sm_80\n")
    command = [str(root / "bin" / "ptxas"), "-v", str(ptx)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ".version 8.8\n"


def test_links_to_a_toolchain_that_were_changed_are_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "site" / "nvidia"
    _install_cu12(place, dict(wheel.split("==") for wheel in WHEELS_CU12))
    for root in (place / "cu13", place / "cuda_nvcc"):
        (root / "include" / "crt" / "host_runtime.h").touch()
    with settings.override(cache_dir=tmp_path / "cache"):
        nvcc = wheels.merge_cu12(place)
        ptxas = nvcc.with_name("ptxas")
        wrapper = ptxas.read_text()
        nvcc.unlink()
        nvcc.symlink_to("/bin/true")
        assert wheels.merge_cu12(place) == nvcc
        assert nvcc.resolve() == place / "cu13" / "bin" / "nvcc"
        ptxas.write_text("#!/bin/sh\n")
        assert wheels.merge_cu12(place) == nvcc
        assert ptxas.read_text() == wrapper
        assert caplog.text.count("is not what was put together there") == 2
        assert [path.name for path in nvcc.parents[2].iterdir()] == [nvcc.parents[1].name]
        ptxas.chmod(0o777)
        with pytest.raises(UntrustedError, match="ptxas is not used"):
            wheels.merge_cu12(place)


@pytest.mark.parametrize("missing", [wheel.split("==")[0] for wheel in WHEELS_CU12])
def test_incomplete_wheels_of_cuda_12_are_refused(tmp_path: Path, missing: str) -> None:
    place = tmp_path / "site" / "nvidia"
    versions = dict(wheel.split("==") for wheel in WHEELS_CU12)
    del versions[missing]
    _install_cu12(place, versions)
    with (
        settings.override(cache_dir=tmp_path / "cache"),
        pytest.raises(ToolchainError, match=f"lacks what these wheels bring: .*{missing}"),
    ):
        wheels.merge_cu12(place)


def test_wheels_of_another_cuda_12_and_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    place, good = tmp_path / "site" / "nvidia", tmp_path / "good" / "nvidia"
    versions = dict(wheel.split("==") for wheel in WHEELS_CU12)
    _install_cu12(good, versions)
    _install_cu12(place, versions | {"nvidia-cuda-runtime-cu12": "12.8.90"})
    with pytest.raises(ToolchainError, match=r"CUDA 12\.9, it holds .*runtime-cu12==12\.8\.90"):
        wheels.merge_cu12(place)
    (tmp_path / "file").touch()
    with (
        settings.override(cache_dir=tmp_path / "file"),
        pytest.raises(ToolchainError, match="cannot be put together"),
    ):
        wheels.merge_cu12(good)


def test_the_wheels_named_are_those_of_the_packaging(repository: Path) -> None:
    text = (repository / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^toolchain = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    assert sorted(re.findall(r'"([^"]+)"', listed[1])) == sorted(WHEELS)


def test_cutlass_places_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, checkout, named_place = (
        _headers(tmp_path / name) for name in ("package", "checkout", "given")
    )
    monkeypatch.setattr(cutlass, "package_dir", lambda: package / "include")
    monkeypatch.setattr(cutlass, "checkout_dir", lambda: tmp_path / "absent")
    assert find_cutlass() == (package / "include", PINNED_VERSION)
    monkeypatch.setattr(cutlass, "checkout_dir", lambda: checkout)
    assert find_cutlass()[0] == checkout / "include"
    assert find_cutlass(named_place)[0] == named_place / "include"
    assert find_cutlass(str(named_place / "include"))[0] == named_place / "include"


def test_missing_cutlass_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutlass, "package_dir", lambda: None)
    monkeypatch.setattr(cutlass, "checkout_dir", lambda: tmp_path / "nothing")
    with pytest.raises(ToolchainError, match=r"pip install --no-deps nvidia-cutlass==4\.2\.0\.0"):
        find_cutlass()
    with pytest.raises(ToolchainError, match="ATTENTION_AUTOTUNER_CUTLASS_DIR") as caught:
        find_cutlass(tmp_path / "given")
    assert str(tmp_path / "given") in str(caught.value)


def test_another_cutlass_version_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = _headers(tmp_path, "4.3.1")
    with caplog.at_level(logging.WARNING):
        assert find_cutlass(root) == (root / "include", "4.3.1")
    assert "4.3.1" in caplog.text
    assert PINNED_VERSION in caplog.text
    (root / "include" / "cutlass" / "version.h").write_text("#pragma once\n")
    with pytest.raises(ToolchainError, match="CUTLASS_MAJOR"):
        find_cutlass(root)


def test_cutlass_pins_agree(repository: Path) -> None:
    text = (repository / "third_party" / "cutlass" / "resolve.cmake").read_text(encoding="utf-8")
    pin = re.search(r"set\(ATTENTION_AUTOTUNER_CUTLASS_VERSION ([\d.]+)\)", text)
    assert pin is not None
    assert pin[1] == PINNED_VERSION
    readme = (repository / "third_party" / "cutlass" / "README.md").read_text(encoding="utf-8")
    assert cutlass.INSTALL_COMMAND in readme


def test_cutlass_of_this_environment_is_the_pinned_one() -> None:
    include, version = find_cutlass()
    assert version == PINNED_VERSION
    assert (include / "cute" / "layout.hpp").is_file()


def test_cmake_resolves_cutlass_as_python_does(tmp_path: Path, repository: Path) -> None:
    named_place = _headers(tmp_path / "given")
    script = tmp_path / "resolve.cmake"
    script.write_text(
        f'include("{repository}/third_party/cutlass/resolve.cmake")\n'
        "attention_autotuner_resolve_cutlass(found)\n"
        'message(STATUS "found=${found}")\n'
    )

    def resolve(*variables: str) -> str:
        options = [f"-D{item}" for item in variables]
        command = [str(find_cmake()[0]), *options, "-P", str(script)]
        done = subprocess.run(
            command, env=clean_environment(), capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    python = f"Python3_EXECUTABLE={sys.executable}"
    assert f"found={find_cutlass()[0]}\n" in resolve(python)
    assert f"found={named_place}/include\n" in resolve(f"CUTLASS_DIR={named_place}")
    assert f"found={named_place}/include\n" in resolve(f"CUTLASS_DIR={named_place}/include")
    output = resolve(f"CUTLASS_DIR={tmp_path}/nothing")
    assert "pip install --no-deps nvidia-cutlass==4.2.0.0" in output
    other = _headers(tmp_path / "other", "4.3.1")
    assert "CUTLASS 4.3.1" in resolve(f"CUTLASS_DIR={other}")


def test_host_compiler_order(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="install g\\+\\+"):
        find_host_cxx()
    for name in ("clang++", "c++", "g++"):
        _script(bare / name, f"#!/bin/sh\necho {name} 1.0\necho more\n")
        assert find_host_cxx() == (bare / name, f"{name} 1.0")
    mine = _script(tmp_path / "mine", "#!/bin/sh\necho mine 2.0\n")
    monkeypatch.setenv("CXX", str(mine))
    assert find_host_cxx() == (mine, "mine 2.0")


def test_cmake_and_ninja_are_found_here() -> None:
    for path, version in (find_cmake(), find_ninja()):
        done = subprocess.run([path, "--version"], check=True, capture_output=True, text=True)
        assert version in done.stdout


def test_build_tools_beside_python_come_first_and_broken_ones_are_passed_over(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "scripts"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(scripts))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="pip install cmake"):
        find_cmake()
    _script(bare / "cmake", "#!/bin/sh\necho cmake version 3.20.1\n")
    with pytest.raises(ToolchainError, match=r"older than 3\.24"):
        find_cmake()
    _script(bare / "cmake", "#!/bin/sh\necho cmake version 3.30.1\n")
    assert find_cmake() == (bare / "cmake", "3.30.1")
    _script(scripts / "cmake", "#!/no/such/python\n")
    assert find_cmake() == (bare / "cmake", "3.30.1")
    _script(scripts / "cmake", "#!/bin/sh\necho cmake version 3.31.0\n")
    assert find_cmake() == (scripts / "cmake", "3.31.0")


def test_a_disassembler_needs_its_helper(bare: Path) -> None:
    assert find_disassembler() is None
    _script(bare / "cuobjdump", "#!/bin/sh\n")
    assert find_disassembler() is None
    _script(bare / "nvdisasm", "#!/bin/sh\n")
    assert find_disassembler() == bare / "cuobjdump"


def test_flags_from_outside_do_not_reach_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
    monkeypatch.setenv("CMAKE_CUDA_COMPILER_LAUNCHER", "ccache")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    env = clean_environment()
    assert "NVCC_APPEND_FLAGS" not in env
    assert "CMAKE_CUDA_COMPILER_LAUNCHER" not in env
    assert env["LC_ALL"] == "C"
    assert env["LANG"] == "de_DE.UTF-8"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_the_toolchain_of_this_machine(tmp_path: Path) -> None:
    runtime.forget("toolchain")
    compiler = find_toolchain(Settings(cache_dir=tmp_path))
    assert re.fullmatch(r"\d+\.\d+\.\d+", compiler.nvcc_version)
    assert (compiler.cuda_root / "nvvm" / "bin" / "cicc").exists()
    assert compiler is find_toolchain(Settings(cache_dir=tmp_path / "other"))
    assert not any("/" in value for value in (compiler.nvcc_version, compiler.cutlass_version))
    with pytest.raises(ToolchainError, match="no-such-nvcc"):
        find_toolchain(Settings(nvcc=tmp_path / "no-such-nvcc"))
