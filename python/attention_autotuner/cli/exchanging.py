"""The commands ``records export``, ``merge`` and ``import``: records from one machine to another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..settings import current
from ..tuning.exchange import Refused, read_records, take_in, write_records
from ..tuning.records import RecordStore
from .console import print_json, print_line
from .options import FAILED, OK, command
from .recording import add_optional_pattern, chosen


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the file to write."""
    words = "file to write, compressed if its name ends in .gz or .xz"
    parser.add_argument("output", metavar="OUTPUT", type=Path, help=words)


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the files to read."""
    words = "files that `records export` or `records merge` wrote"
    parser.add_argument("inputs", metavar="FILE", nargs="+", type=Path, help=words)


def _end(
    arguments: argparse.Namespace, did: str, count: int, refused: Sequence[Refused] = ()
) -> int:
    """Say how many records it was, and which were refused."""
    if arguments.json:
        print_json({"records": count, "refused": [asdict(item) for item in refused]})
    else:
        for item in refused:
            print_line(f"refused {item.place}: {item.reason}")
        print_line(f"{did} {count} records")
    return FAILED if refused else OK


@command("records export", add_output, add_optional_pattern)
def run_export(arguments: argparse.Namespace) -> int:
    """Write records to a file, for another machine."""
    records = [kept.record for _, kept in chosen(arguments) if kept.record is not None]
    write_records(arguments.output, records)
    return _end(arguments, "wrote", len(records))


@command("records merge", add_output, add_inputs)
def run_merge(arguments: argparse.Namespace) -> int:
    """Make one file of several; the later measured pick of a problem wins."""
    records, refused = read_records(arguments.inputs)
    write_records(arguments.output, records)
    return _end(arguments, "wrote", len(records), refused)


@command("records import", add_inputs)
def run_import(arguments: argparse.Namespace) -> int:
    """Take records of other machines into the cache, beside those that are there."""
    records, refused = read_records(arguments.inputs)
    changed = take_in(RecordStore(current().cache_dir / "records"), records)
    return _end(arguments, "took in", changed, refused)
