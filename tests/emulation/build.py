"""Kernel libraries that run on the emulated machine, for the ordinary loader."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from attention_autotuner.codegen.render import include_root, render
from attention_autotuner.codegen.toolchain import find_toolchain
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.cpp import NAMESPACE
from attention_autotuner.serving.loader import LIBRARY_NAME, LoadedKernel, load

from .rewrite import rewrite

HERE = Path(__file__).resolve().parent
POLICIES = ("lazy", "eager", "random")
Mutants = Mapping[str, tuple[str, str, str]]
"""Of a name: a header under ``attention_autotuner/``, a text that it has once, and what takes its place."""
_FLAGS = (
    *("-std=c++20", "-fPIC", "-fvisibility=hidden", "-march=native", "-fno-strict-aliasing"),
    *("-U_FORTIFY_SOURCE", "-w"),
)
# Little optimised: on the small problems of tests, more takes longer to compile than it saves. Without collecting the
# compiler's garbage, 140 MB, it takes a third less time than -O1.
_KERNEL_FLAGS = (
    *("-Og", "--param", "ggc-min-expand=1000", "--param", "ggc-min-heapsize=1000000"),
    *("-fsanitize=bounds", "-fno-sanitize-recover=bounds"),
)


def build(candidate: Candidate, folder: Path, mutants: Mutants | None = None) -> LoadedKernel:
    """Build a candidate for the emulated machine and load it.

    Args:
        candidate: of a family whose instructions are emulated.
        folder: where to put the headers, the source and the library.
        mutants: mistakes that :func:`configure` can turn on.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_headers(folder / "include", mutants or {})
    source = folder / "kernel.cpp"
    source.write_text(rewrite(render(candidate).text), encoding="utf-8")
    library, compiled = folder / LIBRARY_NAME, folder / "kernel.o"
    machine = compiled_machine()
    _compile(
        *_KERNEL_FLAGS,
        *("-c", "-include", str(machine / "prelude.h"), f"-I{folder / 'include'}"),
        *("-o", str(compiled), str(source)),
    )
    # Without the sanitizer's library: the machine has its handler.
    objects = (str(compiled), str(machine / "machine.o"))
    _compile("-shared", "-Wl,-Bsymbolic", "-o", str(library), *objects)
    return load(library)


def configure(
    kernel: LoadedKernel,
    policy: str = "lazy",
    seed: int = 0,
    *,
    multiprocessors: int = 2,
    mutant: str = "",
) -> None:
    """Set how the emulated machine runs a kernel from now on.

    Args:
        kernel: which; each library has its own machine.
        policy: ``lazy``, ``eager`` or ``random``: when what is asynchronous happens, and in which order threads run.
        seed: of what is random.
        multiprocessors: how many CTAs run at once; persistent kernels read it when they are prepared.
        mutant: the mistake that is on.
    """
    function = ctypes.CDLL(str(kernel.path)).emulation_configure
    function.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p)
    function.restype = None
    function(POLICIES.index(policy), seed, multiprocessors, mutant.encode())


class Range(ctypes.Structure):
    """Memory that a call reads or writes."""

    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


def put_ahead(kernel: LoadedKernel, read: Iterable[Range], written: Iterable[Range]) -> None:
    """Put a launch of somebody else into the stream ahead of the next call of a kernel.

    It lets the next launch begin at once. What the call reads is there at its end, and what the call writes must be
    untouched until then.

    Args:
        kernel: whose machine.
        read: memory of inputs.
        written: memory of outputs and workspaces.
    """
    read, written = list(read), list(written)
    function = ctypes.CDLL(str(kernel.path)).emulation_put_ahead
    function.argtypes = (ctypes.POINTER(Range), ctypes.c_int, ctypes.c_int)
    function.restype = None
    ranges = [*read, *written]
    function((Range * len(ranges))(*ranges), len(read), len(written))


def _own_machine() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="emulation-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compile_machine(folder)
    return folder


_find_machine: Callable[[], Path] = functools.cache(_own_machine)


def use_machine(find: Callable[[], Path]) -> None:
    """Take the folder that :func:`compile_machine` fills from elsewhere than a temporary one of this process."""
    global _find_machine  # of a process, which is to compile it once
    _find_machine = functools.cache(find)


def compiled_machine() -> Path:
    """A folder of what all kernels share, see :func:`compile_machine`."""
    return _find_machine()


def compile_machine(folder: Path) -> None:
    """Compile what all kernels share: ``machine.o``, and their ``prelude.h``.

    A header that is read in the compiler's own form saves more than half of a kernel's compilation.
    """
    source, prelude = folder / "machine.cpp", folder / "prelude.h"
    sources = sorted((HERE / "runtime").glob("*.cpp"))
    source.write_text("".join(f'#include "{path}"\n' for path in sources), encoding="utf-8")
    _compile("-O3", "-c", "-o", str(folder / "machine.o"), str(source))
    prelude.write_text(f'#include "{HERE / "runtime/prelude.h"}"\n', encoding="utf-8")
    header = ("-x", "c++-header", str(prelude))
    _compile(*_KERNEL_FLAGS, "-o", f"{prelude}.gch", *header)


def _compile(*arguments: str) -> None:
    toolchain = find_toolchain()
    includes = [f"-I{HERE / 'include'}", f"-I{toolchain.cuda_root / 'include'}"]
    command = [str(toolchain.host_cxx), *_FLAGS, *includes, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)


@functools.cache
def _headers() -> dict[str, str]:
    """The rewritten text of every header, by its path in the include folder."""
    shadow = HERE / "shadow"
    names = {path.relative_to(shadow).as_posix() for path in shadow.rglob("*.cuh")}
    texts = {}
    for path in sorted((include_root() / NAMESPACE).rglob("*")):
        name = path.relative_to(include_root()).as_posix()
        if path.is_dir() or "/peaks/" in name:
            continue
        place = shadow / name if name in names else path
        text = place.read_text(encoding="utf-8")
        texts[name] = text if name in names else rewrite(text)
        names.discard(name)
    assert not names, f"emulated headers that do not exist: {names}"
    return texts


def _write_headers(folder: Path, mutants: Mutants) -> None:
    texts = dict(_headers())
    for name, (header, before, after) in mutants.items():
        key = f"{NAMESPACE}/{header}"
        assert texts[key].count(before) == 1, f"mutant {name}: {texts[key].count(before)} places"
        live = f'if (::emulation::mutant("{name}")) {{ {after} }} else {{ {before} }}'
        texts[key] = texts[key].replace(before, live)
    for name, text in texts.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists() or place.read_text(encoding="utf-8") != text:
            place.write_text(text, encoding="utf-8")
