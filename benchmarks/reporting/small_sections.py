"""Parts of the page that are one table each: made where their result file is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import html
from .duels import place_of
from .html import Cell, number, words
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


def ceilings_section(results: Results) -> Section | None:
    """What a bring-up found the GPU to reach."""
    document = results.files.get("bring_up")
    measured = {} if document is None else document.get("ceilings", {})
    rows: list[list[Cell]] = []
    for name, (title, size, unit) in CEILINGS.items():
        found = measured.get(name)
        if isinstance(found, Mapping) and found.get("value") is not None:
            spread = found.get("spread")
            cells = [words(title), number(found["value"] / size, 2)]
            rows.append([*cells, number(None if spread is None else spread / size, 2), words(unit)])
    if document is None or not rows:
        return None
    inner = html.table(["ceiling", "measured", "half the quartiles' distance", "unit"], rows)
    return _section(results, "bring_up", "What the GPU reaches", inner, document)


def agreement_section(results: Results) -> Section | None:
    """The C++ benchmarks beside Python's, case by case."""
    document = results.files.get("cpp_agreement")
    tables = [] if document is None else [value for value in document.values() if _is_rows(value)]
    if document is None or not tables:
        return None
    rows = tables[0]
    names = [name for name in rows[0] if all(_is_plain(row.get(name)) for row in rows)]
    cells = [[_plain(row.get(name)) for name in names] for row in rows]
    inner = html.table([name.replace("_", " ") for name in names], cells)
    return _section(results, "cpp_agreement", "C++ beside Python", inner, document)


def decode_section(results: Results) -> Section | None:
    """One token of retention for a batch, as a share of a copy's bandwidth."""
    document = results.files.get("decode")
    if document is None:
        return None
    rows = [
        [
            words(row["candidate"]),
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


def alone_section(results: Results) -> Section | None:
    """Fla in a run of its own."""
    document = results.files.get("peers_retention")
    if document is None:
        return None
    rows = [
        [
            words(
                f"{', '.join(map(str, each['shape'][:3]))}, {each['shape'][3]}/{each['shape'][4]}"
            ),
            number(each["forward"]["median_us"]),
            number(each["step"]["median_us"]),
        ]
        for each in document["fla"]
    ]
    note = f"Batch, heads, seqlen, dims. {document['method'].capitalize()}."
    inner = html.paragraph(note)
    inner += html.table(["shape", "forward, µs", "forward + backward, µs"], rows)
    return _section(results, "peers_retention", "fla's chunk_retention alone", inner, document)


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
    alone_section,
    ceilings_section,
    agreement_section,
    host_section,
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


def _is_rows(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _plain(value: Any) -> Cell:
    if isinstance(value, float):
        return number(value, 3)
    if isinstance(value, int):
        return number(value)
    return words("" if value is None else str(value))
