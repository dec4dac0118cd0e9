"""The entry point: arguments in, an exit status out.

Exit status: 0 done; 1 it failed, and the message says why; 2 wrong usage; 130 stopped by Ctrl-C (what was found by then
is printed first).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from ..errors import AttentionAutotunerError
from . import bringing_up, caching, doctor, exporting, inspecting, making, recording, tuning
from .status import FAILED, INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="attention-autotuner",
        description="Generate, build, tune and explain attention kernels.",
        epilog="Settings come from ATTENTION_AUTOTUNER_* variables; `doctor` shows them.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for register in (
        inspecting.register_candidates,
        inspecting.register_render,
        making.register_build,
        tuning.register_tune,
        making.register_warmup,
        exporting.register_export,
        inspecting.register_why,
        caching.register_cache,
        recording.register_records,
        doctor.register_doctor,
        bringing_up.register_bring_up,
    ):
        register(commands)
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
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    return status
