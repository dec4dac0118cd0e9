"""Where the CUTLASS headers are, and which version they have."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from ..errors import ToolchainError
from .wheels import package_folders

logger = logging.getLogger(__name__)

PINNED_VERSION = "4.2.0"
"""The CUTLASS release that the kernels are developed and tested with."""

INSTALL_COMMAND = f"pip install --no-deps nvidia-cutlass=={PINNED_VERSION}.0"

_PACKAGE = "cutlass_library"  # the import package of the PyPI distribution that carries the headers
_MARKER = "cute/layout.hpp"
_DEFINES = re.compile(r"^#define CUTLASS_(MAJOR|MINOR|PATCH)\s+(\d+)", re.MULTILINE)


def checkout_dir() -> Path:
    """``third_party/cutlass`` of the repository that this file runs from (absent in an installed wheel)."""
    return Path(__file__).resolve().parents[1] / "third_party" / "cutlass"


def package_dir() -> Path | None:
    """The folder of headers inside the PyPI package, found without importing it."""
    folders = package_folders(_PACKAGE)
    return folders[0] / "source" / "include" if folders else None


def _headers_in(folder: Path) -> Path | None:
    """The include folder of a checkout, or the folder itself where it is one."""
    for place in (folder / "include", folder):
        if (place / _MARKER).is_file():
            return place.resolve()
    return None


def read_version(include: Path) -> str:
    """``major.minor.patch`` as ``cutlass/version.h`` says.

    Raises:
        ToolchainError: the file is missing or does not say.
    """
    path = include / "cutlass" / "version.h"
    try:
        numbers = dict(_DEFINES.findall(path.read_text(encoding="utf-8", errors="replace")))
    except OSError as error:
        raise ToolchainError(f"cannot read the CUTLASS version: {error}") from error
    if len(numbers) != 3:
        raise ToolchainError(f"{path} does not define CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH")
    return f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}"


def find_cutlass(cutlass_dir: Path | str | None = None) -> tuple[Path, str]:
    """Find the headers: the given folder alone, else the repository's checkout, else the PyPI package.

    Args:
        cutlass_dir: a checkout or its ``include`` folder (the ``CUTLASS_DIR`` setting).

    Returns:
        The folder that holds ``cute/`` and ``cutlass/``, and its version.

    Raises:
        ToolchainError: there are none; the message says where it looked and how to install them.
    """
    places = [checkout_dir(), package_dir()] if cutlass_dir is None else [Path(cutlass_dir)]
    looked = [place for place in places if place is not None]
    for place in looked:
        include = _headers_in(place)
        if include is None:
            continue
        version = read_version(include)
        if version != PINNED_VERSION:
            logger.warning(
                "CUTLASS %s at %s; kernels are tested with %s", version, include, PINNED_VERSION
            )
        return include, version
    where = ", ".join(str(place) for place in looked)
    setting = "" if cutlass_dir is None else " (ATTENTION_AUTOTUNER_CUTLASS_DIR)"
    raise ToolchainError(
        f"no CUTLASS headers ({_MARKER}) in {where}{setting}; run `{INSTALL_COMMAND}`, or set "
        "ATTENTION_AUTOTUNER_CUTLASS_DIR to a checkout"
    )
