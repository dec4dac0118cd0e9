"""The command ``records``: what was measured, whether it still holds, and carrying it over a change of the source."""

from __future__ import annotations

import argparse
import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from ..codegen.store import default_store
from ..codegen.toolchain import find_disassembler, find_toolchain
from ..errors import RecordError, ToolchainError
from ..settings import current
from ..tuning.record_schema import CandidateEntry, TuningRecord
from ..tuning.records import KeptRecord, RecordStore
from ..tuning.rekeying import Codes, Rekeyed, build_codes, rekey, wanted
from ..tuning.shipped import SUFFIX, RecordPlace, ShippedPicks
from ..tuning.validity import Miss, built_here, check
from .console import (
    ROOMY,
    is_narrow,
    microseconds,
    named,
    print_json,
    print_line,
    print_table,
    progress,
    ratio,
)
from .options import FAILED, add_jobs, command, nothing_matches, option


def add_pattern(parser: argparse.ArgumentParser, **needed: Any) -> None:
    """Add the records that are meant, and where they are."""
    words = "shell pattern of a problem or of a pick's name, e.g. '*bf16*causal'"
    parser.add_argument("pattern", metavar="PATTERN", help=words, **needed)
    place = parser.add_mutually_exclusive_group().add_argument
    place("--shipped", action="store_true", help="the picks that come with the package")
    place("--file", type=Path, help="the picks of a file <gpu>.jsonl")


add_optional_pattern = partial(add_pattern, nargs="?", default="*")
# Columns of `records show`; those for which narrow terminals have no room.
ENTRIES = ("", "candidate", "outcome", "measured us", "of best")
EVIDENCE = ("proof", "source", "code")
EVERY = "every entry that was timed, not only pick and default"
add_all = option("--all", action="store_true", help=EVERY)


def places(arguments: argparse.Namespace) -> Iterator[RecordPlace]:
    """The places to look at.

    Raises:
        RecordError: the file that was named does not exist.
    """
    if arguments.file is not None:
        if not arguments.file.is_file():
            raise RecordError(f"there is no file {arguments.file}")
        yield ShippedPicks(arguments.file)
    elif arguments.shipped:
        for source in sorted(
            files("attention_autotuner.tuned").iterdir(), key=lambda item: item.name
        ):
            if source.name.endswith(SUFFIX):
                with as_file(source) as path:
                    yield ShippedPicks(path)
    else:
        yield RecordStore(current().cache_dir / "records")


def matching(place: RecordPlace, pattern: str) -> list[KeptRecord]:
    """The records of a place whose problem or pick matches a shell pattern."""
    return [
        kept
        for kept in place.kept()
        if fnmatch.fnmatchcase(kept.problem, pattern)
        or (kept.record is not None and fnmatch.fnmatchcase(kept.record.pick, pattern))
    ]


def chosen(arguments: argparse.Namespace) -> Iterator[tuple[RecordPlace, KeptRecord]]:
    """The records that the arguments name, each with its place."""
    for place in places(arguments):
        for kept in matching(place, arguments.pattern):
            yield place, kept


def summary(kept: KeptRecord) -> dict[str, Any]:
    """One record, for ``--json``."""
    said: dict[str, Any] = {"key": kept.key, "problem": kept.problem}
    record = kept.record
    if record is None:
        return said | {"pick": None, "reason": kept.reason}
    same = ("purpose", "arch", "pick", "default", "confirmed")
    said |= {name: getattr(record, name) for name in same}
    timing = record.picked.measurement
    return said | {
        "gpu": record.environment.gpu_name,
        "kernel": record.candidate.kernel,
        "median_us": timing and timing.median_us,
        "entries": len(record.entries),
        "ties": list(record.ties),
        "proven": record.picked.proof is not None,
        "reason": kept.reason,
    }


@command("records ls", add_optional_pattern)
def run_ls(arguments: argparse.Namespace) -> int:
    """List records and their picks."""
    said = [summary(kept) for _, kept in chosen(arguments)]
    if arguments.json:
        print_json({"records": said})
        return 0
    rows = []
    for item in said:
        place = [str(item.get(name, "-")) for name in ("arch", "gpu")]
        pick, us = named(str(item["pick"] or item["reason"])), microseconds(item.get("median_us"))
        rows.append([item["problem"], *place, pick, us])
    print_table(f"{len(rows)} records", ["problem", "policy", "GPU", "pick", "measured us"], rows)
    return 0


@command("records show", add_pattern)
def run_show(arguments: argparse.Namespace) -> int:
    """Print all that records say."""
    records = [kept.record for _, kept in chosen(arguments) if kept.record is not None]
    if arguments.json:
        print_json({"records": [record.to_json() for record in records]})
    columns = ENTRIES if is_narrow() else (*ENTRIES, *EVIDENCE)
    for record in () if arguments.json else records:
        print_line(f"{record.problem.describe()} on {record.arch}, {record.environment.gpu_name}")
        print_table(
            f"tuned for {record.purpose}, {'confirmed' if record.confirmed else 'not confirmed'}",
            columns,
            [_cells(record, entry)[: len(columns)] for entry in record.entries],
        )
    if records and columns == ENTRIES and not arguments.json:
        print_line(
            f"{', '.join(EVIDENCE)}: on terminals of {ROOMY} columns, with --full and with --json"
        )
    return 0 if records else nothing_matches(arguments.pattern, "readable record")


def _cells(record: TuningRecord, entry: CandidateEntry) -> list[str]:
    name, timing = entry.candidate.name, entry.measurement
    role = "pick" if name == record.pick else "default" if name == record.default else ""
    measured = ["-", "-"]
    if timing is not None:
        measured = [microseconds(timing.median_us), ratio(timing.ratio_to_best, timing.ratio_high)]
    digests = [(digest or "-")[:16] for digest in (entry.source_digest, entry.code_digest)]
    proof = "-" if not entry.outcome.ok else "none"
    if entry.proof is not None:
        proof = f"{entry.proof.largest:.2g} of {len(entry.proof.checks)}"
    return [role, named(name), entry.outcome.kind, *measured, proof, *digests]


def verified(kept: KeptRecord) -> dict[str, Any]:
    """The proof that a record's pick holds, else the field that differs."""
    said: dict[str, Any] = {"key": kept.key, "problem": kept.problem, "proof": None}
    record = kept.record
    if record is None or kept.field:
        return said | {"field": kept.field, "reason": kept.reason}
    said["pick"] = record.pick
    proof = check(record.picked, built_here(default_store(), record.environment))
    if not isinstance(proof, Miss):
        return said | {"proof": proof, "field": "", "reason": ""}
    advice = proof.advice and f"; {proof.advice}"
    reason = f"{proof.field} is {proof.recorded or 'unknown'}, wanted {proof.expected}{advice}"
    return said | {"field": proof.field, "reason": reason}


@command("records verify", add_optional_pattern)
def run_verify(arguments: argparse.Namespace) -> int:
    """Say which picks hold, by which digest, and which field of others differs."""
    said = [verified(kept) for _, kept in chosen(arguments)]
    stale = [item for item in said if item["proof"] is None]
    if arguments.json:
        print_json({"valid": len(said) - len(stale), "total": len(said), "records": said})
    else:
        proofs = Counter(item["proof"] for item in said if item["proof"] is not None)
        by = ", ".join(f"{count} by {proof}" for proof, count in sorted(proofs.items()))
        print_line(f"{len(said) - len(stale)} of {len(said)} picks hold{by and f': {by}'}")
        if stale:
            rows = [
                [item["problem"] or item["key"], item["field"], item["reason"]] for item in stale
            ]
            print_table("must be measured or rekeyed", ["problem", "field", "reason"], rows)
    return FAILED if stale else 0


@command("records rm", add_pattern)
def run_rm(arguments: argparse.Namespace) -> int:
    """Remove records."""
    removed = []
    for place in places(arguments):
        kept = matching(place, arguments.pattern)
        place.remove({item.key for item in kept})
        removed += kept
    if arguments.json:
        print_json({"removed": [summary(kept) for kept in removed]})
    else:
        for item in removed:
            print_line(f"removed {item.problem or item.key}")
        print_line(f"{len(removed)} records removed")
    return 0 if removed else nothing_matches(arguments.pattern, "record")


@command("records rekey", add_optional_pattern, add_jobs, add_all)
def run_rekey(arguments: argparse.Namespace) -> int:
    """Carry measurements over to sources that compile to the same machine code."""
    said: list[Rekeyed] = []
    written = sum([_rekey_place(place, arguments, said) for place in places(arguments)])
    print_entries(arguments, said, written, "not carried over")
    return FAILED if any(item.state in ("changed", "unknown") for item in said) else 0


def print_entries(
    arguments: argparse.Namespace,
    said: Sequence[Any],
    written: int,
    title: str,
    before: str = "",
    **more: Any,
) -> None:
    """Print what became of entries of records: how many of each state, and those with a reason as a table.

    Args:
        arguments: of the command.
        said: with the fields ``state``, ``problem``, ``candidate`` and ``reason``.
        written: records.
        title: of the table.
        before: what the line of counts begins with.
        more: fields of the JSON object alone.
    """
    counts = Counter(item.state for item in said)
    if arguments.json:
        entries = [asdict(item) for item in said]
        print_json({"written": written, "states": counts, **more, "entries": entries})
        return
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    print_line(f"{before}{len(said)} entries: {states or 'none'}; {written} records written")
    rows = [
        [item.state, item.problem, named(item.candidate), item.reason]
        for item in said
        if item.reason
    ]
    if rows:
        print_table(title, ["state", "problem", "candidate", "reason"], rows)


def _rekey_place(place: RecordPlace, arguments: argparse.Namespace, said: list[Rekeyed]) -> int:
    """Rewrite the records of a place; returns how many, and adds reports on their entries to ``said``."""
    kept = matching(place, arguments.pattern)
    said += [unread(item) for item in kept if item.record is None]
    records = {item.key: item.record for item in kept if item.record is not None}
    keys = wanted(list(records.values()), every=arguments.all)
    codes: Codes = {}
    compiler: Mapping[str, str] | None = None
    if keys:
        if find_disassembler() is None:
            raise ToolchainError(
                "comparing machine code needs cuobjdump and nvdisasm: pip install 'attention-autotuner[inspect]'"
            )
        toolchain = find_toolchain()
        compiler = toolchain.identity()
        with progress(quiet=arguments.json) as show:
            codes = build_codes(
                keys,
                toolchain=toolchain,
                store=default_store(),
                jobs=arguments.jobs or current().jobs,
                progress=lambda done, total, name, _seconds: show("build", done, total, name),
            )

    def renewed(record: TuningRecord) -> TuningRecord | None:
        new, reports = rekey(record, codes, compiler=compiler, every=arguments.all)
        said.extend(reports)
        return new

    return place.rewrite(set(records), renewed)


def unread(kept: KeptRecord) -> Rekeyed:
    """The answer for a record that cannot be read."""
    return Rekeyed(
        problem=kept.problem, arch="", candidate="", pick=True, state="unknown", reason=kept.reason
    )
