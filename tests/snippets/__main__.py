"""Write the output of commands into their pages: python -m tests.snippets --write docs/cli.md

Every ``console`` block of the pages is run, and the lines below its prompts are replaced. A block with a line ``...``
or with a mark is left unchanged; ``--marked gpu`` runs the blocks with that mark instead. The table of settings is
written between its markers.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .pages import REPOSITORY, Block, blocks
from .running import at_home, run_commands
from .settings_table import markdown_table


def rewritten(block: Block) -> str:
    """The block with the present output of its commands."""
    lines = block.code.splitlines()
    text = []
    for command, printed in run_commands(block):
        at = command.line - block.line
        while True:
            text.append(lines[at])
            if not lines[at].endswith("\\"):
                break
            at += 1
        if printed:
            text += [line.rstrip() for line in printed.rstrip("\n").split("\n")]
    return "\n".join(text) + "\n"


def with_settings(text: str) -> str:
    """The text with the present table of settings between the markers."""
    markers = r"(<!-- settings: [^\n]*-->\n).*?(<!-- end of settings -->)"
    return re.sub(markers, lambda m: m[1] + markdown_table() + m[2], text, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages, or print which blocks are out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="change the pages")
    parser.add_argument(
        "--marked",
        default="",
        choices=("gpu", "slow", "varies"),
        help="only blocks with this mark",
    )
    parser.add_argument("--output", type=Path, help="write the pages to this folder instead")
    options = parser.parse_args(arguments)
    stale = 0
    for page in options.pages:
        path = (REPOSITORY / page).resolve()
        text = path.read_text(encoding="utf-8")
        for block in blocks(path):
            if (
                block.language != "console"
                or block.kind != options.marked
                or "\n...\n" in block.code
            ):
                continue
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name).resolve()
                with at_home(folder, cache=folder / ".cache" / "attention_autotuner"):
                    new = rewritten(block)
            if new != block.code:
                stale += 1
                text = text.replace(block.code, new, 1)
                print(f"{block.where}: the output has changed")
        if with_settings(text) != text:
            stale += 1
            text = with_settings(text)
            print(f"{page}: the table of settings has changed")
        if options.write or options.output:
            target = path if options.output is None else options.output / page.name
            target.write_text(text, encoding="utf-8")
    return 1 if stale and not (options.write or options.output) else 0


if __name__ == "__main__":
    sys.exit(main())
