"""The artifact: a compiled kernel, what it was compiled for, and the identity of both."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.candidate import Family
from ..core.identity import digest
from ..core.report import CompilerReport
from .code_digest import comparable
from .environment import template_root
from .render import RenderedKernel, kernel_digest
from .toolchain import Toolchain

_ARCH = re.compile(r"[1-9]\d{1,2}[af]?")


@dataclass(frozen=True, kw_only=True)
class BuildTarget:
    """The machine code that an artifact carries.

    Attributes:
        arch: compute capability without its dot: ``80``, ``89``, ``90``.
        ptx: carry PTX beside the machine code, so that newer GPUs can run the artifact too.

    Raises:
        ValueError: ``arch`` is not such a number.
    """

    arch: str
    ptx: bool = True

    def __post_init__(self) -> None:
        if not _ARCH.fullmatch(self.arch):
            raise ValueError(f"arch must be a compute capability such as '80', got {self.arch!r}")

    @property
    def cmake_architecture(self) -> str:
        """The value of ``CMAKE_CUDA_ARCHITECTURES``."""
        return self.arch if self.ptx else f"{self.arch}-real"

    def of_family(self, family: Family) -> BuildTarget:
        """The target of a family's kernels: WGMMA exists for exactly one compute capability."""
        return BuildTarget(arch="90a", ptx=False) if family == "sm90" else self

    def flags(self) -> tuple[str, ...]:
        """The code-generation flags that nvcc gets for this target."""
        codes = [f"compute_{self.arch}"] if self.ptx else []
        codes.append(f"sm_{self.arch}")
        return (f"--generate-code=arch=compute_{self.arch},code=[{','.join(codes)}]",)


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A kernel library in the store.

    Attributes:
        name: the candidate's name.
        digest: :func:`artifact_digest`, 64 hex characters.
        path: the shared library; source, build record and log lie beside it.
        report: the compiler's report.
        kernel_digest: identity of the kernel whatever compiled it.
        target: what it was compiled for.
        toolchain: versions of the tools that compiled it.
        build_seconds: time of the compilation and link, one core.
        build_peak_bytes: largest resident set of any one of the compiler's processes.
        code_digest: :func:`.code_digest.code_digest` of it; None where no disassembler was at hand.
        host_digest: :func:`.code_digest.host_digest` of it; None likewise.
        launch_knobs: of the candidate that it is launched for; no part of what is built or stored.
    """

    name: str
    digest: str
    path: Path
    report: CompilerReport
    kernel_digest: str
    target: BuildTarget
    toolchain: dict[str, str]
    build_seconds: float
    build_peak_bytes: int
    code_digest: str | None = None
    host_digest: str | None = None
    launch_knobs: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form, without path and launch knobs, that :meth:`from_json` reads back."""
        left_out = ("path", "launch_knobs")
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @classmethod
    def from_json(cls, data: dict[str, Any], path: Path) -> Artifact:
        """Rebuild an artifact whose library is at ``path``.

        Raises:
            TypeError, KeyError, ValueError: the data does not follow :meth:`to_json`.
        """
        return cls(
            name=data["name"],
            digest=data["digest"],
            path=path,
            report=CompilerReport.from_json(data["report"]),
            kernel_digest=data["kernel_digest"],
            code_digest=comparable(data.get("code_digest")),  # artifacts may be older than it is
            host_digest=data.get("host_digest"),
            target=BuildTarget(**data["target"]),
            toolchain=dict(data["toolchain"]),
            build_seconds=float(data["build_seconds"]),
            build_peak_bytes=int(data["build_peak_bytes"]),
        )


def cmake_root() -> Path:
    """The folder of the static CMake project that builds a batch."""
    return template_root() / "cmake"


def _recipe() -> str:
    """SHA-256 of the CMake function that holds the compile and link flags."""
    return hashlib.sha256((cmake_root() / "kernel.cmake").read_bytes()).hexdigest()


def artifact_digest(kernel: RenderedKernel, target: BuildTarget, toolchain: Toolchain) -> str:
    """The identity of a compiled kernel: text, include closure, ABI, target, flags and tool versions.

    Returns:
        64 hex characters.
    """
    return digest(
        "artifact",
        kernel.name,
        kernel_digest(kernel),
        target.of_family(kernel.candidate.family).flags(),
        _recipe(),
        toolchain.identity(),
    )
