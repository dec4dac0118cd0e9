"""The match of a tuning record to a problem: hard and soft fields, and the nearest bucket.

Hard fields make a miss that names the field (schema, the kernel's knobs, policy, GPU, SM count, the kernel itself);
soft ones (driver, CUDA, compiler, torch, the list of candidates) are served, marked unverified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log2
from typing import Any, Literal, TypeVar

from ..core.candidate import Candidate
from ..core.outcome import Proof
from ..core.problem import Problem, round_seqlen
from .environment import HARD_FIELDS, SOFT_FIELDS, Environment
from .record_schema import TuningRecord
from .validity import Miss, PresentKernels, check, misfit

MAX_DISTANCE = 4.0  # doublings of seqlens and heads, summed, that a neighbouring record may be away
MAX_FILL_DISTANCE = 1.0  # and doublings of tiles, where these are few
TILE_ROWS = 128  # of such a tile
FULL_TILES = 1024  # from which each SM takes so many that how many there are hardly matters

PROVE = "`attention-autotuner records prove` verifies it on a GPU"

Layer = Literal["record", "shipped"]
Document = dict[str, Any]
Place = TypeVar("Place")  # where a document is from


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A record that serves.

    Attributes:
        record: the record.
        layer: the user's own (``record``) or the package's (``shipped``).
        exact: whether it was tuned for this very bucket, rather than for a neighbour.
        unverified: soft fields that differ, in a fixed order; empty when all agree.
    """

    record: TuningRecord
    layer: Layer
    exact: bool
    unverified: tuple[str, ...]

    @property
    def candidate(self) -> Candidate:
        """The candidate that serves."""
        return self.record.candidate

    @property
    def gpu_name(self) -> str | None:
        """The GPU that it was measured on."""
        return self.record.environment.gpu_name

    @property
    def median_us(self) -> float | None:
        """The measured time, microseconds."""
        timing = self.record.picked.measurement
        return None if timing is None else timing.median_us

    @property
    def proof(self) -> Proof | None:
        """The proof of the candidate; None before proofs were kept."""
        return self.record.picked.proof

    @property
    def estimate_us(self) -> float | None:
        """The cost model's time, microseconds."""
        return self.record.picked.estimate_us


@dataclass(frozen=True, kw_only=True)
class Query:
    """The question of a lookup.

    Attributes:
        problem: as called, or with rounded lengths; bucketed by the lookup.
        arch: the policy's name.
        environment: the present one; fields that are None are not compared.
        space_digest: of the candidates that the policy offers now; None is not compared.
        kernels: what candidates' kernels are now; None is not compared.
        strict: soft differences are misses.
        proven: a pick without a proof is one, too.
    """

    problem: Problem
    arch: str
    environment: Environment
    space_digest: str | None = None
    kernels: PresentKernels | None = None
    strict: bool = False
    proven: bool = False


def distance(problem: Problem, recorded: Problem, *, bound: float = MAX_DISTANCE) -> float | None:
    """The distance of a record's problem from a bucketed one, in doublings; None where it cannot stand in."""
    same = (
        "op", "direction", "dtype", "padded_dim_qk", "padded_dim_v", "causal", "alignment_bytes",
        "deterministic", "mask", "form", "key_bounds", "compiled_modifications",
        "operands",
    )  # fmt: skip
    if any(getattr(problem, name) != getattr(recorded, name) for name in same):
        return None
    pairs = (
        (problem.seqlen_q, recorded.seqlen_q),
        (problem.seqlen_k, recorded.seqlen_k),
        (problem.batch * problem.heads_q, recorded.batch * recorded.heads_q),
        (problem.heads_q // problem.heads_kv, recorded.heads_q // recorded.heads_kv),
        *((a + 2, b + 2) for a, b in zip(problem.window_size, recorded.window_size, strict=True)),
        *((a + 1, b + 1) for a, b in zip(problem.packed_rows, recorded.packed_rows, strict=True)),
        (problem.documents + 1, recorded.documents + 1),
    )
    if not problem.semantics.compiles_dims:
        pairs += ((problem.dim_qk, recorded.dim_qk), (problem.dim_v, recorded.dim_v))
    apart = sum(abs(log2(a / b)) for a, b in pairs)
    if (problem.dim_qk, problem.dim_v) != (recorded.dim_qk, recorded.dim_v):
        apart += 0.25
    if problem.causal_alignment != recorded.causal_alignment:
        apart += 0.25
    fill = abs(log2(_tiles(problem) / _tiles(recorded)))
    if problem.semantics.batched and fill > MAX_FILL_DISTANCE:
        apart += MAX_DISTANCE  # what is best for many tiles leaves SMs idle with few
    return apart if apart <= bound else None


def _tiles(problem: Problem) -> int:
    """Tiles of queries, or of keys where gradients are computed, up to as many as fill a GPU."""
    rows, heads = problem.seqlen_q, problem.heads_q
    if problem.direction == "backward":
        rows, heads = problem.seqlen_k, problem.heads_kv
    return max(1, min(FULL_TILES, problem.batch * heads * -(-rows // TILE_ROWS)))


def serves_lengths(measured: Mapping[str, Any], problem: Problem) -> bool:
    """True where a shipped pick may serve the lengths of a problem.

    Where defaults go by tiles, they are as fast as picks of other lengths: over 283 shapes between buckets, on an H200,
    shipped picks of near lengths took 1.03 times as long.

    Args:
        measured: fields of the problem that it was measured on, by name.
        problem: as called.
    """
    if not problem.goes_by_tiles:
        return True
    lengths = ("seqlen_q", "seqlen_k")
    return all(round_seqlen(measured[n]) == round_seqlen(getattr(problem, n)) for n in lengths)


def compare(document: Document, query: Query, layer: Layer) -> Hit | Miss:
    """Compare a parsed file with a query, hard fields first.

    Raises:
        RecordError: the document does not follow its schema.
    """
    missed = misfit(document)
    if missed is not None:
        return missed
    record = TuningRecord.from_json(document)
    if record.arch != query.arch:
        return Miss(field="arch", expected=query.arch, recorded=record.arch)
    for miss in _differences(HARD_FIELDS, query.environment, record.environment):
        return miss
    if query.kernels is not None:
        proof = check(record.picked, query.kernels)
        if isinstance(proof, Miss):
            return proof
    if query.proven and record.picked.proof is None:
        return Miss(field="proof", expected="required", recorded="none", advice=PROVE)
    soft = _differences(SOFT_FIELDS, query.environment, record.environment)
    if query.space_digest not in (None, record.space_digest):
        now = str(query.space_digest)
        soft.insert(0, Miss(field="space_digest", expected=now, recorded=record.space_digest))
    if query.strict and soft:
        return soft[0]
    exact = record.problem == query.problem.bucketed()
    unverified = tuple(miss.field for miss in soft)
    return Hit(record=record, layer=layer, exact=exact, unverified=unverified)


def _differences(names: Iterable[str], present: Environment, recorded: Environment) -> list[Miss]:
    """The fields of two environments that differ; those not known now are not compared."""
    misses = []
    for name in names:
        now, then = getattr(present, name), getattr(recorded, name)
        if now is not None and now != then:
            misses.append(Miss(field=name, expected=str(now), recorded=str(then)))
    return misses


def by_distance(
    pairs: Iterable[tuple[Place, Document]], query: Query
) -> list[tuple[Place, Document]]:
    """The documents whose problem can stand in, nearest first, ties in the order given."""
    problem = query.problem.bucketed()
    near = []
    for place, document in pairs:
        try:
            recorded = Problem(**document["problem"])
        except (KeyError, TypeError, ValueError):
            continue  # compared, and set aside, when its own bucket is asked for
        apart = distance(problem, recorded)
        if apart is not None and document.get("arch") == query.arch:
            near.append((apart, place, document))
    return [(place, document) for _, place, document in sorted(near, key=lambda n: n[0])]
