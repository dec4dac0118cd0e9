"""The code digest: a kernel's machine code, whatever its source calls things and however it is laid out.

Taken from the object file before it is linked, so that addresses, which depend on names through the order of sections,
are not yet filled in. Names of symbols and sections take no part, PTX and debug information neither: a renamed
namespace, a moved header or a renamed local variable leaves the digest as it is. What ptxas or the host compiler emits
otherwise changes it, as another compiler does.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..core.identity import digest
from ..errors import ToolchainError
from .tools import run_tool

DEVICE_SECTIONS = (".text", ".nv.constant")
"""Sections of a cubin that count, by how their names begin: instructions; constants and parameters."""
HOST_SECTIONS = (".text", ".rodata.cst")
"""The same of the object file itself: instructions; literals that they read."""

_EXTRACT_SECONDS = 300.0


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
                if section.name.startswith(prefixes) and section["sh_type"] == "SHT_PROGBITS":
                    data = section.data()
                    if data:
                        yield data
    except ELFError as error:
        raise ToolchainError(f"{path.name} is not an object file: {error}") from error


def code_digest(object_path: Path, disassembler: Path) -> str:
    """The identity of the machine code in an object file, device and host.

    Args:
        object_path: an object file that nvcc compiled, not linked.
        disassembler: ``cuobjdump``, see ``toolchain.find_disassembler``.

    Returns:
        64 hex characters.

    Raises:
        ToolchainError: the disassembler fails, or the file has no machine code for a GPU.
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
    host = list(_contents(object_path, HOST_SECTIONS))
    return digest("code", _sorted(device), _sorted(host))


def _sorted(contents: list[bytes]) -> list[str]:
    return sorted(hashlib.sha256(data).hexdigest() for data in contents)
