"""The proof that a measurement still holds: its kernel's knobs, and either of two digests.

The source digest is known in milliseconds. Where it differs, the digest of the machine code may still be the same: a
renamed namespace changes the one and not the other. At a look-up it is known of kernels that were built here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import lru_cache
from typing import Any, Literal

from ..arch.resolution import native_arch
from ..codegen.artifact import BuildTarget
from ..codegen.installed import known_here
from ..codegen.render import kernel_digest, render
from ..codegen.source_digest import source_digest
from ..codegen.store import Store
from ..core.candidate import Candidate
from ..errors import BundleError
from ..kernels.configs import knob_schema
from ..settings import current
from .environment import Environment
from .record_schema import READ, SCHEMA, CandidateEntry, migrated, present_schema

Proof = Literal["source", "code", "bytes"]
ADVICE = "`attention-autotuner records rekey` can tell whether its machine code is the same"


@dataclass(frozen=True, kw_only=True)
class Miss:
    """A record that does not serve, or none at all.

    Attributes:
        field: what missed: ``problem`` when nothing was ever recorded, else the first field that differs.
        expected: the present value.
        recorded: the record's value.
        advice: what may help; empty where only a GPU does.
    """

    field: str
    expected: str
    recorded: str
    advice: str = dataclass_field(default="", compare=False)

    def describe(self) -> str:
        """One line for people."""
        if self.field == "problem":
            return f"{self.recorded} for {self.expected} or a shape near it"
        advice = self.advice and f"; {self.advice}"
        return f"recorded with {self.field} {self.recorded}, now {self.expected}{advice}"


def _source(candidate: Candidate) -> str:
    """The source digest of a candidate, taken from a bundle where one knows it."""
    known = None
    with contextlib.suppress(BundleError):  # said where a kernel is looked for
        known = known_here(candidate, current())
    return (known and known.source_digest) or source_digest(render(candidate))


@dataclass(frozen=True, kw_only=True)
class PresentKernels:
    """The kernels as they are now.

    Attributes:
        source: source digest of a candidate.
        code: digest of its machine code, where it was built; else None.
        exact: its kernel digest, as records of schema 2 have it.
    """

    source: Callable[[Candidate], str] = _source
    code: Callable[[Candidate], str | None] = lambda candidate: None
    exact: Callable[[Candidate], str] = lambda candidate: kernel_digest(render(candidate))


def target_of(environment: Environment) -> BuildTarget | None:
    """The target of kernels for the GPU of an environment; None where there is none."""
    capability = environment.capability
    return None if capability is None else BuildTarget(arch=native_arch(capability))


def built_here(store: Store, environment: Environment) -> PresentKernels:
    """The present kernels, those of them that a store has for the GPU of an environment with their machine code."""

    @lru_cache(maxsize=256)
    def code(candidate: Candidate) -> str | None:
        target = target_of(environment)
        if target is None:
            return None
        built = store.find(candidate, kernel_digest(render(candidate)), target)
        digests = [artifact.code_digest for artifact in built]
        return next((digest for digest in digests if digest is not None), None)

    return PresentKernels(code=code)


def misfit(document: Mapping[str, Any]) -> Miss | None:
    """The reason that a parsed record cannot serve whatever it says: its schema, or the knobs of its pick's kernel.

    Raises:
        RecordError: it does not follow the schema that it names.
    """
    schema = document.get("schema")
    if schema not in READ:
        return Miss(field="schema", expected=str(SCHEMA), recorded=str(schema))
    document = migrated(document)
    entries = document.get("entries")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and entry.get("name") == document.get("pick"):
            now, then = str(present_schema(entry.get("candidate"))), str(entry.get("knob_schema"))
            if now != then:
                return Miss(field="knob_schema", expected=now, recorded=then, advice=ADVICE)
    return None


def check(entry: CandidateEntry, present: PresentKernels) -> Proof | Miss:
    """The digest by which an entry's measurement holds, or what has changed since."""
    knobs = knob_schema(entry.candidate.kernel)
    if entry.knob_schema != knobs:
        then = entry.knob_schema
        return Miss(field="knob_schema", expected=knobs, recorded=then, advice=ADVICE)
    if entry.kernel_digest is not None:
        exact = present.exact(entry.candidate)
        if exact == entry.kernel_digest:
            return "bytes"
        if not entry.source_digest and entry.code_digest is None:
            return Miss(field="kernel_digest", expected=exact, recorded=entry.kernel_digest)
    source = present.source(entry.candidate)
    if source == entry.source_digest:
        return "source"
    if entry.code_digest is None:
        return Miss(field="source_digest", expected=source, recorded=entry.source_digest)
    code = present.code(entry.candidate)
    if code == entry.code_digest:
        return "code"
    if code is not None:
        return Miss(field="code_digest", expected=code, recorded=entry.code_digest)
    return Miss(field="source_digest", expected=source, recorded=entry.source_digest, advice=ADVICE)
