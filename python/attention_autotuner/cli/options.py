"""Options that commands share: how a problem, a GPU and candidates are named."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from ..arch import Policy, names, resolve
from ..core.candidate import Candidate
from ..core.problem import (
    CAUSAL_ALIGNMENTS,
    DIRECTIONS,
    DTYPES,
    FORMS,
    MASKS,
    Mask,
    Problem,
    operations,
)
from ..errors import NoCandidateError
from ..kernels.cost_model import Estimate, rank
from ..operations.registry import OPERATIONS
from ..tuning.step import problems_of_step

Commands = Any  # argparse keeps the type of its sub-parsers private
Ranked = list[tuple[Candidate, Estimate]]

STEP = "step"  # as a direction: both of them

_DEFAULT = Problem()


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def seconds(text: str) -> float:
    """An argparse type: a positive number of seconds."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return value


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def add_problem(parser: argparse.ArgumentParser, *, step: bool = False) -> None:
    """Add the options that name a problem and a GPU.

    Args:
        parser: the command's.
        step: the command takes both directions of a shape at once, too.
    """
    group = parser.add_argument_group("problem")
    group.add_argument("--op", choices=operations(), default=_DEFAULT.op)
    group.add_argument(
        "--direction",
        choices=(*DIRECTIONS, STEP) if step else DIRECTIONS,
        default=_DEFAULT.direction,
        help=f"{STEP}: forward and backward of one shape" if step else None,
    )
    group.add_argument(
        "--device-type",
        metavar="GPU",
        help=f"{', '.join(names())}, or the name of the GPU that is present; default: that GPU",
    )
    group.add_argument("--dtype", choices=DTYPES, default=_DEFAULT.dtype)
    group.add_argument("--batch", type=int, default=_DEFAULT.batch, metavar="N")
    group.add_argument("--heads", type=int, default=_DEFAULT.heads_q, metavar="N")
    group.add_argument("--heads-kv", type=int, metavar="N", help="default: as --heads")
    group.add_argument("--seqlen", type=int, default=_DEFAULT.seqlen_q, metavar="N")
    group.add_argument("--seqlen-k", type=int, metavar="N", help="default: as --seqlen")
    group.add_argument("--dim-qk", type=int, default=_DEFAULT.dim_qk, metavar="N")
    group.add_argument("--dim-v", type=int, metavar="N", help="default: as --dim-qk")
    group.add_argument(
        "--mask",
        choices=[mask for mask in MASKS if mask != "none"],
        help="of retnet: a tensor, or powers of gamma that are never stored; default: explicit",
    )
    group.add_argument(
        "--form",
        choices=FORMS,
        default=_DEFAULT.form,
        help="of retention forward; default: whichever is fastest",
    )
    group.add_argument("--causal", action="store_true", help="a decay and retention always are")
    group.add_argument(
        "--causal-alignment", choices=CAUSAL_ALIGNMENTS, default=_DEFAULT.causal_alignment
    )
    group.add_argument(
        "--alignment-bytes",
        type=int,
        choices=(16, 2),
        default=_DEFAULT.alignment_bytes,
        help="2 for tensors whose pointers or strides are not multiples of 16 bytes",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="backward kernels whose results agree bit for bit between runs only",
    )


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose among a problem's candidates."""
    group = parser.add_argument_group("which candidates")
    exclusive = group.add_mutually_exclusive_group()
    exclusive.add_argument(
        "--candidate",
        action="append",
        metavar="NAME",
        help="by name, as `candidates --json` lists them; may be repeated",
    )
    exclusive.add_argument(
        "--count", type=positive, metavar="N", help="the best N by the cost model (1)"
    )
    exclusive.add_argument(
        "--default", action="store_true", help="the one that serves while nothing is tuned"
    )


def problem_of(arguments: argparse.Namespace) -> Problem:
    """The problem that the options name; of a step, the backward one.

    Raises:
        UnsupportedProblemError: it is outside what kernels here solve.
    """
    a = arguments
    semantics = OPERATIONS[a.op].semantics
    mask: Mask = a.mask or semantics.default_mask
    return Problem(
        op=a.op,
        direction="backward" if a.direction == STEP else a.direction,
        mask=mask,
        form=a.form,
        dtype=a.dtype,
        batch=a.batch,
        heads_q=a.heads,
        heads_kv=a.heads if a.heads_kv is None else a.heads_kv,
        seqlen_q=a.seqlen,
        seqlen_k=a.seqlen if a.seqlen_k is None else a.seqlen_k,
        dim_qk=a.dim_qk,
        dim_v=a.dim_qk if a.dim_v is None else a.dim_v,
        causal=a.causal or semantics.is_causal(mask),
        causal_alignment=a.causal_alignment,
        alignment_bytes=a.alignment_bytes,
        deterministic=a.deterministic,
    )


def problems_of(arguments: argparse.Namespace) -> tuple[Problem, ...]:
    """The problems that the options name: one, or both of a step.

    Raises:
        UnsupportedProblemError: outside what kernels here solve.
    """
    problem = problem_of(arguments)
    return problems_of_step(problem) if arguments.direction == STEP else (problem,)


def policy_of(arguments: argparse.Namespace) -> Policy:
    """The policy that ``--device-type`` names.

    Raises:
        UnsupportedArchitectureError: the name is unknown, or there is none and no GPU either.
    """
    return resolve(arguments.device_type)


def chosen(arguments: argparse.Namespace, problem: Problem, policy: Policy) -> Ranked:
    """The candidates that the options choose, with their estimates.

    Raises:
        NoCandidateError: a name is not a legal candidate of this problem on this GPU.
    """
    ranked = rank(problem, policy.legal(problem), policy.spec)
    if arguments.default:
        wanted = [policy.default(problem).name]
    elif arguments.candidate:
        wanted = arguments.candidate
    else:
        return ranked[: arguments.count or 1]
    by_name = {candidate.name: (candidate, estimate) for candidate, estimate in ranked}
    for name in wanted:
        if name not in by_name:
            raise NoCandidateError(
                f"{name!r} is not one of the {len(by_name)} legal candidates for "
                f"{problem.describe()} on {policy.name}; `candidates --json` lists them"
            )
    return [by_name[name] for name in wanted]


def problem_json(problem: Problem) -> dict[str, Any]:
    """A problem as JSON-ready fields."""
    return asdict(problem)
