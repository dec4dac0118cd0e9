"""The tools a build needs: nvcc, its CUDA root, a host compiler, CUTLASS headers, CMake and Ninja.

Each finder looks in a documented order and raises :class:`~..errors.ToolchainError` with what it tried and what to
install. :func:`find_toolchain` puts them together and caches the answer; a failure is not cached, so that a tool
installed meanwhile is found.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..arch.probe import cuda_driver
from ..core.memo import remembered
from ..errors import ToolchainError, UnsupportedArchitectureError
from ..settings import Settings, current
from . import wheels
from .cutlass import find_cutlass
from .tools import run_tool

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

MIN_NVCC = (12, 0)  # the first release that knows sm_89 and sm_90 alike
MIN_CMAKE = (3, 24)  # the cmake_minimum_required of templates/cmake
_TOOLKIT = f"a CUDA toolkit >= {MIN_NVCC[0]}.{MIN_NVCC[1]}"
_PROBE_SECONDS = 60.0


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
        """The versions that may change the compiled code, never paths."""
        return {
            "nvcc": self.nvcc_version,
            "host_cxx": self.host_cxx_version,
            "cutlass": self.cutlass_version,
        }

    @property
    def compiler_stamp(self) -> str:
        """The file of the compiler, as it is now: what failed with one may succeed with another of its version."""
        try:
            status = self.nvcc.stat()
        except OSError:
            return ""
        return f"{self.nvcc} {status.st_size} {status.st_mtime_ns}"


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
    done = run_tool(command, seconds=_PROBE_SECONDS)
    if done.returncode != 0:
        shown = " ".join(map(str, command))
        raise ToolchainError(
            f"`{shown}` failed with status {done.returncode}: {done.stdout[-500:]}"
        )
    return done.stdout


def _first_usable(
    what: str, attempts: Iterable[Callable[[], Result]], none: str, fix: str
) -> Result:
    """The result of the first attempt that does not fail.

    Raises:
        ToolchainError: all fail; the message lists why, or says ``none`` where there are none.
    """
    problems = []
    for attempt in attempts:
        try:
            return attempt()
        except ToolchainError as error:  # noqa: PERF203  # a failure is why the loop goes on
            problems.append(str(error))
    raise ToolchainError(f"no usable {what}: {'; '.join(problems) or none}. To fix it, {fix}")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def probe_nvcc(path: Path) -> Nvcc:
    """Ask an nvcc, or a wrapper of it, for its version and its root.

    Raises:
        ToolchainError: it does not run, is too old, or does not say.
    """
    version = re.search(r"\bV(\d+\.\d+\.\d+)", _probe(path, "--version"))
    if version is None:
        raise ToolchainError(f"`{path} --version` names no version")
    if wheels.numbers(version[1]) < MIN_NVCC:
        raise ToolchainError(f"{path} is {version[1]}, older than {_dotted(MIN_NVCC)}")
    dryrun = _probe(path, "-v", "--dryrun", "-E", "-x", "cu", os.devnull)
    top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    if top is None:
        raise ToolchainError(f"`{path} --dryrun` does not name its root (TOP=)")
    root = Path(top[1].strip()).resolve()
    # Wheels keep the runtime in lib, where nvcc.profile looks in lib64.
    bare = (root / "lib" / "libcudart_static.a").exists() and not (root / "lib64").exists()
    flags = (f"-L{root / 'lib'}",) if bare else ()
    merged, named = root / wheels.MERGED_VERSION, version[1]
    if merged.exists():  # its front end tells its own version alone
        named, flags = merged.read_text(encoding="utf-8"), (*flags, *wheels.MERGED_FLAGS)
    return Nvcc(path=path, version=named, root=root, flags=flags)


def _on_path(name: str) -> list[Path]:
    """The program of a name on PATH, where there is one."""
    program = shutil.which(name)
    return [Path(program)] if program else []


def nvcc_places() -> Iterator[Path]:
    """Paths at which an nvcc may lie outside Python's packages, in the order in which they are tried."""
    yield from _on_path("nvcc")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "bin" / "nvcc"
    yield Path("/usr/local/cuda/bin/nvcc")


@remembered("toolchain.driver_release")
def driver_release() -> tuple[int, int] | None:
    """The newest CUDA that this machine's driver runs, (major, minor); None without a driver."""
    try:
        version = cuda_driver().version()
    except UnsupportedArchitectureError:
        return None
    return version // 1000, version % 1000 // 10


def driver_runs(toolchain: Mapping[str, str]) -> bool:
    """True where this machine's driver runs kernels of a toolchain, or there is no driver to ask.

    The CUDA runtime inside a kernel takes any driver of its own major release or of a later one.

    Args:
        toolchain: see :meth:`Toolchain.identity`.
    """
    release, built = driver_release(), wheels.numbers(toolchain.get("nvcc", ""))
    return release is None or not built or built[0] <= release[0]


def _suiting(compiler: Nvcc) -> Nvcc:
    """A compiler, refused where the driver cannot run its kernels.

    Raises:
        ToolchainError: naming both.
    """
    release = driver_release()
    if release is not None and not driver_runs({"nvcc": compiler.version}):
        raise ToolchainError(
            f"{compiler.path} is of CUDA {compiler.version}, the driver here runs kernels of CUDA {release[0]} at most"
        )
    return compiler


def find_nvcc(nvcc: Path | str | None = None) -> Nvcc:
    """Find nvcc: the given one alone, else PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, PyPI wheels.

    Of the others, the first whose kernels the driver can run; of wheels, the newest.

    Args:
        nvcc: the compiler or a toolkit folder (the ``NVCC`` setting); used even if it is too new for the driver, with a
            warning, as it may compile for another machine.

    Raises:
        ToolchainError: none works; the message lists each place with what is wrong there.
    """
    if nvcc is not None:
        path = Path(nvcc)
        try:
            compiler = probe_nvcc(path / "bin" / "nvcc" if path.is_dir() else path)
        except ToolchainError as error:
            raise ToolchainError(f"ATTENTION_AUTOTUNER_NVCC={nvcc}: {error}") from error
        try:
            _suiting(compiler)
        except ToolchainError as error:
            logger.warning("%s; ATTENTION_AUTOTUNER_NVCC names it all the same", error)
        return compiler
    none = "none on PATH, in CUDA_HOME, /usr/local/cuda or PyPI wheels"
    return _first_usable(
        "nvcc", _compilers(), none, f"install {_TOOLKIT}, or run {wheels.INSTALL_WHEELS}"
    )


def _compilers() -> Iterator[Callable[[], Nvcc]]:
    """A function for each compiler that is there, in the order in which they are tried."""

    def compiler(locate: Callable[[Path], Path], place: Path) -> Nvcc:
        return _suiting(probe_nvcc(locate(place)))

    for place in nvcc_places():
        if place.exists():
            yield partial(compiler, Path, place)
    for root in wheels.wheel_roots():
        if (root / "bin" / "nvcc").exists():
            yield partial(compiler, wheels.check_wheels, root)
    for place in wheels.cu12_places():
        yield partial(compiler, wheels.merge_cu12, place)


def find_host_cxx() -> tuple[Path, str]:
    """The C++ compiler for host code: CUDAHOSTCXX, CXX, g++, c++, clang++; with the first line of its version.

    Raises:
        ToolchainError: there is none.
    """

    def compiler(path: str) -> tuple[Path, str]:
        return Path(path), _probe(path, "--version").strip().splitlines()[0]

    names = (os.environ.get("CUDAHOSTCXX"), os.environ.get("CXX"), "g++", "c++", "clang++")
    paths = filter(None, (shutil.which(name) for name in names if name))
    none = "none of g++, c++, clang++ on PATH"
    attempts = (partial(compiler, path) for path in paths)
    return _first_usable("C++ compiler", attempts, none, "install g++ or set CXX")


def _tool_places(name: str) -> Iterator[Path]:
    """Places of a build tool: this Python's scripts, its own Python package, PATH."""
    yield Path(sysconfig.get_path("scripts")) / name
    for place in wheels.package_folders(name):
        yield place / "data" / "bin" / name
    yield from _on_path(name)


def _find_tool(name: str, minimum: tuple[int, ...]) -> tuple[Path, str]:
    def tool(place: Path) -> tuple[Path, str]:
        version = re.search(r"\d+(?:\.\d+)+", _probe(place, "--version"))
        if version is None or wheels.numbers(version[0]) < minimum:
            raise ToolchainError(f"{place} is older than {_dotted(minimum)}")
        return place, version[0]

    attempts = (partial(tool, place) for place in _tool_places(name) if place.exists())
    none = "neither installed for this Python nor on PATH"
    return _first_usable(name, attempts, none, f"run `pip install {name}`")


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
    places = [root / "bin" / "cuobjdump" for root in wheels.wheel_roots()]
    places += _on_path("cuobjdump")
    places += [place.parent / "cuobjdump" for place in nvcc_places()]
    for place in places:
        beside = (place.parent / "nvdisasm").exists()
        if place.exists() and (beside or shutil.which("nvdisasm") is not None):
            return place
    return None


@remembered("toolchain.found", bound=8)
def _assemble(nvcc: Path | None, cutlass_dir: Path | None) -> Toolchain:
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
    return _assemble(settings.nvcc, settings.cutlass_dir)
