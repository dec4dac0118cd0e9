"""The tools a build needs: nvcc, its CUDA root, a host compiler, CUTLASS headers, CMake and Ninja.

Each finder looks in a documented order and raises :class:`~..errors.ToolchainError` with what it tried and what to
install. :func:`find_toolchain` puts them together and caches the answer; a failure is not cached, so that a tool
installed meanwhile is found.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..errors import ToolchainError
from ..settings import Settings, current
from .cutlass import find_cutlass

MIN_NVCC = (12, 0)  # the first release that knows sm_89 and sm_90 alike
MIN_CMAKE = (3, 24)  # the cmake_minimum_required of templates/cmake
WHEELS = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.*",
)
"""A whole compiler from PyPI; all of one CUDA release, because mixed releases break ptxas."""

# What each wheel brings, by one file of it that a compilation needs.
_WHEEL_FILES = {
    "bin/nvcc": "nvidia-cuda-nvcc",
    "bin/ptxas": "nvidia-cuda-nvcc",
    "include/crt/host_config.h": "nvidia-cuda-crt",
    "nvvm/bin/cicc": "nvidia-nvvm",
    "include/cccl/cuda/std/type_traits": "nvidia-cuda-cccl",
    "include/cuda_runtime.h": "nvidia-cuda-runtime",
    "lib/libcudart_static.a": "nvidia-cuda-runtime",
}
_INSTALL_NVCC = f"install a CUDA toolkit >= {MIN_NVCC[0]}.{MIN_NVCC[1]}, or run `pip install " + (
    " ".join(f"'{wheel}'" for wheel in WHEELS) + "`"
)
_PROBE_SECONDS = 60.0

# Variables that would change a build behind the back of its digest.
_UNWANTED = frozenset(
    {
        "CFLAGS",
        "CXXFLAGS",
        "CUDAARCHS",
        "CUDACXX",
        "CUDAFLAGS",
        "CUDAHOSTCXX",
        "LDFLAGS",
        "MAKEFLAGS",
        "NINJA_STATUS",
        "NVCC_APPEND_FLAGS",
        "NVCC_CCBIN",
        "NVCC_PREPEND_FLAGS",
    }
)


def clean_environment() -> dict[str, str]:
    """The process environment for build tools: no flags from outside, messages in English."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _UNWANTED and not name.startswith("CMAKE_")
    }
    return {**kept, "LC_ALL": "C"}


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Everything a build runs, with versions.

    Attributes:
        nvcc: the compiler, as found (it may be a wrapper script).
        nvcc_version: e.g. ``13.0.88``.
        cuda_root: the toolkit folder that nvcc itself reports.
        cuda_flags: flags that this installation needs for every compilation and link.
        host_cxx: C++ compiler that nvcc calls.
        host_cxx_version: first line of its ``--version``.
        cutlass_include: folder with ``cute/`` and ``cutlass/``.
        cutlass_version: e.g. ``4.2.0``.
        cmake, cmake_version, ninja: the build tools.
    """

    nvcc: Path
    nvcc_version: str
    cuda_root: Path
    cuda_flags: tuple[str, ...]
    host_cxx: Path
    host_cxx_version: str
    cutlass_include: Path
    cutlass_version: str
    cmake: Path
    cmake_version: str
    ninja: Path

    def identity(self) -> dict[str, str]:
        """What of it may change the compiled code: versions, never paths."""
        return {
            "nvcc": self.nvcc_version,
            "host_cxx": self.host_cxx_version,
            "cutlass": self.cutlass_version,
        }


@dataclass(frozen=True, kw_only=True)
class Nvcc:
    """A working CUDA compiler: its path, version, toolkit folder, and the flags that its layout needs."""

    path: Path
    version: str
    root: Path
    flags: tuple[str, ...]


def _probe(*command: str | Path) -> str:
    """The output of a short command, both streams together.

    Raises:
        ToolchainError: it cannot be run or fails.
    """
    shown = " ".join(map(str, command))
    try:
        done = subprocess.run(
            command,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"cannot run `{shown}`: {error}") from error
    if done.returncode != 0:
        raise ToolchainError(
            f"`{shown}` failed with status {done.returncode}: {done.stdout[-500:]}"
        )
    return done.stdout


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def wheel_roots() -> list[Path]:
    """CUDA folders that PyPI wheels of this Python share (``site-packages/nvidia/cu13``), newest first."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    roots = [root for place in places for root in Path(place).glob("cu[0-9]*") if root.is_dir()]
    return sorted(roots, key=lambda root: (len(root.name), root.name), reverse=True)


def check_wheels(root: Path) -> None:
    """Check that the wheels under a root make a whole compiler of one CUDA release.

    Raises:
        ToolchainError: a wheel is missing, or two are of different releases.
    """
    missing = sorted({name for file, name in _WHEEL_FILES.items() if not (root / file).exists()})
    if missing:
        raise ToolchainError(f"{root} lacks what these wheels bring: {', '.join(missing)}")
    names = set(_WHEEL_FILES.values())
    versions: dict[str, str] = {}
    for found in importlib.metadata.distributions(path=[str(root.parents[1])]):
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
        if name in names:
            versions[name] = found.version
    if len({_version_tuple(version)[:2] for version in versions.values()}) > 1:
        listed = ", ".join(f"{name}=={version}" for name, version in sorted(versions.items()))
        raise ToolchainError(f"{root} mixes CUDA releases, which breaks ptxas: {listed}")


def probe_nvcc(path: Path) -> Nvcc:
    """Ask an nvcc, or a wrapper of it, for its version and its root.

    Raises:
        ToolchainError: it does not run, is too old, or does not say.
    """
    version = re.search(r"\bV(\d+\.\d+\.\d+)", _probe(path, "--version"))
    if version is None:
        raise ToolchainError(f"`{path} --version` names no version")
    if _version_tuple(version[1]) < MIN_NVCC:
        raise ToolchainError(f"{path} is {version[1]}, older than {_dotted(MIN_NVCC)}")
    dryrun = _probe(path, "-v", "--dryrun", "-E", "-x", "cu", os.devnull)
    top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    if top is None:
        raise ToolchainError(f"`{path} --dryrun` does not name its root (TOP=)")
    root = Path(top[1].strip()).resolve()
    # Wheels keep the runtime in lib, where nvcc.profile looks in lib64.
    bare = (root / "lib" / "libcudart_static.a").exists() and not (root / "lib64").exists()
    flags = (f"-L{root / 'lib'}",) if bare else ()
    return Nvcc(path=path, version=version[1], root=root, flags=flags)


def _nvcc_places() -> Iterator[Path]:
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "bin" / "nvcc"
    yield Path("/usr/local/cuda/bin/nvcc")


def find_nvcc(nvcc: Path | str | None = None) -> Nvcc:
    """Find nvcc: the given one alone, else PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, PyPI wheels.

    Args:
        nvcc: the compiler or a toolkit folder (the ``NVCC`` setting).

    Raises:
        ToolchainError: none works; the message lists each place with what is wrong there.
    """
    if nvcc is not None:
        given = Path(nvcc)
        return probe_nvcc(given / "bin" / "nvcc" if given.is_dir() else given)
    problems = []
    for place in _nvcc_places():
        if not place.exists():
            continue
        try:
            return probe_nvcc(place)
        except ToolchainError as error:
            problems.append(str(error))
    for root in wheel_roots():
        if not (root / "bin" / "nvcc").exists():
            continue
        try:
            check_wheels(root)
            return probe_nvcc(root / "bin" / "nvcc")
        except ToolchainError as error:
            problems.append(str(error))
    found = "; ".join(problems) or "none on PATH, in CUDA_HOME, /usr/local/cuda or PyPI wheels"
    raise ToolchainError(f"no usable nvcc: {found}. To fix it, {_INSTALL_NVCC}")


def find_host_cxx() -> tuple[Path, str]:
    """The C++ compiler for host code: CUDAHOSTCXX, CXX, g++, c++, clang++; with the first line of its version.

    Raises:
        ToolchainError: there is none.
    """
    problems = []
    for name in (os.environ.get("CUDAHOSTCXX"), os.environ.get("CXX"), "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        try:
            return Path(path), _probe(path, "--version").strip().splitlines()[0]
        except ToolchainError as error:
            problems.append(str(error))
    found = "; ".join(problems) or "none of g++, c++, clang++ on PATH"
    raise ToolchainError(f"no usable C++ compiler: {found}. To fix it, install g++ or set CXX")


def _tool_places(name: str) -> Iterator[Path]:
    """Places of a build tool: this Python's scripts, its own Python package, PATH."""
    yield Path(sysconfig.get_path("scripts")) / name
    spec = importlib.util.find_spec(name)
    for place in (spec.submodule_search_locations or []) if spec else []:
        yield Path(place) / "data" / "bin" / name
    on_path = shutil.which(name)
    if on_path:
        yield Path(on_path)


def _find_tool(name: str, minimum: tuple[int, ...]) -> tuple[Path, str]:
    problems = []
    for place in _tool_places(name):
        if not place.exists():
            continue
        try:
            version = re.search(r"\d+(?:\.\d+)+", _probe(place, "--version"))
        except ToolchainError as error:
            problems.append(str(error))
            continue
        if version is not None and _version_tuple(version[0]) >= minimum:
            return place, version[0]
        problems.append(f"{place} is older than {_dotted(minimum)}")
    found = "; ".join(problems) or "neither installed for this Python nor on PATH"
    raise ToolchainError(f"no usable {name}: {found}. To fix it, run `pip install {name}`")


def find_cmake() -> tuple[Path, str]:
    """CMake and its version.

    Raises:
        ToolchainError: there is none of at least :data:`MIN_CMAKE`.
    """
    return _find_tool("cmake", MIN_CMAKE)


def find_ninja() -> tuple[Path, str]:
    """Ninja and its version.

    Raises:
        ToolchainError: there is none.
    """
    return _find_tool("ninja", (1, 10))


def find_disassembler() -> Path | None:
    """``cuobjdump`` with an ``nvdisasm`` that it can call (PyPI wheels, PATH, CUDA root), or None."""
    on_path = shutil.which("cuobjdump")
    places = [root / "bin" / "cuobjdump" for root in wheel_roots()]
    places += [Path(on_path)] if on_path else []
    places += [place.parent / "cuobjdump" for place in _nvcc_places()]
    for place in places:
        beside = (place.parent / "nvdisasm").exists()
        if place.exists() and (beside or shutil.which("nvdisasm") is not None):
            return place
    return None


@lru_cache(maxsize=8)
def _assemble(nvcc: str | None, cutlass_dir: str | None) -> Toolchain:
    compiler = find_nvcc(nvcc)
    host_cxx, host_cxx_version = find_host_cxx()
    cutlass_include, cutlass_version = find_cutlass(cutlass_dir)
    cmake, cmake_version = find_cmake()
    ninja, _ = find_ninja()
    return Toolchain(
        nvcc=compiler.path,
        nvcc_version=compiler.version,
        cuda_root=compiler.root,
        cuda_flags=compiler.flags,
        host_cxx=host_cxx,
        host_cxx_version=host_cxx_version,
        cutlass_include=cutlass_include,
        cutlass_version=cutlass_version,
        cmake=cmake,
        cmake_version=cmake_version,
        ninja=ninja,
    )


def find_toolchain(settings: Settings | None = None) -> Toolchain:
    """Find every tool that a build needs; cached by the settings that decide it.

    Args:
        settings: whose ``nvcc`` and ``cutlass_dir`` decide; default those in force.

    Raises:
        ToolchainError: something is missing or does not fit; the message says what to install.
    """
    settings = settings or current()
    return _assemble(
        str(settings.nvcc) if settings.nvcc is not None else None,
        str(settings.cutlass_dir) if settings.cutlass_dir is not None else None,
    )
