"""Options that commands share: how a problem, a GPU and candidates are named, and how wrong usage is reported."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..arch import Policy, names
from ..core.candidate import Candidate
from ..core.modifications import VALUED
from ..core.operation import require
from ..core.problem import (
    CAUSAL_ALIGNMENTS,
    DIRECTIONS,
    DTYPES,
    FORMS,
    MASKS,
    OPERANDS,
    Problem,
    operations,
)
from ..core.problem_fields import dtype_name, problem_of_fields
from ..errors import NoCandidateError, UnsupportedProblemError
from ..kernels.cost_model import Estimate, rank
from ..serving.untuned import read_problems
from ..tuning.step import problems_of_step
from .names import short_names

Commands = Any  # argparse keeps the type of its sub-parsers private
Run = Callable[[argparse.Namespace], int]
Adder = Callable[[argparse.ArgumentParser], object]
"""Adds some options of a command to its parser."""
Ranked = list[tuple[Candidate, Estimate]]

OK, FAILED, USAGE = 0, 1, 2  # exit statuses
INTERRUPTED = 130  # as a shell reports SIGINT

STEP = "step"  # as a direction: both of them
SHOWN = 20  # rows of a table for people, unless --limit says otherwise
# The options whose fields of Problem, or arguments of functions, have other names.
FLAGS = {"heads_q": "--heads", "seqlen_q": "--seqlen", "device_type": "--device-type"}
# The fields of Problem that an option of the same name fills as it is.
SAME_NAMES = (
    *("op", "form", "dtype", "batch", "dim_qk", "causal_alignment", "alignment_bytes"),
    *("deterministic", "key_bounds", "operands", "documents"),
)
# Options that say how one problem, or one step, is searched.
OF_ONE = ("effort", "top_k", "no_confirm", "backward_budget")

_DEFAULT = Problem()
# Fields of one word that messages open with or name beside others; elsewhere they are plain English.
_WORDS = ("form", "operands", "documents", "modifications", "batch", "mask", "dtype", "direction")
_OTHER_GPU = "; name the architecture instead, e.g. device_type='A100'"  # of an error without a GPU
COMMANDS: dict[str, tuple[Run, tuple[Adder, ...]]] = {}
"""Name -> what it does and what adds its options, in the order of the modules."""


class _Help(argparse.HelpFormatter):
    """Help that ends with an option's default, where there is one that is not said."""

    def _get_help_string(self, action: argparse.Action) -> str:
        said = action.help or ""
        silent = action.default in (None, False, [], argparse.SUPPRESS) or "default" in said
        return said if silent else (said and f"{said}; ") + "default: %(default)s"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a short line of usage and the error, and whose values may begin with a minus."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})
        # Else -1,0 is taken for an option; no option here begins with a digit.
        self._negative_number_matcher = re.compile(r"-\d")

    def error(self, message: str) -> NoReturn:
        """Print the error and end the program with status 2."""
        print(f"usage: {self.prog} ...; {self.prog} --help lists the options", file=sys.stderr)
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(USAGE)


def command(name: str, *options: Adder) -> Callable[[Run], Run]:
    """A decorator that makes a function a command, or with two words an action of one.

    Args:
        name: the words that call it.
        options: each adds some of its options.

    The docstring's first paragraph is the line for the list of commands, the second its own help; without a second
    one, the first is both. The function takes the arguments and returns the exit status.
    """

    def register(run: Run) -> Run:
        COMMANDS[name] = (run, options)
        return run

    return register


def add_command(commands: Commands, name: str) -> None:
    """Add one of :data:`COMMANDS`, with the options for its output, to a parser's commands or a command's actions."""
    run, options = COMMANDS[name]
    text, *more = (inspect.getdoc(run) or "").split("\n\n")
    line = text[:1].lower() + text[1:].removesuffix(".")
    parser: Parser = commands.add_parser(
        name.split()[-1], help=line, description=more[0] if more else text
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument(
        "--full", action="store_true", help="tables with every column, full names and whole lines"
    )
    parser.set_defaults(run=run, usage_error=parser.error)
    for add in options:
        add(parser)


class Usual(int):
    """A default that another operation may have another of, so that it is no field that was given."""


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def length(text: str) -> int:
    """An argparse type: an integer, such as ``4096`` or ``4k``."""
    match = re.fullmatch(r"(-?\d+)(k?)", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be an integer such as 4096 or 4k, got {text!r}")
    return int(match[1]) * (1024 if match[2] else 1)


def window(text: str, such: str = "1023,0") -> tuple[int, int]:
    """An argparse type: two integers with a comma between, each as :func:`length` takes it."""
    left, comma, right = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"must be two integers such as {such}, got {text!r}")
    return length(left), length(right)


def rows(text: str) -> tuple[int, int]:
    """An argparse type: rows of q and k with a comma between."""
    return window(text, "17000,17000")


def names_of(text: str) -> tuple[str, ...]:
    """An argparse type: names with commas between."""
    return tuple(name.strip() for name in text.split(","))


def dtype(text: str) -> str:
    """An argparse type: a dtype by our name or PyTorch's."""
    return str(dtype_name(text))


def seconds(text: str) -> float:
    """An argparse type: a positive number of seconds."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return value


def option(*names: str, **settings: Any) -> Adder:
    """An adder of one option, as :meth:`argparse.ArgumentParser.add_argument` takes it."""
    return lambda parser: parser.add_argument(*names, **settings)


add_jobs = option(
    "--jobs",
    type=positive,
    metavar="N",
    help="compiler processes at a time; default: ATTENTION_AUTOTUNER_JOBS",
)
add_limit = option("--limit", type=positive, default=SHOWN, metavar="N", help="rows to print")


def add_problem(parser: argparse.ArgumentParser, *, step: bool = False) -> None:
    """Add the options that name a problem and a GPU.

    Args:
        parser: the command's.
        step: the command takes both directions of a shape at once, too.
    """
    option = parser.add_argument_group("problem").add_argument
    option("--op", choices=operations(), help="the operation")
    directions = (*DIRECTIONS, STEP) if step else DIRECTIONS
    words = f"{STEP}: forward and backward of one shape" if step else "the pass"
    option("--direction", choices=directions, help=words)
    words = f"{', '.join(names())}, or the present GPU's name; default: the present GPU"
    option("--device-type", metavar="GPU", help=words)
    option("--dtype", type=dtype, choices=DTYPES, help="or float16, bfloat16")
    option("--batch", type=int, metavar="N", help="sequences")
    option("--heads", type=int, metavar="N", help="heads of the queries")
    option("--heads-kv", type=int, metavar="N", help="default: as --heads")
    option("--seqlen", type=length, metavar="N", help="4k is 4096")
    option("--seqlen-k", type=length, metavar="N", help="default: as --seqlen")
    option("--dim-qk", type=int, metavar="N", help="head dim of Q and K")
    option("--dim-v", type=int, metavar="N", help="default: as --dim-qk")
    words = "of retnet: a tensor, or powers of gamma that are never stored; default: explicit"
    option("--mask", choices=[mask for mask in MASKS if mask != "none"], help=words)
    option("--form", choices=FORMS, help="how retention's forward pass is computed")
    option(
        "--causal", action="store_true", help="causal mask; always on for retention and decay masks"
    )
    words = "the corner of the scores that the causal mask starts from"
    option("--causal-alignment", choices=CAUSAL_ALIGNMENTS, help=words)
    words = "2 for tensors whose pointers or strides are not multiples of 16 bytes"
    option("--alignment-bytes", type=int, choices=(16, 2), help=words)
    words = "backward kernels whose results agree bit for bit between runs only"
    option("--deterministic", action="store_true", help=words)
    words = "of attention forward: seqlens_k or starts_k, the keys of every batch entry"
    option("--key-bounds", action="store_true", help=words)
    words = "of attention: keys before and after the diagonal, such as 1023,0; -1 for no bound; default: -1,-1"
    option("--window-size", type=window, metavar="LEFT,RIGHT", help=words)
    words = f"of attention: what modifies its scores, of {', '.join(VALUED)}; default: nothing"
    option("--modifications", type=names_of, metavar="NAMES", help=words)
    words = "of attention, retention: rows of q and k in all packed sequences, --batch of up to --seqlen; default: none"
    option("--packed-rows", type=rows, metavar="ROWS_Q,ROWS_K", help=words)
    words = "of attention with document_ids: documents of a sequence; default: one in 1024 rows"
    option("--documents", type=positive, metavar="N", help=words)
    words = "of gemm: n for a factor that lies by rows, t for one by columns"
    option("--operands", choices=OPERANDS, help=words)
    usual = {name: getattr(_DEFAULT, name) for name in ("direction", *SAME_NAMES)}
    usual |= {"batch": Usual(_DEFAULT.batch), "heads": Usual(_DEFAULT.heads_q)}
    parser.set_defaults(**usual, seqlen=_DEFAULT.seqlen_q)


add_step = partial(add_problem, step=True)


def defaults_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The options so far that say what is wanted of one problem, by their defaults."""
    kept = ("json", "full", "run", "usage_error", "device_type", "budget")
    return {name: value for name, value in vars(parser.parse_args([])).items() if name not in kept}


def add_problems(parser: argparse.ArgumentParser) -> None:
    """Add an option that names a file of problems, in place of the options so far but for some."""
    parser.set_defaults(replaced=defaults_of(parser))
    words = "problems as JSON, one on each line or a list, e.g. what ATTENTION_AUTOTUNER_UNTUNED_LOG wrote"
    parser.add_argument("--problems", type=Path, metavar="FILE", help=words)


def listed_problems(arguments: argparse.Namespace) -> list[Problem] | None:
    """The problems of the file that the options name; None without one.

    Raises:
        ProblemFileError: the file holds something else.
    """
    if arguments.problems is None:
        return None
    changed = [
        name for name, value in arguments.replaced.items() if getattr(arguments, name) != value
    ]
    for refused, reason in (
        ([name for name in changed if name not in OF_ONE], "--problems names the problems"),
        (
            [name for name in changed if name in OF_ONE],
            "--budget alone limits the search of a list",
        ),
    ):
        if refused:
            flags = ", ".join("--" + name.replace("_", "-") for name in refused)
            arguments.usage_error(f"{reason}; leave out {flags}")
    return read_problems(arguments.problems)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose among a problem's candidates."""
    group = parser.add_argument_group("which candidates").add_mutually_exclusive_group()
    option, words = group.add_argument, "by name, short or full; repeatable"
    option("--candidate", action="append", metavar="NAME", help=words)
    option("--count", type=positive, metavar="N", help="the best N; default: 1")
    option("--default", action="store_true", help="the one that serves while nothing is tuned")


def problem_of(arguments: argparse.Namespace) -> Problem:
    """The problem that the options name; of a step, the backward one.

    Raises:
        UnsupportedProblemError: it is outside what kernels here solve, which is noted as wrong usage.
    """
    try:
        return _problem_of(arguments)
    except UnsupportedProblemError:
        arguments.wrong_usage = True
        raise


def _problem_of(a: argparse.Namespace) -> Problem:
    fields = {
        **{name: getattr(a, name) for name in SAME_NAMES},
        "direction": "backward" if a.direction == STEP else a.direction,
        "mask": a.mask,
        "heads_q": a.heads,
        "heads_kv": a.heads_kv,
        "seqlen_q": a.seqlen,
        "seqlen_k": a.seqlen_k,
        "dim_v": a.dim_v,
        "causal": a.causal or None,
        "window_size": a.window_size,
        "packed_rows": a.packed_rows,
        "modifications": a.modifications,
    }
    problem = problem_of_fields(
        {n: v for n, v in fields.items() if v is not None and not isinstance(v, Usual)}
    )
    for count, longest in zip(
        problem.packed_rows, (problem.seqlen_q, problem.seqlen_k), strict=True
    ):
        require(
            count <= problem.batch * longest,
            f"packed_rows must be at most batch times seqlen_q and seqlen_k, {problem.batch} sequences of "
            f"{longest}, got {count}",
        )
    return problem


def problems_of(arguments: argparse.Namespace) -> tuple[Problem, ...]:
    """The problems that the options name: one, or both of a step.

    Raises:
        UnsupportedProblemError: outside what kernels here solve.
    """
    problem = problem_of(arguments)
    return problems_of_step(problem) if arguments.direction == STEP else (problem,)


def nothing_matches(pattern: str, what: str) -> int:
    """Say on stderr that a pattern names nothing; the exit status."""
    print(f"error: no {what} matches {pattern!r}", file=sys.stderr)
    return FAILED


def chosen(arguments: argparse.Namespace, problem: Problem, policy: Policy) -> Ranked:
    """The candidates that the options choose, with their estimates.

    Raises:
        NoCandidateError: a name is not a legal candidate of this problem on this GPU.
    """
    ranked = rank(problem, policy.served(problem), policy.spec)
    wanted = [policy.untuned(problem).name] if arguments.default else arguments.candidate
    if not wanted:
        return ranked[: arguments.count or 1]
    by_name = {short_names(entry[0].name): entry for entry in ranked}
    by_name |= {entry[0].name: entry for entry in ranked}
    for name in wanted:
        if name not in by_name:
            raise NoCandidateError(
                f"{name!r} is not one of the {len(ranked)} legal candidates for "
                f"{problem.describe()} on {policy.name}; `candidates` lists them"
            )
    return [by_name[name] for name in wanted]


def in_flags(message: str, arguments: argparse.Namespace) -> str:
    """An error's text with a command's options in place of the arguments of functions.

    ``dim_qk must be`` becomes ``--dim-qk must be``, and ``device_type='A100'`` becomes ``--device-type A100``.
    """
    if not hasattr(arguments, "device_type"):
        alone = "; this command works on the GPU of this machine alone"
        of_file = "; --properties FILE describes another GPU"
        dry = getattr(arguments, "dry_run", False)
        message = message.replace(_OTHER_GPU, of_file if dry else alone)
    fields = set(FLAGS) | {name for name in asdict(_DEFAULT) if "_" in name}
    flags = {name: FLAGS.get(name, "--" + name.replace("_", "-")) for name in fields}
    for name, flag in flags.items():
        if hasattr(arguments, flag.removeprefix("--").replace("-", "_")):
            message = re.sub(rf"\b{name}='?([\w.]+)'?", rf"{flag} \1", message)
            message = re.sub(rf"(?<![\w.-]){name}\b", flag, message)
    for name in _WORDS:
        if hasattr(arguments, name):
            message = re.sub(
                rf"(?<![\w.-]){name}(?= must| is|=|, --| times --)", f"--{name}", message
            )
    return message
