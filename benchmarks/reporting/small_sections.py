"""Parts of the page that are one table each: made where their result file is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from . import html
from .duels import place_of
from .html import Cell, long_words, number, words
from .sections import Results, Section

CEILINGS = {
    "mma_fp16": ("mma.sync, fp16", 1e12, "TFLOP/s"),
    "mma_bf16": ("mma.sync, bf16", 1e12, "TFLOP/s"),
    "wgmma_fp16": ("wgmma, fp16", 1e12, "TFLOP/s"),
    "wgmma_bf16": ("wgmma, bf16", 1e12, "TFLOP/s"),
    "fp32": ("fp32 multiply-add", 1e12, "TFLOP/s"),
    "exp": ("ex2", 1e12, "10^12 results/s"),
    "smem": ("shared memory", 1e12, "TB/s"),
    "l2": ("L2", 1e12, "TB/s"),
    "hbm_copy": ("device memory, copy", 1e12, "TB/s"),
    "launch": ("kernel launch", 1e-6, "µs"),
}
"""Name in a bring-up -> title, the unit's size in SI, and the unit."""


def bring_up_section(results: Results) -> Section | None:
    """What a bring-up found the GPU to reach, where each number of its spec is from, and what its sweep came to."""
    document = results.files.get("bring_up")
    if document is None:
        return None
    rows = [
        _ceiling(name, found, document.get("expected", {}).get(name))
        for name, found in document.get("ceilings", {}).items()
        if name in CEILINGS and found.get("value") is not None
    ]
    parts = []
    if rows:
        heads = ["ceiling", "measured", "half the quartiles' distance, %", "by the specification"]
        parts.append(html.table([*heads, "measured / specified", "unit"], rows))
    seconds = document.get("seconds", {})
    if seconds:
        spent = ", ".join(
            f"{name.replace('_', ' ')} {each:.0f} s" for name, each in seconds.items()
        )
        parts.append(html.paragraph(f"Time: {spent}."))
    parts.append(_sweep(document.get("problems", [])))
    parts.append(_sources(document))
    inner = "\n".join(part for part in parts if part)
    return _section(results, "bring_up", "Bringing the GPU up", inner, document)


def _ceiling(name: str, found: Mapping[str, Any], expected: float | None) -> list[Cell]:
    title, size, unit = CEILINGS[name]
    spread = found.get("spread")
    share = found["value"] / expected if expected else None
    return [
        words(title),
        number(found["value"] / size, 2),
        number(None if spread is None else 100.0 * spread / found["value"], 1),
        number(None if expected is None else expected / size, 2),
        number(share, 2),
        words(unit),
    ]


def _sweep(problems: Sequence[Mapping[str, Any]]) -> str:
    """The problems that were tuned: a table on demand."""
    rows = [
        [
            long_words(each["problem"]),
            words(each["status"]),
            number(each.get("median_us"), 1),
            number(each.get("default_us"), 1),
            number(None if each.get("gain") is None else 100.0 * each["gain"], 1),
            long_words(each.get("pick") or each.get("reason") or ""),
        ]
        for each in problems
    ]
    heads = ["problem", "ended", "pick, µs", "default, µs", "gain, %", "pick, or why there is none"]
    return (
        html.details(f"The sweep ({len(rows)} problems)", html.table(heads, rows)) if rows else ""
    )


def _sources(document: Mapping[str, Any]) -> str:
    """Every number of the spec that has a source: a table on demand."""
    spec, sources = document.get("spec", {}), document.get("sources", {})
    rows = [
        [words(name), words(str(spec.get(name, ""))), long_words(told)]
        for name, told in sources.items()
    ]
    return html.details("The spec", html.table(["field", "value", "source"], rows)) if rows else ""


def agreement_section(results: Results) -> Section | None:
    """The C++ benchmarks beside Python's, case by case."""
    document = results.files.get("cpp_agreement")
    if document is None:
        return None
    rows = [
        [
            long_words(each["case"]),
            number(median(each["python_us"]) if each["python_us"] else None, 2),
            number(median(each["cpp_us"]) if each["cpp_us"] else None, 2),
            number(each["ratio"], 4),
            words("the same" if each["digest"] == each["cpp_digest"] else "another"),
            words("yes" if each["agrees"] else f"no {each['error']}".strip()),
        ]
        for each in document["cases"]
    ]
    heads = ["case", "Python, µs", "C++, µs", "C++ / Python", "artifact", "agrees"]
    agreeing = sum(bool(each["agrees"]) for each in document["cases"])
    rest = document.get("rest", 0)
    told = f"Medians of {document['rounds']} rounds may differ by {document['bar']:.0%}: "
    told += f"{agreeing} of {len(rows)} cases agree. Between rounds the GPU "
    told += f"rested {rest:g} times as long as one took." if rest else "did not rest."
    inner = html.paragraph(told) + html.table(heads, rows)
    return _section(results, "cpp_agreement", "C++ beside Python", inner, document)


def decode_section(results: Results) -> Section | None:
    """One token of retention for a batch, as a share of a copy's bandwidth."""
    document = results.files.get("decode")
    if document is None:
        return None
    rows = [
        [
            long_words(row["candidate"]),
            words(way),
            number(each["us"], 1),
            number(each["gb_per_s"]),
            Cell(text=f"{each['share_of_copy']:.0%}", key=each["share_of_copy"]),
        ]
        for row in document["rows"]
        for way, each in row["ways"].items()
    ]
    note = f"{document['problem']}; a copy in the same run moves {document['copy_gb_per_s']:,.0f} GB/s."
    heads = ["kernel", "state", "µs", "GB/s", "share of a copy"]
    inner = html.paragraph(note) + html.table(heads, rows)
    return _section(results, "decode", "Decoding with retention", inner, document)


def host_section(results: Results) -> Section | None:
    """Host time of a warm call."""
    document = results.files.get("host_overhead")
    if document is None:
        return None
    bars = document["bars_us"]
    rows = [
        [
            words(name),
            number(each["median_us"], 2),
            number(each["quartile_low_us"], 2),
            number(each["quartile_high_us"], 2),
            number(bars.get(name)),
        ]
        for name, each in document["figures"].items()
    ]
    shape = ", ".join(map(str, document["shape"]))
    inner = html.paragraph(f"Shape [{shape}], so small that the GPU waits for the host.")
    heads = ["call", "median, µs", "lower quartile", "upper quartile", "bar, µs"]
    inner += html.table(heads, rows)
    return _section(results, "host_overhead", "Host time of a warm call", inner, document)


def first_call_section(results: Results) -> Section | None:
    """The first calls of processes that have prebuilt kernels and no compiler."""
    document = results.files.get("first_call")
    if document is None:
        return None
    bar = document["bar_seconds"]
    rows = [
        [words(way), number(median(times), 3), number(max(times), 3), number(bar, 1)]
        for way, times in document["seconds"].items()
    ]
    shape = ", ".join(map(str, document["shape"]))
    told = f"Shape [{shape}]; {len(document['seconds']['forward'])} processes with an installed kernel package."
    inner = html.paragraph(told)
    inner += html.table(["first call", "median, s", "longest, s", "bar, s"], rows)
    title = "First call without a compiler"
    return _section(results, "first_call", title, inner, document)


def training_section(results: Results) -> Section | None:
    """The example that trains a small GPT."""
    document = results.files.get("train_gpt")
    if document is None:
        return None
    rows = [
        [
            words(name),
            number(run["step_ms"], 2),
            number(run["tokens_per_second"]),
            number(run["peak_bytes"] / 2**20),
            number(run["held_out_loss"], 4),
        ]
        for name, run in document["runs"].items()
    ]
    model = ", ".join(f"{name} {value}" for name, value in document["model"].items())
    inner = html.paragraph(f"{document['steps']} steps of {document['batch']} sequences; {model}.")
    heads = ["attention", "step, ms", "tokens a second", "peak MiB", "held-out loss"]
    inner += html.table(heads, rows)
    return _section(results, "train_gpt", "Training a small GPT", inner, document)


SMALL: tuple[Callable[[Results], Section | None], ...] = (
    decode_section,
    bring_up_section,
    agreement_section,
    host_section,
    first_call_section,
    training_section,
)
"""In the order of the page."""


def _section(
    results: Results, name: str, title: str, inner: str, document: Mapping[str, Any]
) -> Section:
    anchor = f"{results.gpu}-{name}".replace("_", "-")
    if document.get("environment"):
        inner += html.paragraph(f"{place_of({**document, 'rows': []})}.", "place")
    return Section(anchor=anchor, title=title, inner=inner, figures={})
