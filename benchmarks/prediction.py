"""How predicted picks are made: for each class of problems a few kernels that are near the model's best everywhere.

The model ranks every legal candidate of a class on every shape. A few of the best are built, the compiler's registers
and spills change their order, and what spills falls out; that is repeated until the few that cover the shapes are
built. A default stays wherever the model does not predict a gain beyond its own error (:data:`.evidence.MARGIN`), and
everywhere in an operation and direction whose measurements speak against the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log

from attention_autotuner.arch import A100, H100, RTX4090, Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.outcome import Outcome
from attention_autotuner.core.problem import Direction, Mask, Op, Problem
from attention_autotuner.kernels.cost_model import estimate, rank, refine
from attention_autotuner.kernels.scores_backward_sm80.knobs import BackwardKnobs
from attention_autotuner.kernels.scores_backward_sm90.knobs import BackwardSm90Knobs
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.kernels.scores_forward_sm90.knobs import ForwardSm90Knobs
from attention_autotuner.kernels.shared.estimates import Report
from attention_autotuner.tuning.spills import check_spills

from .evidence import Trial, Verdict, chosen, verdict

NEAR = 1.02  # of a shape's best, within which a kernel covers it
KERNELS = 2  # of a family that are built, at most; with the order of their CTAs, twice as many
ROUNDS = 4  # of building and choosing anew
POOL = 32  # of the model's best on each anchor that later shapes choose among
TOKENS = 16384
POLICIES: dict[str, type[Policy]] = {"A100": A100, "RTX4090": RTX4090, "H100": H100}
Dims = tuple[int, int]
Heads = tuple[int, int, int]  # batch, heads_q, heads_kv

ATTENTION_DIMS: tuple[Dims, ...] = (
    (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256),
)  # fmt: skip
RETNET_DIMS: tuple[Dims, ...] = ((64, 64), (128, 128), (256, 256), (256, 512))
RETENTION_DIMS: tuple[Dims, ...] = ((64, 64), (128, 128), (128, 256), (256, 256), (256, 512))
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Problems of one operation, direction, mask and pair of head dims: what may share kernels.

    Attributes:
        shapes: the problems that are predicted, fp16, bucketed.
    """

    op: Op
    direction: Direction
    mask: Mask
    dims: Dims
    shapes: tuple[Problem, ...]

    @property
    def name(self) -> str:
        """For progress and errors, e.g. ``retnet backward explicit 256/512``."""
        mask = "" if self.mask == "none" else f" {self.mask}"
        return f"{self.op} {self.direction}{mask} {self.dims[0]}/{self.dims[1]}"


def families() -> list[Family]:
    """What is predicted, in the order of the files."""
    found = []
    for direction in DIRECTIONS:
        found += [_family("attention", direction, "none", dims) for dims in ATTENTION_DIMS]
    for direction in DIRECTIONS:
        masks: tuple[Mask, ...] = ("explicit", "decay")
        found += [_family("retnet", direction, m, dims) for m in masks for dims in RETNET_DIMS]
    for direction in DIRECTIONS:
        found += [_family("retention", direction, "none", dims) for dims in RETENTION_DIMS]
    return found


def _family(op: Op, direction: Direction, mask: Mask, dims: Dims) -> Family:
    shapes = [
        Problem(
            op=op,
            direction=direction,
            mask=mask,
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            dim_qk=dims[0],
            dim_v=dims[1],
            causal=causal,
        )
        for causal in (False, True)
        if causal or not (op == "retention" or mask == "decay")
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
        if op != "retnet" or seqlen <= 8192
        for batch, heads_q, heads_kv in _heads(op, seqlen)
    ]
    return Family(op=op, direction=direction, mask=mask, dims=dims, shapes=tuple(shapes))


def _heads(op: Op, seqlen: int) -> list[Heads]:
    """A full batch and a single sequence; attention's queries in groups, too."""
    if op == "attention":
        return [(TOKENS // seqlen, 16, 16), (1, 32, 32), (max(1, 8192 // seqlen), 32, 8)]
    return [(max(1, TOKENS // seqlen), 8, 8), (1, 16, 16)]


def verdict_of(policy: Policy, op: Op, direction: Direction, trials: Iterable[Trial]) -> Verdict:
    """What measurements say of the model for an operation, among kernels of the family that serves it untuned."""
    shapes = next(f.shapes for f in families() if (f.op, f.direction) == (op, direction))
    return verdict(trials, policy.name, op, direction, policy.default(shapes[0]).family)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What serves one shape.

    Attributes:
        problem: the shape.
        candidate: the model's own; None leaves the default.
        estimate_us, default_us, runner_up_us: as in :class:`~attention_autotuner.tuning.predicted.PredictedPick`.
    """

    problem: Problem
    candidate: Candidate | None
    estimate_us: float
    default_us: float
    runner_up_us: float | None


def defaults_only(family: Family, policy: Policy) -> list[Choice]:
    """The choices where the model is not trusted: its times of the defaults."""
    choices = []
    for problem in family.shapes:
        us = estimate(problem, policy.default(problem), policy.spec).us
        choices.append(
            Choice(
                problem=problem, candidate=None, estimate_us=us, default_us=us, runner_up_us=None
            )
        )
    return choices


def twin(candidate: Candidate) -> Candidate:
    """The kernel that is built for a candidate: the same but, at most, for the order of its CTAs.

    Registers and spills are those of its twin, to a few: that order is arithmetic at a CTA's start.
    """
    knobs = candidate.knobs
    ordered = (ForwardKnobs, ForwardSm90Knobs, BackwardKnobs, BackwardSm90Knobs)
    if isinstance(knobs, ordered) and not getattr(knobs, "persistent", False):
        return replace(candidate, knobs=replace(knobs, cta_order="raster"))
    return candidate


@dataclass
class Contest:
    """The candidates of one family on one GPU, and what is known of them so far.

    Kernels that differ in the order of their CTAs alone (:func:`twin`) are built once.

    Attributes:
        times: candidate -> the model's time on each shape, infinite where it is not offered; after the compiler's
            report once it is known.
        built: the twins that were built.
        spilled: those of them that fell out, with the reason.
    """

    family: Family
    policy: Policy
    times: dict[Candidate, list[float]] = field(default_factory=dict)
    built: set[Candidate] = field(default_factory=set)
    spilled: dict[Candidate, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = self.family.shapes
        self.defaults = [self.policy.default(problem) for problem in shapes]
        offered = {problem: self._offered(problem) for problem in shapes}
        for anchor in shapes:
            ranked = rank(anchor, offered[anchor], self.policy.spec) if self._leads(anchor) else []
            for one, _ in ranked[:POOL]:
                self.times.setdefault(one, [])
        self.times |= {one: [] for one in self.defaults}
        for one, times in self.times.items():
            times += [
                estimate(problem, one, self.policy.spec).us if one in offered[problem] else inf
                for problem in shapes
            ]

    def _leads(self, problem: Problem) -> bool:
        """Whether a shape's best enter the pool: every other length, so that a pool takes seconds."""
        return problem.seqlen_q in (512, 2048, 8192)

    def _offered(self, problem: Problem) -> Mapping[Candidate, None]:
        """The legal candidates of the default's family; but for retention, the same on all shapes of a class."""
        if self.family.op == "retention" or not hasattr(self, "_legal"):
            family = self.defaults[0].family
            legal = [one for one in self.policy.legal(problem) if one.family == family]
            self._legal = dict.fromkeys([*legal, *self.defaults])
        return self._legal

    # --- choosing ---------------------------------------------------------------------------------

    def wanted(self) -> list[Candidate]:
        """What has to be built before the choice stands; nothing when it does."""
        cover, open_shapes = self._cover([c for c in self.times if twin(c) not in self.spilled])
        needed = [*cover, *(self.defaults[i] for i in open_shapes)]
        return [one for one in dict.fromkeys(map(twin, needed)) if one not in self.built]

    def learn(self, built: Candidate, report: Report | Outcome) -> None:
        """Take in what the compiler said of one of :meth:`wanted`."""
        self.built.add(built)
        if isinstance(report, Outcome):
            self.spilled[built] = str(report)
            return
        outcome = check_spills(built, report, timed=False)
        if not outcome.ok:
            self.spilled[built] = outcome.reason
        for one, times in self.times.items():
            if twin(one) == built:
                self.times[one] = [
                    inf if us == inf else refine(problem, one, self.policy.spec, report).us
                    for problem, us in zip(self.family.shapes, times, strict=True)
                ]

    def choices(self) -> list[Choice]:
        """What serves each shape: of what is built, the few that cover most, else the default."""
        usable = [c for c in self.times if twin(c) in self.built and twin(c) not in self.spilled]
        cover, _ = self._cover(usable)
        found = []
        for place, problem in enumerate(self.family.shapes):
            default = self.defaults[place]
            default_us = self.times[default][place]
            others = {one: self.times[one][place] for one in cover if one != default}
            own = min(others, key=lambda one: (others[one], one.name), default=None)
            gain = 0.0 if own is None else default_us / others[own]
            serving = own if chosen(gain) else None
            us = default_us if serving is None else others[serving]
            rest = [t for one, t in others.items() if one != serving and t < inf]
            rest += [] if serving is None else [default_us]
            found.append(
                Choice(
                    problem=problem,
                    candidate=serving,
                    estimate_us=us,
                    default_us=default_us,
                    runner_up_us=min(rest, default=None),
                )
            )
        return found

    def _cover(self, usable: Sequence[Candidate]) -> tuple[list[Candidate], list[int]]:
        """The candidates that cover the shapes where a default should go, and these shapes.

        Greedy: each covers the most shapes that none before it does, by what it loses there in all where two cover as
        many.
        """
        places = range(len(self.family.shapes))
        best = [min((self.times[one][i] for one in usable), default=inf) for i in places]
        open_shapes = [i for i in places if chosen(self.times[self.defaults[i]][i] / best[i])]
        left, cover = list(open_shapes), list[Candidate]()
        while left:
            built = {twin(one) for one in cover}
            free = [c for c in usable if len(built) < KERNELS or twin(c) in built]
            covered = {
                one: [i for i in left if self.times[one][i] <= NEAR * best[i]] for one in free
            }
            one = min(
                (one for one in free if one not in cover),
                key=lambda c: (-len(covered[c]), self._loss(c, open_shapes, best), c.name),
                default=None,
            )
            if one is None or not covered[one]:
                break
            cover.append(one)
            left = [i for i in left if i not in covered[one]]
        return cover, open_shapes

    def _loss(self, candidate: Candidate, places: Sequence[int], best: Sequence[float]) -> float:
        return sum(log(self.times[candidate][i] / best[i]) for i in places)
