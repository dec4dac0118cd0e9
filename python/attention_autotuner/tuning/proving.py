"""Proofs for records of before they were kept: their kernels are verified on the present GPU.

A kernel is verified once, on the small problem of its class, whichever records have it. The proof goes to those entries
that are of the very kernel: of its source, or of its machine code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..core.candidate import Candidate
from ..core.outcome import Ok, Outcome
from .class_pools import small_problem
from .pipeline import Built, Pipeline
from .record_schema import CandidateEntry, TuningRecord
from .rekeying import entries_of, environment_of
from .stages import built_of, source_digests
from .validity import Miss, PresentKernels, check

State = Literal["proven", "kept", "failed", "changed", "elsewhere"]
Tell = Callable[[str, int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class Proven:
    """The fate of one entry.

    Attributes:
        problem: of its record.
        candidate: its name.
        pick: whether it serves.
        state: ``proven`` now; ``kept``: it had a proof; ``failed`` to build or to pass; ``changed``: the kernel is
            another one by now; ``elsewhere``: measured on a GPU of another compute capability.
        reason: one sentence, where there is no proof.
    """

    problem: str
    candidate: str
    pick: bool
    state: State
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A kernel that was built and verified.

    Attributes:
        outcome: of either; Ok with the proof.
        source_digest, code_digest: of what was built.
    """

    outcome: Outcome
    source_digest: str
    code_digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prover:
    """Verifies kernels of records.

    Attributes:
        pipeline: builds and verifies.
        every: every entry that was timed, not pick and default alone.
        again: those that have a proof, too.
    """

    pipeline: Pipeline
    every: bool = False
    again: bool = False

    def verify(self, records: Iterable[TuningRecord], tell: Tell) -> dict[Candidate, Verified]:
        """Build and verify the kernels of entries that want a proof, each once.

        Args:
            records: any.
            tell: told (phase, done, total, message).

        Raises:
            ToolchainError, StoreError, ArtifactError: there is no compiler, no folder or no process to run them in.
        """
        wanted = [
            entry.candidate
            for record in records
            for entry in entries_of(record, every=self.every)
            if self._wants(record, entry)
        ]
        built = built_of(
            wanted, self.pipeline, lambda done, total, name, _: tell("build", done, total, name)
        )
        sources = source_digests(built)
        verified = {}
        for place, (candidate, result) in enumerate(built.items()):
            tell("verify", place, len(built), candidate.name)
            verified[candidate] = self._verified(candidate, result, sources[candidate])
        tell("verify", len(built), len(built), "")
        return verified

    def _verified(
        self, candidate: Candidate, result: Built | Outcome, source_digest: str
    ) -> Verified:
        if isinstance(result, Outcome):
            return Verified(outcome=result, source_digest=source_digest)
        outcome = self.pipeline.verify(
            small_problem(candidate), result, deterministic=candidate.deterministic
        )
        return Verified(
            outcome=outcome, source_digest=source_digest, code_digest=result.code_digest
        )

    def prove(
        self, record: TuningRecord, verified: Mapping[Candidate, Verified]
    ) -> tuple[TuningRecord | None, list[Proven]]:
        """A record with the proofs of its entries; None where nothing changes; and what became of each entry."""
        entries = {entry.candidate.name: entry for entry in record.entries}
        said = []
        for entry in entries_of(record, every=self.every):
            name = entry.candidate.name
            entries[name], state, reason = self._proven(record, entry, verified)
            said.append(
                Proven(
                    problem=record.problem.describe(),
                    candidate=name,
                    pick=name == record.pick,
                    state=state,
                    reason=reason,
                )
            )
        # Proofs take no part in comparisons.
        changed = any(item.state == "proven" for item in said)
        return (replace(record, entries=tuple(entries.values())) if changed else None), said

    def _proven(
        self, record: TuningRecord, entry: CandidateEntry, verified: Mapping[Candidate, Verified]
    ) -> tuple[CandidateEntry, State, str]:
        if not self._wants(record, entry):
            if entry.proof is not None:
                return entry, "kept", ""
            there = environment_of(record, entry)
            return entry, "elsewhere", f"it was measured on {there.gpu_name or 'an unknown GPU'}"
        now = verified[entry.candidate]
        if not isinstance(now.outcome, Ok) or now.outcome.proof is None:
            return entry, "failed", f"{now.outcome.kind}: {now.outcome.reason}"
        kernels = PresentKernels(source=lambda _: now.source_digest, code=lambda _: now.code_digest)
        held = check(entry, kernels)
        if isinstance(held, Miss):
            return entry, "changed", held.describe()
        return replace(entry, outcome=now.outcome), "proven", ""

    def _wants(self, record: TuningRecord, entry: CandidateEntry) -> bool:
        here, there = self.pipeline.environment, environment_of(record, entry)
        return (self.again or entry.proof is None) and here.capability == there.capability
