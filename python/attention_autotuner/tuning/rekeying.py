"""Carrying measurements over a change of the source that changes no machine code.

An entry whose source digest is the present one needs nothing but, perhaps, the digest of its machine code. For another
the kernel is built for the GPU that it was measured on: where its code digest is the recorded one, the measurement is
still one of this kernel, and gets the present source digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ..codegen.artifact import Artifact, BuildTarget
from ..codegen.build import Progress, build
from ..codegen.render import render
from ..codegen.source_digest import source_digest
from ..codegen.store import Store
from ..codegen.toolchain import Toolchain
from ..core.candidate import Candidate
from ..core.outcome import Outcome
from .environment import Environment
from .record_schema import CandidateEntry, TuningRecord
from .validity import Miss, PresentKernels, check, target_of

State = Literal["valid", "filled", "carried", "changed", "unknown"]
Key = tuple[Candidate, BuildTarget]
Codes = Mapping[Key, str | Outcome]


@dataclass(frozen=True, kw_only=True)
class Rekeyed:
    """The fate of one entry.

    Attributes:
        problem: of its record.
        arch: name of the record's policy.
        candidate: its name.
        pick: whether it serves.
        state: ``valid`` before and after; ``filled``: valid by its source, its code digest was missing; ``carried``
            over by its machine code; ``changed``: another kernel, it must be measured; ``unknown``: nothing could be
            compared.
        reason: one sentence, where it is changed or unknown, or why a digest is still missing.
    """

    problem: str
    arch: str
    candidate: str
    pick: bool
    state: State
    reason: str = ""


def entries_of(record: TuningRecord, *, every: bool) -> list[CandidateEntry]:
    """The entries of a record to look at: those that were timed, the pick and the default alone unless ``every``."""
    names = {record.pick, record.default}
    return [
        entry
        for entry in record.entries
        if entry.measurement is not None and (every or entry.candidate.name in names)
    ]


def wanted(records: Sequence[TuningRecord], *, every: bool) -> list[Key]:
    """The kernels to build, once each: where the source holds for their code digest, else to compare it."""
    keys: dict[Key, None] = {}
    for record in records:
        for entry in entries_of(record, every=every):
            target = target_of(environment_of(record, entry))
            if target is not None and (entry.code_digest is None) == _source_holds(entry):
                keys[entry.candidate, target] = None
    return list(keys)


def environment_of(record: TuningRecord, entry: CandidateEntry) -> Environment:
    """The environment that an entry was measured in."""
    digest = "" if entry.measurement is None else entry.measurement.environment
    return record.environments.get(digest, record.environment)


def _source_holds(entry: CandidateEntry) -> bool:
    """True for an entry of the present source, whatever else its kernel's knobs can say by now."""
    proof = check(replace(entry, knob_schema="", code_digest=None), PresentKernels())
    return not isinstance(proof, Miss)


def build_codes(
    keys: Sequence[Key],
    *,
    toolchain: Toolchain,
    store: Store,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[Key, str | Outcome]:
    """Build kernels and give the digests of their machine code; those that cannot be known are left out.

    Args:
        keys: what to build, and for what.
        toolchain: what to compile with.
        store: keeps the artifacts; those from before there were code digests are built again.
        jobs: compilations at once.
        progress: see :func:`~attention_autotuner.codegen.build.build`.

    Raises:
        ToolchainError, StoreError, BuildError: as :func:`~attention_autotuner.codegen.build.build`.
    """
    codes: dict[Key, str | Outcome] = {}
    for target in dict.fromkeys(target for _, target in keys):
        candidates = [candidate for candidate, other in keys if other == target]
        kernels = [render(candidate) for candidate in candidates]
        build_all = partial(
            build, kernels, target, toolchain=toolchain, store=store, jobs=jobs, progress=progress
        )
        results = build_all()
        bare = [made for made in results if isinstance(made, Artifact) and made.code_digest is None]
        if bare:
            for artifact in bare:
                store.discard(artifact.path.parent)
            results = build_all()
        for candidate, result in zip(candidates, results, strict=True):
            code = result.code_digest if isinstance(result, Artifact) else result
            if code is not None:
                codes[candidate, target] = code
    return codes


def rekey(
    record: TuningRecord, codes: Codes, *, compiler: Mapping[str, str] | None, every: bool = False
) -> tuple[TuningRecord | None, list[Rekeyed]]:
    """A record with its entries' digests brought to the present, where their measurements hold.

    Args:
        record: the record.
        codes: what the machine code of its kernels is now, see :func:`build_codes`.
        compiler: versions of what built it; None where nothing was built.
        every: look at every entry that was timed.

    Returns:
        The new record, None where nothing changes, and what became of each entry that was looked at.
    """
    entries = {entry.candidate.name: entry for entry in record.entries}
    said = []
    for entry in entries_of(record, every=every):
        environment = environment_of(record, entry)
        new, state, reason = _rekey(entry, environment, codes, compiler)
        entries[entry.candidate.name] = new
        said.append(
            Rekeyed(
                problem=record.problem.describe(),
                arch=record.arch,
                candidate=entry.candidate.name,
                pick=entry.candidate.name == record.pick,
                state=state,
                reason=reason,
            )
        )
    changed = replace(record, entries=tuple(entries.values()))
    return (None if changed == record else changed), said


def _rekey(
    entry: CandidateEntry,
    environment: Environment,
    codes: Codes,
    compiler: Mapping[str, str] | None,
) -> tuple[CandidateEntry, State, str]:
    target = target_of(environment)
    code = None if target is None else codes.get((entry.candidate, target))
    fresh = replace(
        entry,
        source_digest=source_digest(render(entry.candidate)),
        knob_schema="",
        kernel_digest=None,
    )
    other = _another(environment, compiler)
    if _source_holds(entry):
        if entry.code_digest is not None:
            return fresh, "valid", ""
        if isinstance(code, str) and not other:
            return replace(fresh, code_digest=code), "filled", ""
        return fresh, "valid", f"its code digest stays unknown: {other or _no_code(code)}"
    if entry.code_digest is None:
        return entry, "unknown", "its source changed, and no code digest was recorded"
    if code == entry.code_digest:
        return fresh, "carried", ""
    if not isinstance(code, str):
        return entry, "unknown", _no_code(code)
    if other:
        return entry, "unknown", f"its machine code differs, and so does {other}"
    return entry, "changed", "its machine code differs: it must be measured"


def _no_code(code: str | Outcome | None) -> str:
    return f"it does not build: {code.reason}" if isinstance(code, Outcome) else "it was not built"


def _another(environment: Environment, compiler: Mapping[str, str] | None) -> str:
    """The tools of a compiler that are of another version than those of an environment; empty where none is."""
    names = [
        f"{name} ({compiler.get(name)}, it was measured with {getattr(environment, name)})"
        for name in ("nvcc", "cutlass")
        if compiler is not None and compiler.get(name) != getattr(environment, name)
    ]
    return ", ".join(names)
