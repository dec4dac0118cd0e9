"""The check of a built kernel: against fp32, twice the same, every element written, nothing beside the outputs.

What is asked of the reference is bounded: batch, heads and, where one head alone would be too much, sequence lengths
are reduced first (:func:`reduced`; remainders modulo the tile survive). Beside the problem itself two shapes of odd
length run, causal and not where both are possible, with enough heads for persistent kernels to loop. What differs
between directions is in :mod:`..operations.bindings`.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle
from pathlib import Path

import torch

from ..core.identity import digest16
from ..core.outcome import (
    Leaked,
    Nondeterministic,
    Ok,
    Outcome,
    Proof,
    Wrong,
)
from ..core.problem import Op, Problem
from ..errors import ArtifactError
from ..operations import shared
from ..operations.bindings import Binding, ways_of
from ..operations.registry import OPERATIONS
from ..operations.shared.bands import Bands
from ..operations.shared.compare import check
from ..operations.shared.tensors import Inputs, Shapes, same_bits
from ..serving.loader import KernelDescription
from .rounds import classify

MAX_SCORES = 1 << 28  # elements of all score matrices of one check; bounds the reference's time
TILE = 256  # seqlens are reduced by multiples of this, which every block_m and block_n up to it divides or nearly so
PACKED_ROWS, PACKED_SEQUENCES = 8192, 32  # of packed sequences
ODD_TILES_PER_SM = 6
REPEATS = 2  # launches on each input
RATIO_DIGITS = 4  # of an error over the error that is allowed


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The results of launches on the same inputs.

    Attributes:
        outputs: of each launch, by name.
        changed: what was written beside: the outputs, the workspace.
    """

    outputs: Sequence[Mapping[str, torch.Tensor]]
    changed: Sequence[str]


class Launcher(ABC):
    """A kernel that can be launched, see :class:`.remote.RemoteKernel`.

    Attributes:
        info: what it says of itself.
        gpu_name, num_sms: of the GPU that it runs on.
    """

    info: KernelDescription
    gpu_name: str
    num_sms: int

    @abstractmethod
    def launch(self, problem: Problem, inputs: Inputs, shapes: Shapes) -> Launched | Outcome:
        """Launch :data:`REPEATS` times, each time with outputs full of NaN; or the reason why that failed."""


def reduced(problem: Problem) -> Problem:
    """The same problem small enough to check: fewer batches and heads first, then shorter sequences."""
    group = problem.heads_q // problem.heads_kv
    if problem.packed:
        rows_q, rows_k = (min(rows, PACKED_ROWS) for rows in problem.packed_rows)
        return replace(
            problem,
            batch=min(problem.batch, PACKED_SEQUENCES),
            heads_q=min(group, 4),
            heads_kv=1,
            packed_rows=(rows_q, rows_k),
        )

    def cut(batch: int, heads_kv: int, group: int, seqlen: int) -> Problem:
        def shorten(length: int) -> int:
            return length if length < seqlen + TILE else seqlen + length % TILE

        return replace(
            problem,
            batch=batch,
            heads_kv=heads_kv,
            heads_q=heads_kv * group,
            seqlen_q=shorten(problem.seqlen_q),
            seqlen_k=shorten(problem.seqlen_k),
        )

    whole = max(problem.seqlen_q, problem.seqlen_k)
    steps = [
        (min(problem.batch, 2), min(problem.heads_kv, 2), min(group, 4), whole),
        (1, min(problem.heads_kv, 2), min(group, 2), whole),
        (1, 1, 1, whole),
    ]
    steps += [(1, 1, 1, seqlen) for seqlen in (16384, 8192, 4096) if seqlen < whole]
    for step in steps:
        small = cut(*step)
        seen = small.semantics.keys_scored(small)
        if small.heads_q * small.batch * small.seqlen_q * seen <= MAX_SCORES:
            return small
    return cut(1, 1, 1, 4096)


def variants(problem: Problem, *, block_m: int, block_n: int, num_sms: int) -> list[Problem]:
    """The problems that a kernel is verified on: the problem reduced, and what its operation adds of odd lengths."""
    heads, busy = 16, problem
    if problem.semantics.batched:
        busy = replace(
            problem,
            batch=max(1, ODD_TILES_PER_SM * num_sms // (3 * heads)),
            heads_q=heads,
            heads_kv=heads // 2,
        )
    odd = problem.semantics.verified_with(
        busy, seqlen_q=2 * block_m + 37, seqlen_k=3 * block_n + 13, fewer_keys=block_n + 5
    )
    return [reduced(problem), *odd]


def verify(
    problem: Problem,
    kernel: Launcher,
    *,
    deterministic: bool,
    device: torch.device,
    seeds: Sequence[int] = (0, 1),
) -> Outcome:
    """Check a kernel for a problem.

    Args:
        problem: what it will serve; reduced where it is too large to check whole.
        kernel: the kernel.
        deterministic: the kernel claims equal bits from equal inputs; of one that does not, both runs are held against
            the truth.
        device: of inputs and references.
        seeds: of the inputs.

    Returns:
        Ok with its proof, or Wrong, Nondeterministic, Leaked, LaunchFailed, OutOfMemory or Crashed with its reason.
    """
    info = kernel.info
    shapes = variants(problem, block_m=info.block_m, block_n=info.block_n, num_sms=kernel.num_sms)
    ways = ways_of(problem)
    shown = _Shown()
    try:
        for index, shape in enumerate(shapes):
            # Shifted by the shape, so that one seed alone tries every way, too.
            for seed, way in zip(seeds, cycle(ways[index % len(ways) :] + ways), strict=False):
                outcome = _Check(shape, way, seed, device).run(kernel, deterministic, shown)
                if not outcome.ok:
                    return outcome
    except (ArtifactError, RuntimeError) as error:
        return classify(error)
    return Ok(proof=shown.proof(problem.op, kernel.gpu_name))


@cache
def verifier_digest(op: Op) -> str:
    """Digest of what decides about an operation's kernels: the statements of this module and of the operation's.

    Comments, docstrings and layout take no part.
    """
    folders = [shared.__file__, OPERATIONS[op].module("inputs").__file__]
    files = [Path(__file__)]
    for initial in folders:
        assert initial is not None
        files += sorted(Path(initial).parent.glob("*.py"))
    return digest16(*(_statements(path) for path in files))


def _statements(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@dataclass
class _Shown:
    """The findings of the checks so far; attributes as :class:`.Proof` has them."""

    checks: list[str] = field(default_factory=list)
    same_bits: bool = True
    ratios: dict[str, float] = field(default_factory=dict)

    def proof(self, op: Op, gpu_name: str) -> Proof:
        """The proof that they are."""
        return Proof(
            verifier=verifier_digest(op),
            gpu_name=gpu_name,
            checks=tuple(self.checks),
            repeats=REPEATS,
            same_bits=self.same_bits,
            ratios={name: float(f"{x:.{RATIO_DIGITS}g}") for name, x in self.ratios.items()},
        )


class _Check:
    """One shape, called one way, on one input."""

    def __init__(self, problem: Problem, way: Binding, seed: int, device: torch.device) -> None:
        self._problem = problem
        self._way = way
        self._inputs = way.inputs(problem, seed=seed, device=device)
        self._where = f"{problem.describe()}{way.note}, seed {seed}"

    def run(self, kernel: Launcher, deterministic: bool, shown: _Shown) -> Outcome:
        """Launch twice, look beside the outputs and the workspaces, compare; what that shows is added."""
        shapes = self._way.output_shapes(self._problem)
        launched = kernel.launch(self._problem, self._inputs, shapes)
        if isinstance(launched, Outcome):
            return launched
        if launched.changed:
            return Leaked(reason=f"bytes beside {launched.changed[0]} changed for {self._where}")
        first, second = launched.outputs
        same = all(same_bits(first[name], second[name]) for name in first)
        if deterministic and not same:
            return Nondeterministic(reason=f"two runs on the same input differ for {self._where}")
        for name, ref, low in self._way.references(self._problem, self._inputs):
            bands = Bands.of(self._problem, name, ref.dim())
            for outputs in launched.outputs[:1] if same else launched.outputs:
                comparison = check(outputs[name], ref, low, bands)
                if not comparison.ok:
                    return Wrong(reason=f"{name}: {comparison.reason} for {self._where}")
                shown.ratios[name] = max(shown.ratios.get(name, 0.0), comparison.ratio)
        shown.checks.append(self._where)
        shown.same_bits &= same
        return Ok()
