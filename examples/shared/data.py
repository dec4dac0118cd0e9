"""Text that is on every machine: the sources of Python's standard library, byte by byte.

Which files there are depends on the Python that runs, so two runs compare only where the digest agrees.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

VOCABULARY = 256
"""A token is a byte."""
HELD_OUT_EVERY = 20
"""Every twentieth file is kept from training, whole, so that no file's own style gives it away."""
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
"""Folders that hold something else than the library, or that many installations lack."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Bytes to train on and bytes to evaluate on, uint8, of other files; and a digest of all names and contents."""

    train: torch.Tensor
    held_out: torch.Tensor
    files: int
    digest: str


def read_corpus(root: Path | None = None) -> Corpus:
    """All ``*.py`` files below a folder (the standard library's by default), cut into two splits by file.

    Raises:
        ValueError: there are too few files to hold any out.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if LEFT_OUT.isdisjoint(name.split("/"))]
    if len(names) < HELD_OUT_EVERY:
        raise ValueError(
            f"at least {HELD_OUT_EVERY} Python files needed, {root} holds {len(names)}"
        )
    digest = hashlib.sha256()
    train, held_out = bytearray(), bytearray()
    for number, name in enumerate(names, start=1):
        content = (root / name).read_bytes()
        digest.update(name.encode() + b"\0" + content)
        (train if number % HELD_OUT_EVERY else held_out).extend(content + b"\n")
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        held_out=torch.frombuffer(held_out, dtype=torch.uint8),
        files=len(names),
        digest=digest.hexdigest()[:16],
    )


class Batches:
    """A fixed sequence of batches: one seed, one sequence, in whatever order they are asked for.

    ``batches[step]`` is ``(inputs, targets)``, both int64 ``[batch, seqlen]``, targets one byte further on.
    """

    def __init__(
        self, text: torch.Tensor, *, count: int, batch: int, seqlen: int, seed: int, device: str
    ) -> None:
        if len(text) <= seqlen:
            raise ValueError(f"seqlen {seqlen} needs a longer text than {len(text)} bytes")
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(text) - seqlen, (count, batch), generator=generator)
        # All on the device from the start, so that a step copies nothing from the host and waits for nothing.
        self._text, self._starts = text.to(device), starts.to(device)
        self._offsets = torch.arange(seqlen + 1, device=device)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= step < len(self):
            raise IndexError(f"there are {len(self)} batches, asked for number {step}")
        tokens = self._text[self._starts[step][:, None] + self._offsets].long()
        return tokens[:, :-1], tokens[:, 1:]
