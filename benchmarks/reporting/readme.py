"""The table of the READMEs: a row for each baseline and direction, the baseline that beats us in bold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..baselines.base import MODES
from ..results import ratio_text

BEGIN, END = "<!-- results -->", "<!-- /results -->"
ORDER = ("attention_forward", "attention_backward", "models", "retnet", "retention", "decode")
SUBJECTS = {
    "attention_forward": "attention",
    "attention_backward": "attention",
    "models": "attention, layers of models",
    "retnet": "RetNet mask",
    "retention": "retention",
    "decode": "attention, few queries on long keys",
}
HEADINGS = ("operation", "direction", "compared with", "shapes", "geometric mean", "least")
CHINESE = {
    "operation": "运算",
    "direction": "方向",
    "compared with": "比较对象",
    "shapes": "形状数",
    "geometric mean": "几何平均",
    "least": "最小值",
    "attention": "注意力",
    "attention, layers of models": "注意力，模型中的层",
    "attention, few queries on long keys": "注意力，少量 query 对长 key",
    "RetNet mask": "RetNet 掩码",
    "forward": "前向",
    "backward": "反向",
    "step": "前向 + 反向",
    "the formula through torch.compile": "同一公式经 torch.compile",
    "the formula in eager PyTorch": "同一公式的 eager PyTorch",
    "fla's chunk_retention": "fla 的 chunk_retention",
    "memory-efficient (torch SDPA)": "memory-efficient（torch SDPA）",
}
ENGLISH = {"step": "forward + backward"}
CAPTIONS = {
    "en": "Our speed over the other's on one {gpu} (driver {driver}, torch {torch}), fp16, cold L2, all of a row's "
    "shapes interleaved in one run: 2.00 takes half the time, and what beats us is bold.",
    "zh": "在一块 {gpu} 上（驱动 {driver}，torch {torch}），与各家相比的速度：fp16，L2 为冷，"
    "每一行的形状都在同一次运行中交替计时；2.00 表示用时减半，快于我们的以粗体标出。",
}


def _bold(ratio: float) -> str:
    return f"**{ratio_text(ratio)}**" if ratio < 1.0 else ratio_text(ratio)


def rows_of(documents: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of one GPU's result files: operation, mode, baseline, shapes, and our speed over it.

    A baseline stands once in each direction of an operation: from a grid where it was raced there, else from the
    layers of models. A backward pass that is timed in whole steps as well stands as a step.
    """
    rows: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for suite, document in ((suite, documents[suite]) for suite in ORDER if suite in documents):
        operation = suite if suite == "decode" else SUBJECTS[suite].partition(",")[0]
        for name, figures in document["summary"].items():
            baseline, _, mode = name.partition(" ")
            title = document["baselines"].get(baseline)
            stepped = mode == "backward" and f"{baseline} step" in document["summary"]
            other = title is None or (
                suite == "models" and baseline in ("fla", "compiled", "eager")
            )
            if other or stepped or mode == "autograd" or (operation, baseline, mode) in rows:
                continue
            ratios = (figures["geometric_mean"], figures["min"])
            row = (SUBJECTS[suite], mode, title, str(figures["problems"]), *map(_bold, ratios))
            rows[operation, baseline, mode] = row
    operations = [operation for operation, _, _ in rows]
    order = sorted(rows, key=lambda place: (operations.index(place[0]), MODES.index(place[2])))
    return [rows[place] for place in order]


def cells(row: tuple[str, ...], words: Mapping[str, str]) -> list[str]:
    """A row in one language, its baseline in bold where that beats us."""
    subject, mode, title, *figures = (words.get(cell, cell) for cell in row)
    return [subject, mode, f"**{title}**" if "*" in figures[1] else title, *figures]


def block(gpus: Mapping[str, Mapping[str, Mapping[str, Any]]], language: str) -> str:
    """The text between the markers.

    Args:
        gpus: folder -> suite -> document.
        language: ``en`` or ``zh``.
    """
    words = CHINESE if language == "zh" else ENGLISH
    paragraphs = []
    for documents in gpus.values():
        rows = rows_of(documents)
        if not rows:
            continue
        shown = [documents[suite] for suite in ORDER if suite in documents]
        runs = [run for document in shown for run in document["runs"].values()]
        environment = max((run["environment"] for run in runs), key=lambda e: str(e["time_utc"]))
        gpu = environment["gpu_name"]
        caption = CAPTIONS[language].format(
            gpu=gpu, driver=environment["driver"], torch=environment["torch"]
        )
        table = [[words.get(heading, heading) for heading in HEADINGS], ["---"] * len(HEADINGS)]
        table += [cells(row, words) for row in rows]
        paragraphs += [caption, "\n".join(f"| {' | '.join(line)} |" for line in table)]
    return "\n\n".join(paragraphs)


def replaced(text: str, inner: str) -> str:
    """The text with what stands between its markers replaced.

    Raises:
        ValueError: it does not hold each marker once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text must hold {BEGIN} and {END} once each, in this order")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{inner}\n{END}{rest.split(END)[1]}"
