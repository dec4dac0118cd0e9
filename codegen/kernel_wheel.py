"""A bundle as a wheel: one package of data that pip installs and :mod:`.installed` finds."""

from __future__ import annotations

import base64
import hashlib
import platform
import re
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from ..errors import BundleError
from ..version import __version__
from .bundle import Bundle
from .entries import LIBRARY
from .installed import package_name

# What a manylinux platform promises beside its own glibc, whatever its number: the symbols of 2_17 (PEP 599, PEP 600).
OLDEST_GLIBC = 17
NEWEST_PROMISED = {b"GLIBCXX_3.4.": 19, b"CXXABI_1.3.": 7}
_DATE = (1980, 1, 1, 0, 0, 0)  # of every file: the same kernels make the same wheel
_MODE = 0o644 << 16

_INIT = '"""Built kernels for attention-autotuner on {gpu}: data alone, found by its name."""\n'
_METADATA = """Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: Built kernels for attention-autotuner on {gpu}, made by CUDA {cuda}
License: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: attention-autotuner=={version}
"""
_WHEEL = """Wheel-Version: 1.0
Generator: attention-autotuner {version}
Root-Is-Purelib: false
Tag: {tag}
"""


def distribution_name(gpu: str) -> str:
    """The name that pip knows the kernels for a GPU by."""
    return package_name(gpu).replace("_", "-")


def platform_tag(libraries: Iterable[Path]) -> str:
    """The oldest platform that has what the libraries ask of the C and C++ libraries.

    Returns:
        ``manylinux_2_<glibc>_<machine>``, or ``linux_<machine>`` where a symbol is newer than a manylinux promises.
    """
    glibc = OLDEST_GLIBC
    for library in libraries:
        content = library.read_bytes()
        glibc = max(glibc, *_versions(content, b"GLIBC_2."))
        if any(max(_versions(content, name)) > newest for name, newest in NEWEST_PROMISED.items()):
            return f"linux_{platform.machine()}"
    return f"manylinux_2_{glibc}_{platform.machine()}"


def _versions(content: bytes, prefix: bytes) -> list[int]:
    """Minor versions of symbols that a library's string table names; 0 for none."""
    minors = re.findall(b"\\0" + re.escape(prefix) + rb"(\d+)", content)
    return [0, *map(int, minors)]


def write_wheel(bundle: Bundle, gpu: str, output: Path) -> Path:
    """Put a bundle into a wheel.

    Args:
        bundle: what to pack.
        gpu: name of the spec that it is for, e.g. ``H200``.
        output: the folder to write to; made where it is missing.

    Returns:
        The wheel.

    Raises:
        BundleError: the bundle has no kernels.
        OSError: it cannot be written; nothing is left behind.
    """
    if not bundle.kernels:
        raise BundleError(f"{bundle.root} has no kernels to make a wheel of")
    package = package_name(gpu)
    tag = f"py3-none-{platform_tag(kernel.folder / LIBRARY for kernel in bundle.kernels)}"
    cuda = ", ".join(sorted({kernel.toolchain["nvcc"] for kernel in bundle.kernels}))
    info = f"{package}-{__version__}.dist-info"
    texts = {
        f"{package}/__init__.py": _INIT.format(gpu=gpu),
        f"{info}/METADATA": _METADATA.format(
            name=distribution_name(gpu), version=__version__, gpu=gpu, cuda=cuda
        ),
        f"{info}/WHEEL": _WHEEL.format(version=__version__, tag=tag),
    }
    contents: dict[str, bytes | Path] = {name: text.encode() for name, text in texts.items()}
    contents |= {
        f"{package}/{path.relative_to(bundle.root).as_posix()}": path
        for path in sorted(bundle.root.rglob("*"))
        if path.is_file()
    }
    output.mkdir(parents=True, exist_ok=True)
    wheel = output / f"{package}-{__version__}-{tag}.whl"
    with tempfile.TemporaryDirectory(dir=output, prefix=".wheel.") as folder:
        staged = Path(folder) / wheel.name
        _pack(staged, contents, f"{info}/RECORD")
        staged.replace(wheel)
    return wheel


def _pack(wheel: Path, contents: dict[str, bytes | Path], record: str) -> None:
    lines = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            hashed = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={hashed},{len(data)}\n")
            _add(archive, name, data)
        _add(archive, record, "".join([*lines, f"{record},,\n"]).encode())


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, _MODE
    archive.writestr(entry, data)
