"""One CMake project for a batch of kernels: its configuration, with what CMake learns about a toolchain kept."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..core.identity import digest16
from ..core.trust import is_whole, seal
from ..errors import ToolchainError
from . import launcher
from .artifact import BuildTarget, cmake_root
from .files import store_errors
from .render import include_root
from .store import Store
from .toolchain import Toolchain
from .tools import Stop, run_tool

logger = logging.getLogger(__name__)

_DETECTED = ("CMakeCUDACompiler.cmake", "CMakeSystem.cmake")
_CONFIGURE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """The launcher's record of one compilation or link."""

    returncode: int
    seconds: float
    peak_bytes: int
    timed_out: bool
    log: str


@dataclass(frozen=True, kw_only=True)
class Project:
    """A batch: its folders, and what it is built with.

    Attributes:
        root: private to this batch; all its folders are inside it.
        target: what to compile for.
        toolchain: what to compile with.
        store: where artifacts are kept, and what CMake finds out.
        timeout_seconds: for each compilation and each link; 0 for no limit.
        disassembler: ``cuobjdump``, where there is one.
    """

    root: Path
    target: BuildTarget
    toolchain: Toolchain
    store: Store
    timeout_seconds: float = 0.0
    disassembler: Path | None = None

    @property
    def sources(self) -> Path:
        """Holds one ``<target>.cu`` per kernel, and ``<target>.architecture`` where it has one of its own."""
        return self.root / "sources"

    @property
    def build(self) -> Path:
        """CMake's build folder, where ``<target>.so`` appears."""
        return self.root / "build"

    def object_file(self, target: str) -> Path:
        """The object file of a target, which is not linked yet.

        Raises:
            ToolchainError: CMake put it elsewhere.
        """
        objects = sorted((self.build / "CMakeFiles" / f"{target}.dir").rglob("*.o"))
        if len(objects) != 1:
            raise ToolchainError(f"one object file of {target} expected, got {len(objects)}")
        return objects[0]

    @property
    def logs(self) -> Path:
        """Holds ``<target>.{compile,link}.{log,json}``."""
        return self.root / "logs"

    def step(self, target: str, name: str) -> Step | None:
        """A finished step of a target, ``compile`` or ``link``, or None while it is not."""
        prefix = self.logs / f"{target}.{name}"
        try:
            result = json.loads(Path(f"{prefix}.json").read_text(encoding="ascii"))
        except FileNotFoundError:
            return None
        log = Path(f"{prefix}.log").read_text(encoding="utf-8", errors="replace")
        return Step(log=log, **result)

    @property
    def temporary(self) -> Path:
        """Where the compilers put their temporary files."""
        return self.root / "tmp"


def launched(*arguments: str) -> list[str | Path]:
    """A command of :mod:`.launcher`.

    Raises:
        ToolchainError: there is no Python to run it.
    """
    python = sys.executable or shutil.which("python3")
    if not python:
        raise ToolchainError(
            "no Python interpreter found to run compilers with; put python3 on PATH"
        )
    return [python, "-I", "-S", str(Path(launcher.__file__).resolve()), *arguments]


def _command(project: Project, jobs: int) -> list[str | Path]:
    toolchain = project.toolchain
    variables = {
        "CMAKE_MAKE_PROGRAM": toolchain.ninja,
        "CMAKE_CUDA_COMPILER": toolchain.nvcc,
        "CMAKE_CUDA_HOST_COMPILER": toolchain.host_cxx,
        "CMAKE_CUDA_ARCHITECTURES": project.target.cmake_architecture,
        "CMAKE_CUDA_FLAGS": shlex.join(toolchain.cuda_flags),
        "CMAKE_SUPPRESS_REGENERATION": "ON",
        # Ninja gives every free job to a compilation before it links anything. Compilations have jobs of their own, so
        # that a kernel is linked, and published, as soon as it is compiled.
        "CMAKE_JOB_POOLS": f"compile={jobs}",
        "CMAKE_JOB_POOL_COMPILE": "compile",
        "ATTENTION_AUTOTUNER_INCLUDE_DIR": include_root(),
        "ATTENTION_AUTOTUNER_CUTLASS_DIR": toolchain.cutlass_include,
        "ATTENTION_AUTOTUNER_BATCH_DIR": project.sources,
        "ATTENTION_AUTOTUNER_LOG_DIR": project.logs,
        "ATTENTION_AUTOTUNER_LAUNCHER": ";".join(map(str, launched(str(project.timeout_seconds)))),
    }
    options = [f"-D{name}={value}" for name, value in variables.items()]
    return [toolchain.cmake, "-G", "Ninja", "-S", cmake_root(), "-B", project.build, *options]


def _detection_folder(store: Store, toolchain: Toolchain) -> Path:
    """Where the store keeps what CMake found out about this toolchain.

    Unlike an artifact's identity this one holds paths: the kept files name them.
    """
    identity = digest16(
        toolchain.identity(),
        str(toolchain.nvcc),
        toolchain.nvcc.stat().st_mtime_ns,
        str(toolchain.cuda_root),
        toolchain.cuda_flags,
        str(toolchain.host_cxx),
        toolchain.cmake_version,
    )
    return store.root / "cmake" / identity


def _keep_detection(project: Project, store: Store, kept: Path) -> None:
    detected = sorted(project.build.glob(f"CMakeFiles/*/{_DETECTED[0]}"))
    if not detected:
        return
    with store_errors(kept), store.staging() as staging:
        for name in _DETECTED:
            shutil.copy2(detected[0].with_name(name), staging / name)
        seal(staging)
        if not kept.exists():
            store.move_in(staging, kept)


def configure(project: Project, *, jobs: int = 1, stop: Stop = lambda: False) -> None:
    """Turn the sources of a batch into a Ninja build.

    Asking a compiler what it is takes CMake 1.3 to 1.8 s; the answer is kept in the store, and with it this takes
    0.06 s (measured on two cores, CMake 4.4). ``CMAKE_PLATFORM_INFO_INITIALIZED`` is what CMake itself sets to read
    these files back when it configures a folder again. A kept answer that does not serve, or
    that is damaged, is dropped.

    Args:
        project: with its sources written.
        jobs: compilations at once.
        stop: end CMake when this becomes true.

    Raises:
        StoppedError: ``stop`` became true.
        ToolchainError: CMake fails; the message ends with what it printed.
        StoreError: the store cannot be written, or is not to be trusted.
    """
    store, toolchain = project.store, project.toolchain
    run_cmake = partial(
        run_tool, seconds=_CONFIGURE_SECONDS, temporary=project.temporary, stop=stop
    )
    command = _command(project, jobs)
    kept = _detection_folder(store, toolchain)
    if kept.is_dir():
        if is_whole(kept):
            with store_errors(project.build):
                shutil.copytree(kept, project.build / "CMakeFiles" / toolchain.cmake_version)
            done = run_cmake([*command, "-DCMAKE_PLATFORM_INFO_INITIALIZED:INTERNAL=1"])
            if done.returncode == 0:
                return
            with store_errors(project.build):
                shutil.rmtree(project.build)
        else:
            logger.warning("%s is not what was kept there: CMake looks again", kept)
        with store_errors(kept):
            store.discard(kept)
    done = run_cmake(command)
    if done.returncode != 0:
        raise ToolchainError(
            f"CMake cannot set up a build with {toolchain.nvcc}:\n{done.stdout.strip()[-3000:]}"
        )
    _keep_detection(project, store, kept)
