"""The command ``doctor``: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import platform
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from ..arch import from_properties, probe
from ..arch.probe import cuda_driver, current_device
from ..codegen import toolchain
from ..codegen.cutlass import find_cutlass
from ..codegen.installed import bundles
from ..codegen.jobs import job_count
from ..codegen.store import default_store
from ..errors import AttentionAutotunerError, SettingsError
from ..serving.picks import CacheHierarchy
from ..settings import TABLE, current
from ..tuning.environment import collect
from ..version import __version__
from .console import print_json, print_line, print_table
from .options import FAILED, OK, command

State = Literal["ok", "missing", "optional", "broken"]
MIN_FREE_BYTES = 1 << 30  # a few hundred built kernels
MANY_KERNELS = 1000  # more than a batch ever holds, so that machine limits alone decide
# Each line's check, in the order in which a kernel comes to run.
CHECKS: list[Callable[[], Finding]] = []
COMPILING = ("nvcc", "C++ compiler", "CUTLASS headers", "CMake, Ninja")
BUNDLES = "prebuilt kernels"
BUILDING = ("settings", *COMPILING, "cache")


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        name: the thing that was looked at.
        state: ``ok``; ``missing``: some of the package's work cannot be done here; ``optional``: missing, and needed by
            few; ``broken``: kernels can be neither built nor taken from elsewhere.
        detail: its version, place or condition.
        fix: advice, or a note; empty when there is nothing to say.
    """

    name: str
    state: State
    detail: str
    fix: str = ""


Check = Callable[[], Finding | str]


@command("doctor")
def run_doctor(arguments: argparse.Namespace) -> int:
    """Say what this machine has, and what to do about what it lacks.

    Look at GPU, driver, compiler, headers, cache and libraries. Fails if there is no way to kernels.
    """
    findings = diagnose()
    summary = summary_of(findings)
    if arguments.json:
        print_json({"findings": [asdict(finding) for finding in findings], "summary": summary})
    else:
        rows = [[finding.state, finding.name, finding.detail] for finding in findings]
        notes = [(finding.name, finding.fix) for finding in findings if finding.fix]
        print_table("this machine", ["state", "part", "detail"], rows, notes=notes)
        print_line(summary)
    return FAILED if any(finding.state == "broken" for finding in findings) else OK


def diagnose() -> list[Finding]:
    """Look at everything, in the order in which a kernel comes to run.

    Where kernels come prebuilt, a compiler that is not there breaks nothing; nor does a bundle where they can be built.
    """
    findings, spared = [check() for check in CHECKS], list(COMPILING if prebuilt() else ())
    if {item.name for item in findings if item.state == "ok"}.issuperset(BUILDING):
        spared.append(BUNDLES)
    for place, finding in enumerate(findings):
        if finding.name in spared and finding.state == "broken":
            findings[place] = replace(finding, state="missing")
    return findings


def prebuilt() -> bool:
    """Return whether kernels that were built elsewhere are installed here."""
    try:
        return any(bundle.kernels for bundle in bundles(current()))
    except AttentionAutotunerError:
        return False


def summary_of(findings: Sequence[Finding]) -> str:
    """One sentence: what works on this machine, what does not, and the next step."""
    by_name = {finding.name: finding for finding in findings}
    good = {name for name, finding in by_name.items() if finding.state == "ok"}
    unbuilt = [name for name in BUILDING if name not in good]
    builds = not unbuilt
    torch = "torch" in good and not by_name["torch"].fix  # a note: it is without CUDA
    unreadable = BUNDLES in by_name and BUNDLES not in good  # calls that need a kernel look there
    runs = torch and "GPU" in good and not unreadable and (builds or prebuilt())
    works = ["ranking candidates"] * ("settings" in good)
    works += ["building kernels"] * builds + ["tuning"] * (builds and runs)
    works += [f"running {'all' if builds else 'prebuilt'} kernels"] * runs
    lacks = [] if builds else [f"building kernels ({', '.join(unbuilt)})"]
    if not runs:
        want = BUNDLES if unreadable else "none built"
        want = want if torch else "no torch with CUDA"
        want = want if "GPU" in good else "no GPU"
        lacks.append(f"measuring and running kernels ({want})")
    missing = f"does not: {', '.join(lacks)}" if lacks else "nothing is missing"
    if not lacks:
        step = "`attention-autotuner tune`"
    elif builds and "GPU" not in good:
        step = "copy the cache folder or a bundle (`attention-autotuner export`) to a machine with a GPU"
    elif runs:
        step = "nothing, unless you need kernels that are not prebuilt"
    else:
        step = "follow the advice above on each part that is broken or missing"
    return f"Works here: {', '.join(works) or 'nothing'}; {missing}; next: {step}."


def check(name: str, failing: State = "broken") -> Callable[[Check], Callable[[], Finding]]:
    """Make a line of the diagnosis of a function that returns the detail; typed errors name their own remedy."""

    def decorate(look: Check) -> Callable[[], Finding]:
        @functools.wraps(look)
        def checked() -> Finding:
            try:
                result = look()
            except AttentionAutotunerError as error:
                return Finding(name, failing, "unusable", str(error))
            return result if isinstance(result, Finding) else Finding(name, "ok", result)

        CHECKS.append(checked)
        return checked

    return decorate


@check("package")
def check_package() -> str:
    """This package and its Python."""
    where = Path(__file__).resolve().parents[1]
    return f"attention-autotuner {__version__} in {where}, Python {platform.python_version()}"


@check("settings")
def check_settings() -> str:
    """The settings, save those without a value."""
    values = {row.variable: getattr(current(), row.field) for row in TABLE}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


@check("GPU")
def check_gpu() -> Finding | str:
    """The GPU and its driver."""
    try:
        version = cuda_driver().version()
        properties = probe(current_device())
        policy = from_properties(properties)
    except AttentionAutotunerError as error:
        detail = str(error).partition(";")[0]
        return Finding("GPU", "missing", detail, "kernels cannot be measured or run here")
    major, minor = properties.compute_capability
    return (
        f"{properties.name}, compute capability {major}.{minor}, {properties.num_sms} SMs; policy "
        f"{policy.name} with spec {policy.spec.name}; driver for CUDA {version // 1000}.{version % 1000 // 10}"
    )


@check("nvcc")
def check_nvcc() -> str:
    """The CUDA compiler."""
    nvcc = toolchain.find_nvcc(current().nvcc)
    return f"{nvcc.version} at {nvcc.path}, toolkit {nvcc.root}"


@check("C++ compiler")
def check_host_cxx() -> str:
    """The C++ compiler that nvcc calls."""
    path, version = toolchain.find_host_cxx()
    return f"{path}: {version}"


@check("CUTLASS headers")
def check_cutlass() -> str:
    """The CUTLASS headers."""
    include, version = find_cutlass(current().cutlass_dir)
    return f"{version} in {include}"


@check("CMake, Ninja")
def check_cmake() -> str:
    """CMake and Ninja."""
    path, version = toolchain.find_cmake()
    ninja, ninja_version = toolchain.find_ninja()
    jobs = job_count(MANY_KERNELS, current().jobs)
    return (
        f"cmake {version} at {path}, ninja {ninja_version} at {ninja}; {jobs} compilers at a time"
    )


@check("disassembler")
def check_disassembler() -> Finding | str:
    """The disassembler, which looks for spills inside main loops."""
    advice = "spills in main loops go unseen; pip install 'attention-autotuner[inspect]'"
    missing = Finding("disassembler", "missing", "no cuobjdump with nvdisasm", advice)
    path = toolchain.find_disassembler()
    return missing if path is None else str(path)


@check("cache")
def check_cache() -> str:
    """The cache folder: writable, with room."""
    store = default_store()
    with store.staging() as folder:
        free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise SettingsError(
            f"only {free / 2**20:.0f} MiB free in {store.root}: run `attention-autotuner cache gc`, or set "
            "ATTENTION_AUTOTUNER_CACHE_DIR to another folder"
        )
    return f"{store.root}, writable, {free / 2**30:.1f} GiB free"


@check(BUNDLES)
def check_bundles() -> str:
    """Kernels that were built elsewhere."""
    installed = [
        f"{len(bundle.kernels)} kernels for {bundle.arch} of version {bundle.package_version} in {bundle.root}"
        for bundle in bundles(current())
    ]
    return "; ".join(installed) or "none; kernels are compiled when they are first needed"


@check("picks", failing="missing")
def check_picks() -> str:
    """The cache hierarchy, in the order in which it is asked."""
    hierarchy, gpu = CacheHierarchy(current()), collect().gpu_name
    shipped = "needs a GPU" if gpu is None else f"{hierarchy.shipped.count(gpu)} for {gpu}"
    return f"asked in this order: record ({hierarchy.records.count()} of your own), shipped ({shipped}), default"


@check("torch")
def check_torch() -> Finding | str:
    """PyTorch, looked at without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        advice = "flash_attn_func and measuring need it; pip install 'attention-autotuner[torch]'"
        return Finding("torch", "missing", "not installed", advice)
    version = metadata.version("torch")
    cuda = None
    with contextlib.suppress(OSError):
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
        cuda = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    if cuda is not None:
        return f"{version} for CUDA {cuda[1]}"
    note = "CPU tensors run the reference; a GPU needs a torch with CUDA (https://pytorch.org)"
    return Finding("torch", "ok", f"{version}, without CUDA", note)


@check("cupy")
def check_cupy() -> Finding | str:
    """CuPy, which searches run candidates with, and whose arrays are accepted."""
    present = "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None
    distributions = metadata.packages_distributions().get("cupy", []) if present else []
    if distributions:
        return f"{distributions[0]} {metadata.version(distributions[0])}"
    note = "needed to search, and to pass CuPy arrays; pip install 'attention-autotuner[tune]'"
    return Finding("cupy", "optional", "not installed", note)
