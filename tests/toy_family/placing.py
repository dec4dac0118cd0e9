"""The toy family put where a real one would stand: its headers among the headers, a line in ``KERNELS``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attention_autotuner.core.cpp import NAMESPACE
from attention_autotuner.kernels.registry import KERNELS
from tests.neutral_refactoring import copied_sources

from .naive_sm80.kernel import NaiveSm80

TOY = NaiveSm80()
HEADERS = Path(__file__).resolve().parent / "include" / TOY.name


@contextmanager
def toy_family(folder: Path) -> Iterator[Path]:
    """The toy registered, and its headers in a copy of the sources that is rendered and compiled meanwhile.

    Args:
        folder: where the copy goes.

    Yields:
        The copy.
    """
    with copied_sources(folder) as sources, pytest.MonkeyPatch.context() as patch:
        shutil.copytree(HEADERS, sources / "include" / NAMESPACE / TOY.name)
        patch.setitem(KERNELS, TOY.name, TOY)
        yield sources
