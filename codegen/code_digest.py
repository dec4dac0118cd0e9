"""The code digest: a kernel's machine code on the GPU, whatever its source calls things and however it is laid out.

Taken from the object file before it is linked, so that addresses, which depend on names through the order of sections,
are not yet filled in. Names of symbols and sections take no part, PTX and debug information neither: a renamed
namespace, a moved header or a renamed local variable leaves the digest as it is. What ptxas emits otherwise changes it.

Code of the host takes no part, since that of another host compiler differs for the same kernel; what the kernel says of
its launch (tile, threads, shared memory) does, read by calling the library. So what the host decides beside that at run
time, such as the order of CTAs in a grid, is for the candidate's knobs and the source digest to tell, and for
:func:`host_digest` where one compiler compiled both.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..core import abi
from ..core.identity import digest
from ..errors import ToolchainError
from .tools import run_tool

DEVICE_SECTIONS = (".text", ".nv.constant")
"""Sections of a cubin that count, by how their names begin: instructions; constants and parameters."""
ADDRESSES = ".nv.constant4"
"""A section that does not: where variables of the GPU will lie once they are loaded, zeros until then.

Instructions that read them count. Kernels here have none; unused ones come and go with the headers of others.
"""
_FORMER_ADDRESSES = hashlib.sha256(
    bytes(88)
).hexdigest()  # of eleven in CuTe, which every digest had when it counted
HOST_SECTIONS = (".text",)
"""The same of an object file for the host: instructions, in which names and addresses are not yet filled in."""
PREFIX = "sass:"
"""Of every digest; those from before there was one counted the code of the host, too."""

_EXTRACT_SECONDS = 300.0
_CALL_SECONDS = 60.0
_FORMER = re.compile(r"[0-9a-f]{64}")
# In a process of its own: a library that was loaded stays in memory.
_LAUNCH = """
import ctypes, sys
path, symbol, size, first, *_ = sys.argv[1:]
info = (ctypes.c_int32 * (int(size) // 4))(int(size))
function = getattr(ctypes.CDLL(path), symbol, None)
if function is not None and function(info) == 0:
    print("launch", *info[int(first) // 4:])
"""


def comparable(code: str | None) -> str | None:
    """A digest that others may be compared with; None for one of the former kind, or none."""
    return None if code is None or _FORMER.fullmatch(code) else code


def _contents(path: Path, prefixes: tuple[str, ...]) -> Iterator[bytes]:
    """The contents of the sections of an ELF file whose names begin so, but for empty ones.

    Raises:
        ToolchainError: it is no ELF file.
    """
    # Here, for the sake of every process that compiles nothing: it takes as long to import as numpy.
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as file:
            for section in ELFFile(file).iter_sections():
                counts = section.name.startswith(prefixes) and section.name != ADDRESSES
                if counts and section["sh_type"] == "SHT_PROGBITS":
                    data = section.data()
                    if data:
                        yield data
    except ELFError as error:
        raise ToolchainError(f"{path.name} is not an object file: {error}") from error


def _launch(library: Path) -> str:
    """The numbers by which a kernel library describes itself; empty where it does not.

    Raises:
        ToolchainError: it cannot be loaded and called.
    """
    size, first = ctypes.sizeof(abi.KernelInfo), abi.KernelInfo.padded_dim_qk.offset
    symbol = f"{abi.SYMBOL_PREFIX}get_kernel_info"
    asked = [symbol, str(size), str(first)]
    command = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(library.absolute()), *asked]
    done = run_tool(command, seconds=_CALL_SECONDS)
    if done.returncode != 0:
        raise ToolchainError(f"cannot ask {library.name} for its launch: {done.stdout[-500:]}")
    return done.stdout.strip()


def code_digest(object_path: Path, library: Path, disassembler: Path) -> str:
    """The identity of the machine code for GPUs in an object file, and of its launch.

    Args:
        object_path: an object file that nvcc compiled, not linked.
        library: what it was linked to.
        disassembler: ``cuobjdump``, see ``toolchain.find_disassembler``.

    Returns:
        ``PREFIX`` and 64 hex characters.

    Raises:
        ToolchainError: a tool or the library fails, or the file has no machine code for a GPU.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command: list[str | Path] = [disassembler, "-xelf", "all", object_path.absolute()]
        done = run_tool(command, seconds=_EXTRACT_SECONDS, folder=folder)
        cubins = sorted(folder.iterdir())
        if done.returncode != 0 or not cubins:
            raise ToolchainError(
                f"{disassembler} finds no machine code in {object_path.name}: {done.stdout[-500:]}"
            )
        device = [data for cubin in cubins for data in _contents(cubin, DEVICE_SECTIONS)]
    hashes = sorted([*_hashes(device), _FORMER_ADDRESSES])
    return PREFIX + digest("code", hashes, _launch(library))


def host_digest(object_path: Path) -> str:
    """The identity of the code for the host in an object file, 64 hex characters, among those of one compiler.

    Raises:
        ToolchainError: it is no object file.
    """
    return digest("host", _hashes(_contents(object_path, HOST_SECTIONS)))


def _hashes(sections: Iterable[bytes]) -> list[str]:
    return sorted(hashlib.sha256(data).hexdigest() for data in sections)
