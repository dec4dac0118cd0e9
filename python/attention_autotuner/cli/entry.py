"""The entry point: arguments in, an exit status out.

Exit status: 0 done; 1 it failed, and the message says why; 2 wrong usage; 130 stopped by Ctrl-C, SIGTERM or SIGHUP
(searches print the best so far first).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import AttentionAutotunerError, NoKernelError, ProblemFileError
from ..version import __version__
from . import (  # noqa: F401  # they name the commands
    bringing_up,
    caching,
    doctor,
    exchanging,
    exporting,
    inspecting,
    making,
    modelling,
    proving,
    recording,
    reporting,
    tuning,
)
from .console import full_tables
from .options import COMMANDS, FAILED, INTERRUPTED, USAGE, Parser, add_command, in_flags

PROGRAM = "attention-autotuner"
# In the list of commands; a group has a command for each of its actions.
ORDER = "candidates render build tune bucket warmup export why report model cache records doctor bring-up"
GROUPS = {
    "model": (
        "learn from measured searches",
        "Teach the cost model what measured searches say.",
    ),
    "cache": (
        "list, remove, verify or clean up built kernels and records",
        "Manage the folder of built kernels and tuning records.",
    ),
    "records": (
        "list, show, verify, remove, rekey, prove or exchange tuning records",
        "Look after tuning records: your own, or with --shipped or --file those of a file of shipped picks.",
    ),
}


def make_parser() -> Parser:
    """The parser of the whole command."""
    parser = Parser(
        prog=PROGRAM,
        description="Generate, build, tune and explain attention kernels.",
        epilog="Settings come from ATTENTION_AUTOTUNER_* variables; `doctor` shows them.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in ORDER.split():
        if name in COMMANDS:
            add_command(commands, name)
            continue
        line, description = GROUPS[name]
        group = commands.add_parser(name, help=line, description=description)
        actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
        for action in COMMANDS:
            if action.startswith(f"{name} "):
                add_command(actions, action)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; None takes ``sys.argv``.

    Returns:
        The exit status.
    """
    parsed = make_parser().parse_args(arguments)
    try:
        with full_tables(parsed.full), interrupted_by_signals():
            status: int = parsed.run(parsed)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (| head). Python would complain once more while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (AttentionAutotunerError, OSError) as error:
        # OSError: a folder that the caller named cannot be written; its text names the path.
        if parsed.json:
            failure = {"type": type(error).__name__, "message": str(error)}
            print(json.dumps({"error": failure}))
        in_file = isinstance(error, ProblemFileError)  # whose fields are no options
        said = str(error) if in_file else in_flags(str(error), parsed)
        print(f"error: {said}", file=sys.stderr)
        wrong = in_file or isinstance(error, NoKernelError) or getattr(parsed, "wrong_usage", False)
        return USAGE if wrong else FAILED
    return status


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Inside the block, SIGTERM and SIGHUP end a command as Ctrl-C does: its compilers are stopped, too."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()
    caught = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if here and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in caught:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
