"""The command ``doctor``: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from ..arch import from_properties, probe
from ..arch.probe import cuda_driver, current_device
from ..codegen.cutlass import find_cutlass
from ..codegen.installed import bundles
from ..codegen.jobs import job_count
from ..codegen.store import default_store
from ..codegen.toolchain import (
    find_cmake,
    find_disassembler,
    find_host_cxx,
    find_ninja,
    find_nvcc,
)
from ..errors import AttentionAutotunerError, SettingsError
from ..serving.picks import CacheHierarchy
from ..settings import TABLE, current
from ..tuning.environment import collect
from ..version import __version__
from .console import print_json, print_line, print_table
from .options import Commands, add_json

State = Literal["ok", "missing", "broken"]
MIN_FREE_BYTES = 1 << 30  # a few hundred built kernels
MANY_KERNELS = 1000  # more than a batch ever holds, so that machine limits alone decide


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        name: what was looked at.
        state: ``ok``; ``missing``: some of the package's work cannot be done here; ``broken``: kernels cannot be built.
        detail: what was found.
        fix: what to do about it; empty when there is nothing to do.
    """

    name: str
    state: State
    detail: str
    fix: str = ""


def register_doctor(commands: Commands) -> None:
    """Add the command ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has, and what to do about what it lacks",
        description="Look at GPU, driver, compiler, headers, cache and libraries. Fails if nothing can be built.",
    )
    add_json(parser)
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; fails when kernels cannot be built."""
    findings = diagnose()
    if arguments.json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        rows = [[finding.state, finding.name, finding.detail] for finding in findings]
        print_table("this machine", ["", "what", "found"], rows)
        for finding in findings:
            if finding.fix:
                print_line(f"{finding.name}: {finding.fix}")
    return 1 if any(finding.state == "broken" for finding in findings) else 0


def diagnose() -> list[Finding]:
    """Look at everything, in the order in which a kernel comes to run."""
    return [check() for check in CHECKS]


def _tool(name: str, find: Callable[[], str]) -> Finding:
    """A finding about something without which nothing builds; typed errors name their own remedy."""
    try:
        return Finding(name=name, state="ok", detail=find())
    except AttentionAutotunerError as error:
        return Finding(name=name, state="broken", detail="unusable", fix=str(error))


def check_package() -> Finding:
    """This package and its Python."""
    where = Path(__file__).resolve().parents[1]
    detail = f"attention-autotuner {__version__} in {where}, Python {platform.python_version()}"
    return Finding(name="package", state="ok", detail=detail)


def check_settings() -> Finding:
    """The environment's settings that differ from the defaults."""
    try:
        settings = current()
    except SettingsError as error:
        return Finding(name="settings", state="broken", detail="not readable", fix=str(error))
    values = ", ".join(
        f"{row.variable}={getattr(settings, row.field)}"
        for row in TABLE
        if getattr(settings, row.field) is not None
    )
    return Finding(name="settings", state="ok", detail=values)


def check_gpu() -> Finding:
    """The GPU and its driver."""
    try:
        version = cuda_driver().version()
        properties = probe(current_device())
        policy = from_properties(properties)
    except AttentionAutotunerError as error:
        fix = "kernels can be ranked and built here, but not measured or run"
        return Finding(name="GPU", state="missing", detail=str(error), fix=fix)
    major, minor = properties.compute_capability
    detail = (
        f"{properties.name}, compute capability {major}.{minor}, {properties.num_sms} SMs; policy "
        f"{policy.name} with spec {policy.spec.name}; driver for CUDA {version // 1000}.{version % 1000 // 10}"
    )
    return Finding(name="GPU", state="ok", detail=detail)


def check_nvcc() -> Finding:
    """The CUDA compiler."""

    def find() -> str:
        nvcc = find_nvcc(current().nvcc)
        return f"{nvcc.version} at {nvcc.path}, toolkit {nvcc.root}"

    return _tool("nvcc", find)


def check_host_cxx() -> Finding:
    """The C++ compiler that nvcc calls."""

    def find() -> str:
        path, version = find_host_cxx()
        return f"{path}: {version}"

    return _tool("C++ compiler", find)


def check_cutlass() -> Finding:
    """The CUTLASS headers."""

    def find() -> str:
        include, version = find_cutlass(current().cutlass_dir)
        return f"{version} in {include}"

    return _tool("CUTLASS headers", find)


def check_cmake() -> Finding:
    """CMake and Ninja."""

    def find() -> str:
        path, version = find_cmake()
        ninja, ninja_version = find_ninja()
        jobs = job_count(MANY_KERNELS, current().jobs)
        return f"cmake {version} at {path}, ninja {ninja_version} at {ninja}; {jobs} compilers at a time"

    return _tool("CMake, Ninja", find)


def check_disassembler() -> Finding:
    """The disassembler, which looks for spills inside main loops."""
    found = find_disassembler()
    if found is not None:
        return Finding(name="disassembler", state="ok", detail=str(found))
    return Finding(
        name="disassembler",
        state="missing",
        detail="no cuobjdump with nvdisasm",
        fix="spills in main loops go unseen; pip install 'attention-autotuner[inspect]'",
    )


def check_cache() -> Finding:
    """The cache folder: writable, with room."""

    def find() -> str:
        store = default_store()
        with store.staging() as folder:
            free = shutil.disk_usage(folder).free
        if free < MIN_FREE_BYTES:
            raise SettingsError(
                f"only {free / 2**20:.0f} MiB free in {store.root}: run `attention-autotuner cache gc`, or set "
                "ATTENTION_AUTOTUNER_CACHE_DIR to another folder"
            )
        return f"{store.root}, writable, {free / 2**30:.1f} GiB free"

    return _tool("cache", find)


def check_picks() -> Finding:
    """The cache hierarchy, in the order in which it is asked."""
    try:
        hierarchy = CacheHierarchy(current())
        gpu = collect().gpu_name
        shipped = "needs a GPU" if gpu is None else f"{hierarchy.shipped.count(gpu)} for {gpu}"
    except AttentionAutotunerError as error:
        return Finding(name="picks", state="missing", detail="not all readable", fix=str(error))
    detail = f"asked in this order: record ({hierarchy.records.count()} of your own), shipped ({shipped}), default"
    return Finding(name="picks", state="ok", detail=detail)


def check_bundles() -> Finding:
    """Kernels that were built elsewhere."""

    def find() -> str:
        found = [
            f"{len(bundle.kernels)} kernels for {bundle.arch} of version {bundle.package_version} in {bundle.root}"
            for bundle in bundles(current())
        ]
        return "; ".join(found) or "none; kernels are compiled when they are first needed"

    return _tool("prebuilt kernels", find)


def check_torch() -> Finding:
    """PyTorch, looked at without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return Finding(
            name="torch",
            state="missing",
            detail="not installed",
            fix="flash_attn_func, verification and measurement need it; pip install 'attention-autotuner[torch]'",
        )
    version = metadata.version("torch")
    cuda = None
    with contextlib.suppress(OSError):
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
        cuda = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    if cuda is not None:
        return Finding(name="torch", state="ok", detail=f"{version} for CUDA {cuda[1]}")
    return Finding(
        name="torch",
        state="missing",
        detail=f"{version}, without CUDA",
        fix="CPU tensors run the reference; for a GPU, install a torch with CUDA (https://pytorch.org)",
    )


def check_cupy() -> Finding:
    """CuPy, whose arrays are accepted."""
    distributions = metadata.packages_distributions().get("cupy", []) if _has("cupy") else []
    if distributions:
        name = distributions[0]
        return Finding(name="cupy", state="ok", detail=f"{name} {metadata.version(name)}")
    return Finding(
        name="cupy",
        state="missing",
        detail="not installed",
        fix="needed only to pass CuPy arrays; pip install 'attention-autotuner[cupy]'",
    )


def _has(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_package,
    check_settings,
    check_gpu,
    check_nvcc,
    check_host_cxx,
    check_cutlass,
    check_cmake,
    check_disassembler,
    check_cache,
    check_bundles,
    check_picks,
    check_torch,
    check_cupy,
)
