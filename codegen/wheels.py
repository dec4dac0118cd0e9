"""CUDA compilers from PyPI.

For CUDA 13 the wheels share a folder that is a toolkit (``site-packages/nvidia/cu13``). For CUDA 12 PyPI has a code
generator (ptxas), headers and a runtime, but no nvcc: its front end is taken from the wheels of 13.0, and a folder of
links puts the two together. What that compiles is told that it is compiled by 12, has PTX and machine code of 12, and
a runtime that a driver for CUDA 12 takes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
import shlex
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..core.identity import digest16
from ..core.trust import is_whole, make_folder, seal
from ..errors import ToolchainError
from ..settings import current

logger = logging.getLogger(__name__)

FRONT_END_WHEELS = ("nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-crt==13.0.88", "nvidia-nvvm==13.0.88")
WHEELS = (*FRONT_END_WHEELS, "nvidia-cuda-cccl==13.0.85", "nvidia-cuda-runtime==13.0.*")
"""A whole compiler from PyPI; all of one CUDA release, because mixed releases break ptxas."""

WHEELS_CU12 = (
    *FRONT_END_WHEELS,
    "nvidia-cuda-nvcc-cu12==12.9.86",
    "nvidia-cuda-runtime-cu12==12.9.79",
    "nvidia-cuda-cccl-cu12==12.9.27",
)
"""The same for drivers of CUDA 12; runtimes before 12.9 lack the static library that kernels link."""

INSTALL_WHEELS = "`pip install {}` (for a driver of CUDA 12 `pip install {}`)".format(
    *(" ".join(f"'{wheel}'" for wheel in wheels) for wheels in (WHEELS, WHEELS_CU12))
)
"""How to have them, for messages."""

# What each wheel brings, by one file of it that a compilation needs.
_FRONT_END = {
    "bin/nvcc": "nvidia-cuda-nvcc",
    "include/crt/host_config.h": "nvidia-cuda-crt",
    "nvvm/bin/cicc": "nvidia-nvvm",
}
_WHEEL_FILES = {
    **_FRONT_END,
    "bin/ptxas": "nvidia-cuda-nvcc",
    "include/cccl/cuda/std/type_traits": "nvidia-cuda-cccl",
    "include/cuda_runtime.h": "nvidia-cuda-runtime",
    "lib/libcudart_static.a": "nvidia-cuda-runtime",
}
_CU12_FILES = {
    "cuda_nvcc/bin/ptxas": "nvidia-cuda-nvcc-cu12",
    "cuda_nvcc/include/crt/host_config.h": "nvidia-cuda-nvcc-cu12",
    "cuda_cccl/include/cuda/std/type_traits": "nvidia-cuda-cccl-cu12",
    "cuda_runtime/include/cuda_runtime.h": "nvidia-cuda-runtime-cu12",
    "cuda_runtime/lib/libcudart_static.a": "nvidia-cuda-runtime-cu12",
}
MERGED_VERSION = "attention_autotuner_version"
"""The file in the root of such a folder that says which versions it is put together of."""

MERGED_FLAGS = ("--no-compress",)
"""For its every compilation: drivers of CUDA 12 need not know how the front end of 13 compresses."""

CU12_RELEASE = (12, 9)
CU12_PTX = "8.8"  # the newest version that its ptxas reads

_PTXAS = """#!/bin/sh
# The front end names a PTX version of its own release; what it emits for these targets is as old as they are, and
# anything that is not fails here with ptxas's own message.
for argument in "$@"; do
  case "$argument" in *.ptx) sed -i 's/^\\.version .*/.version {ptx}/' "$argument" || exit 1 ;; esac
done
exec {ptxas} "$@"
"""
_RUNTIME_HEADER = """// Every unit begins here: headers are to see the release of the headers, not of the front end.
#ifdef __CUDACC_VER_MAJOR__
#undef __CUDACC_VER_MAJOR__
#undef __CUDACC_VER_MINOR__
#undef __CUDACC_VER_BUILD__
#define __CUDACC_VER_MAJOR__ {major}
#define __CUDACC_VER_MINOR__ {minor}
#define __CUDACC_VER_BUILD__ {build}
#endif
#include "{header}"
"""


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def package_folders(name: str) -> list[Path]:
    """The folders of a Python package, found without importing it; none where it is not installed."""
    spec = importlib.util.find_spec(name)
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def wheel_roots() -> list[Path]:
    """CUDA folders that PyPI wheels of this Python share (``site-packages/nvidia/cu13``), newest first."""
    places = package_folders("nvidia")
    roots = [root for place in places for root in place.glob("cu[0-9]*") if root.is_dir()]
    return sorted(roots, key=lambda root: (len(root.name), root.name), reverse=True)


def _versions(site: Path, names: Iterable[str]) -> dict[str, str]:
    """Versions of the named distributions in a site-packages folder."""
    wanted = set(names)
    return {
        name: distribution.version
        for distribution in importlib.metadata.distributions(path=[str(site)])
        if (name := re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()) in wanted
    }


def _check_whole(root: Path, files: Mapping[str, str]) -> None:
    missing = sorted({name for file, name in files.items() if not (root / file).exists()})
    if missing:
        raise ToolchainError(f"{root} lacks what these wheels bring: {', '.join(missing)}")


def check_wheels(root: Path) -> Path:
    """The nvcc of the wheels under a root, which must make a whole compiler of one CUDA release.

    Raises:
        ToolchainError: a wheel is missing, or two are of different releases.
    """
    _check_whole(root, _WHEEL_FILES)
    versions = _versions(root.parents[1], _WHEEL_FILES.values())
    if len({numbers(version)[:2] for version in versions.values()}) > 1:
        listed = ", ".join(f"{name}=={version}" for name, version in sorted(versions.items()))
        raise ToolchainError(f"{root} mixes CUDA releases, which breaks ptxas: {listed}")
    return root / "bin" / "nvcc"


def cu12_places() -> list[Path]:
    """The folders of this Python's wheels that hold a code generator of CUDA 12."""
    places = package_folders("nvidia")
    return [place for place in places if (place / "cuda_nvcc" / "bin" / "ptxas").exists()]


def merge_cu12(place: Path) -> Path:
    """The compiler for CUDA 12 that the wheels in a folder make together: its front end, to be called by this path.

    Its folder of links is made in the cache, once for each set of versions.

    Raises:
        ToolchainError: wheels are missing, of a release that is not known here, or the cache cannot be written.
        UntrustedError: somebody untrusted owns the folder, or may change it.
    """
    front = place / "cu13"
    _check_whole(place, _CU12_FILES)
    _check_whole(front, _FRONT_END)
    versions = _versions(place.parent, {*_CU12_FILES.values(), *_FRONT_END.values()})
    of_cu12 = {name: version for name, version in versions.items() if name.endswith("-cu12")}
    if any(numbers(version)[:2] != CU12_RELEASE for version in of_cu12.values()):
        listed = ", ".join(f"{name}=={version}" for name, version in sorted(of_cu12.items()))
        raise ToolchainError(f"{place} must hold wheels of CUDA 12.9, it holds {listed}")
    generator = versions.get("nvidia-cuda-nvcc-cu12", "12.9")
    version = f"{generator}+{versions.get('nvidia-cuda-nvcc', '13.0')}"
    identity = digest16(versions, str(place), _PTXAS, _RUNTIME_HEADER)
    root = current().cache_dir / "toolchains" / f"cu12.{identity}"
    if not root.is_dir() or not is_whole(root):
        try:
            if root.is_dir():
                logger.warning("%s is not what was put together there: it is made again", root)
                root.rename(hidden := root.with_name(f".{uuid.uuid4().hex}"))
                shutil.rmtree(hidden)
            _merge(root, place, front, version)
        except OSError as error:
            raise ToolchainError(f"the CUDA 12 compiler cannot be put together: {error}") from error
    return root / "bin" / "nvcc"


def _merge(root: Path, place: Path, front: Path, version: str) -> None:
    """Make the folder of links; another process that was faster is as good."""
    staging = root.with_name(f".{uuid.uuid4().hex}")
    binaries, headers = staging / "bin", staging / "include"
    for folder in (binaries, headers / "crt"):
        make_folder(folder)
    try:
        for path in (front / "bin").iterdir():
            if path.name != "ptxas":
                (binaries / path.name).symlink_to(path)
        ptxas = binaries / "ptxas"
        real = shlex.quote(str(place / "cuda_nvcc" / "bin" / "ptxas"))
        ptxas.write_text(_PTXAS.format(ptx=CU12_PTX, ptxas=real), encoding="utf-8")
        ptxas.chmod(0o755)
        (staging / "nvvm").symlink_to(front / "nvvm")
        (staging / "lib").symlink_to(place / "cuda_runtime" / "lib")
        (headers / "cccl").symlink_to(place / "cuda_cccl" / "include")
        runtime = place / "cuda_runtime" / "include"
        major, minor, build = (*numbers(version.partition("+")[0]), 0, 0)[:3]
        text = _RUNTIME_HEADER.format(
            major=major, minor=minor, build=build, header=runtime / "cuda_runtime.h"
        )
        (headers / "cuda_runtime.h").write_text(text, encoding="utf-8")
        for path in (*runtime.iterdir(), *(place / "cuda_nvcc" / "include").iterdir()):
            if not (headers / path.name).exists():
                (headers / path.name).symlink_to(path)
        for path in (place / "cuda_nvcc" / "include" / "crt").iterdir():
            (headers / "crt" / path.name).symlink_to(path)
        # The macros that the front end's host code calls.
        (headers / "crt" / "host_runtime.h").unlink()
        (headers / "crt" / "host_runtime.h").symlink_to(
            front / "include" / "crt" / "host_runtime.h"
        )
        (staging / MERGED_VERSION).write_text(version, encoding="utf-8")
        seal(staging)
        staging.rename(root)
    except OSError:
        if not root.is_dir():
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
