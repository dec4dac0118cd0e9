"""Kernels that were never compiled, in stores and bundles: for tests of the look-up."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.codegen.bundle import Bundle, BundledPick, write_bundle
from attention_autotuner.codegen.render import kernel_digest, render
from attention_autotuner.codegen.report import parse_ptxas
from attention_autotuner.codegen.store import Store
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.identity import digest


def publish(
    store: Store,
    candidate: Candidate,
    *,
    arch: str = "80",
    nvcc: str = "13.0.88",
    content: bytes = b"no library",
) -> Artifact:
    """Store a kernel as if it had been built."""
    kernel = render(candidate)
    library = store.root / "library.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_bytes(content)
    artifact = Artifact(
        name=kernel.name,
        digest=digest(kernel.name, kernel_digest(kernel), arch, nvcc),
        path=library,
        report=parse_ptxas(
            "ptxas info    : Compiling entry function 'kernel' for 'sm_80'\n"
            "ptxas info    : Used 40 registers, used 0 barriers, 360 bytes cmem[0]\n"
        ),
        kernel_digest=kernel_digest(kernel),
        target=BuildTarget(arch=arch).of_family(candidate.family),
        toolchain={"nvcc": nvcc, "host_cxx": "g++ 12.2.0", "cutlass": "4.2.0"},
        build_seconds=1.0,
        build_peak_bytes=1,
    )
    return store.publish(source=kernel.text, library=library, log="", artifact=artifact)


def make_bundle(
    folder: Path,
    picks: Iterable[BundledPick],
    *,
    policy: str = "A100",
    arch: str = "80",
    nvcc: str = "13.0.88",
    content: bytes = b"no library",
) -> Bundle:
    """A bundle of uncompiled kernels in ``folder / "bundle"``."""
    chosen = list(picks)
    store = Store(folder / "store")
    artifacts = {
        candidate: publish(store, candidate, arch=arch, nvcc=nvcc, content=content)
        for candidate in dict.fromkeys(pick.candidate for pick in chosen)
    }
    return write_bundle(
        folder / "bundle", arch=policy, build_arch=arch, artifacts=artifacts, picks=chosen
    )
