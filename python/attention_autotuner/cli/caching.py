"""The command ``cache``: what is built and remembered, and how to get rid of it."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import asdict

from ..codegen.entries import Entry
from ..codegen.store import default_store
from ..settings import current
from ..tuning.records import RecordStore
from .console import named, print_json, print_line, print_table
from .names import short_names
from .options import FAILED, OK, command, nothing_matches, option

UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
DAY_SECONDS = 86400.0


def size(text: str) -> int:
    """An argparse type: a number of bytes, such as ``500M`` or ``2G``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 500M or 2G, got {text!r}")
    return int(float(match[1]) * UNITS[match[2].upper()])


def days(text: str) -> float:
    """An argparse type: a number of days, at least 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of days, got {text}")
    return value


WORDS = "shell pattern of a candidate's name, short or full, e.g. '*_d128x128_*'"
add_pattern = option("pattern", metavar="PATTERN", help=WORDS)
add_size = option("--max-size", type=size, metavar="SIZE", help="keep at most this, e.g. 2G")
add_age = option(
    "--max-age-days", type=days, metavar="DAYS", help="remove kernels unused for longer"
)


def entry_json(entry: Entry) -> dict[str, object]:
    """One kernel of the store, for ``--json``."""
    return asdict(entry) | {"path": str(entry.path)}


def print_entries(title: str, entries: list[Entry]) -> None:
    """Print kernels of the store as a table."""
    now = time.time()
    rows = []
    for entry in entries:
        figures = f"{entry.size_bytes / 1024:,.0f}", f"{(now - entry.last_used) / DAY_SECONDS:.1f}"
        rows.append([entry.state, entry.name, entry.digest16, *figures])
    print_table(title, ["state", "candidate", "digest", "KiB", "days unused"], rows)


@command("cache ls")
def run_ls(arguments: argparse.Namespace) -> int:
    """List kernels and records."""
    root = current().cache_dir
    entries = default_store().ls()
    records = [
        {"path": str(path), "problem": record.problem.describe()}
        | {"gpu": record.environment.gpu_name}
        | {name: getattr(record, name) for name in ("purpose", "arch", "pick", "confirmed")}
        for path, record in RecordStore(root / "records").records()
    ]
    if arguments.json:
        kernels = [entry_json(entry) for entry in entries]
        print_json({"root": str(root), "kernels": kernels, "records": records})
        return OK
    total = sum(entry.size_bytes for entry in entries)
    print_entries(f"{root}: {len(entries)} kernels, {total / 1024**2:,.1f} MiB", entries)
    shown = ("problem", "purpose", "arch", "gpu", "pick")
    rows = [[named(str(record[name] or "-")) for name in shown] for record in records]
    print_table(f"{len(rows)} records", ["problem", "tuned for", "policy", "GPU", "pick"], rows)
    return 0


@command("cache rm", add_pattern)
def run_rm(arguments: argparse.Namespace) -> int:
    """Remove kernels by name."""
    removed = default_store().rm(arguments.pattern, short_names)
    if arguments.json:
        print_json({"removed": [entry_json(entry) for entry in removed]})
    else:
        print_entries(f"{len(removed)} removed", removed)
    return OK if removed else nothing_matches(arguments.pattern, "kernel")


@command("cache verify")
def run_verify(arguments: argparse.Namespace) -> int:
    """Check every kernel against its checksum; damaged ones are set aside."""
    store = default_store()
    damaged = store.verify()
    checked = len(damaged) + sum(entry.state == "built" for entry in store.ls())
    if arguments.json:
        said = [entry_json(entry) | {"reason": reason} for entry, reason in damaged]
        print_json({"checked": checked, "damaged": said})
    else:
        for entry, reason in damaged:
            print_line(f"{entry.path}: {reason}; set aside, the next use builds it again")
        print_line(f"{checked} kernels checked, {len(damaged)} damaged")
    return FAILED if damaged else OK


@command("cache gc", add_size, add_age)
def run_gc(arguments: argparse.Namespace) -> int:
    """Remove damaged kernels, leftovers, and what is over a limit."""
    age = None if arguments.max_age_days is None else arguments.max_age_days * DAY_SECONDS
    removed = default_store().gc(max_bytes=arguments.max_size, max_age_seconds=age)
    freed = sum(entry.size_bytes for entry in removed)
    if arguments.json:
        print_json({"removed": [entry_json(entry) for entry in removed], "freed_bytes": freed})
    else:
        print_entries(f"{len(removed)} removed, {freed / 1024**2:,.1f} MiB freed", removed)
    return 0
