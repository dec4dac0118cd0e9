"""Both READMEs: short, alike in sections, code, tables, results and links, with figures of the committed results."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from benchmarks.results import ratio_text
from tests.result_files import result, summary
from tests.snippets.pages import CHINESE, REPOSITORY, blocks

ENGLISH = REPOSITORY / "README.md"
READMES = (ENGLISH, CHINESE)
BEGIN, END = "<!-- results -->", "<!-- /results -->"
FIGURES = re.compile(r"\d+(?:\.\d+)?")
MOST_LINES, FIRST_IMPORT = 200, 60


def text_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def tables(page: Path) -> list[list[str]]:
    """The tables of a page as lists of rows."""
    collected: list[list[str]] = [[]]
    for line in text_of(page).splitlines():
        if line.startswith("|"):
            collected[-1].append(line)
        elif collected[-1]:
            collected.append([])
    return [table for table in collected if table]


def links(page: Path) -> list[str]:
    """Link targets of a page in order, without those to the other language and to its own sections."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    return [t for t in targets if t not in (ENGLISH.name, CHINESE.name) and not t.startswith("#")]


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)
def test_it_is_short_and_begins_with_code(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES
    first = next(n for n, line in enumerate(lines, 1) if re.match(r"(from|import) ", line))
    assert first < FIRST_IMPORT


def test_both_have_the_same_sections_in_the_same_order() -> None:
    levels = [re.findall(r"^(#+) ", text_of(page), re.M) for page in READMES]
    assert levels[0] == levels[1]


def test_both_have_the_same_code() -> None:
    english, chinese = blocks(ENGLISH), blocks(CHINESE)
    assert len(english) == len(chinese)
    for ours, theirs in zip(english, chinese, strict=True):
        assert (ours.language, ours.kind) == (theirs.language, theirs.kind), theirs.where
        assert ours.code == theirs.code, theirs.where


def test_both_have_the_same_tables_with_the_same_figures() -> None:
    english, chinese = tables(ENGLISH), tables(CHINESE)
    assert len(english) == len(chinese)
    for ours, theirs in zip(english, chinese, strict=True):
        assert len(ours) == len(theirs), theirs[0]
        for row, other in zip(ours, theirs, strict=True):
            assert row.count("|") == other.count("|"), other
            assert row.count("**") == other.count("**"), other
            assert FIGURES.findall(row) == FIGURES.findall(other), other


def test_both_link_to_the_same_places() -> None:
    assert sorted(links(ENGLISH)) == sorted(links(CHINESE))


def test_each_links_to_the_other() -> None:
    assert f"]({CHINESE.name})" in text_of(ENGLISH)
    assert f"]({ENGLISH.name})" in text_of(CHINESE)


def test_both_make_as_many_points() -> None:
    points = [re.findall(r"^- ", text_of(page), re.M) for page in READMES]
    assert len(points[0]) == len(points[1])


def test_the_chinese_one_has_no_space_or_line_break_inside_a_sentence() -> None:
    text = text_of(CHINESE)
    assert re.findall(r"[\u3000-\u9fff\uff00-\uffef] +[\u3000-\u9fff\uff00-\uffef]", text) == []
    prose = [bool(re.match(r"[^\s|#<-]|\s+\S", line)) for line in text.splitlines()]
    assert not any(a and b for a, b in itertools.pairwise(prose)), "a paragraph a line"


# --- results --------------------------------------------------------------------------------------


def least(suite: str, ratio: str) -> tuple[float, str]:
    """The case in which ours is slowest beside a baseline: its ratio and its key."""
    rows = result(suite)["rows"]
    return min(
        (row["ratios"][ratio]["ratio"], row["key"]) for row in rows if ratio in row["ratios"]
    )


def test_the_figures_above_are_those_of_the_results() -> None:
    baselines = ("flash_attn_3", "flash_attn_4", "sdpa_cudnn", "sdpa_flash")
    forward = [summary("attention_forward", name, "forward")[0] for name in baselines]
    backward = [summary("attention_backward", name, "backward")[0] for name in baselines]
    retention = summary("retention", "fla", "forward")[0]
    assert least("attention_backward", "sdpa_cudnn backward")[0] > 1
    plain = ("score_modifications", "packed_sequences")
    assert min(least(suite, "flash_attn_4 backward")[0] for suite in plain) > 1
    backward_of_four = [
        (ratio["ratio"], ratio["error"], row["case"])
        for row in result("attention_backward")["rows"]
        for ratio in [row["ratios"]["flash_attn_4 backward"]]
    ]
    even, error, place = min(backward_of_four)
    assert place == "d128_16k"
    said = f"{ratio_text(even)} backward, at d128 and 16k, is within the error of ± {error:.2f};"
    assert said in text_of(ENGLISH)
    for suite, mode in (
        ("attention_forward", "forward"),
        ("attention_forward_bf16", "forward"),
        ("attention_backward", "backward"),
        ("head_dims", "forward"),
    ):
        assert least(suite, f"flash_attn_3 {mode}")[0] > 1
    assert least("flex_attention", "flex_flash backward")[0] > 1
    assert least("flex_attention", "flex_flash forward")[0] > 1
    for suite in ("attention_backward", "head_dims"):
        assert result(suite)["summary"]["flash_attn_4 backward"]["slower"] == 0
        assert result(suite)["summary"]["flash_attn_4_deterministic backward"]["slower"] == 0
    decoding, of_cudnn = (least("decode", f"{name} forward")[0] for name in baselines[1:3])
    assert f"{100 / decoding - 100:.0f}" == f"{100 / of_cudnn - 100:.0f}"
    compiled, cublas = least("retnet", "compiled backward")[0], least("gemm", "cublas forward")[0]
    for suite in ("small_batches", "short"):
        assert least(suite, "flash_attn_4 step")[0] > 1
    three, where = least("head_dims", "flash_attn_3 backward")
    assert where.startswith("d192_4k ")
    for suite in ("models", "small_batches"):
        for name in baselines:
            for mode in ("forward", "backward", "step"):
                assert least(suite, f"{name} {mode}")[0] > 1
    ratios = (decoding, three, compiled, cublas)
    behind = [f"{100 / ratio - 100:.0f}" for ratio in ratios]
    masks = result("retnet")["summary"]["compiled backward"]["slower"]
    products = result("gemm")["summary"]["cublas forward"]["slower"]
    names = ("flash-attn 3", "flash-attn 4", "cuDNN and ", "FlashAttention-2")
    ahead, back = (
        ", ".join(f"{x:.2f}x {name}" for x, name in zip(figures, names, strict=True))
        for figures in (forward, backward)
    )
    for sentence in (
        f"forward {ahead}, backward {back};".replace("and , ", "and "),
        f"retention {retention:.2f}x fla.",
        f"flash-attn 4 and cuDNN are up to {behind[0]} % ahead in decoding, "
        f"flash-attn 3 {behind[1]} % in the backward pass at head dim 192, "
        f"`torch.compile` up to {behind[2]} % in the backward pass of {masks} of 5 RetNet masks, "
        f"cuBLAS up to {behind[3]} % in {products} of 8 matrix products:",
    ):
        assert sentence in text_of(ENGLISH)
    expected = [f"{figure:.2f}" for figure in (*forward, *backward, retention)]
    head = text_of(CHINESE).split("\n## ", 1)[0]
    assert [figure for figure in FIGURES.findall(head) if "." in figure] == expected
    losses = head.partition("**更慢**")[2].partition("\n")[0]
    assert re.findall(r"领先 (\d+)%", losses) == behind
    assert f"5 种 RetNet mask 中的 {masks} 种" in losses
    assert f"8 个矩阵乘法中的 {products} 个" in losses


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)
def test_a_baseline_and_its_ratio_are_bold_where_it_is_faster(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    block = text.split(BEGIN)[1].split(END)[0].splitlines()
    head, _, *rows = (line.split("|") for line in block if line.startswith("|"))
    (mean,) = (at for at, cell in enumerate(head) if cell.strip().endswith(("mean", "平均")))
    assert any("cuDNN" in cell for row in rows for cell in row)
    for row in rows:
        ratio = row[mean].strip()
        assert ratio.startswith("**") == (float(ratio.strip("*")) < 1.0), row
        baseline = any(re.fullmatch(r" \*\*[^*]*[A-Za-z][^*]*\*\* ", cell) for cell in row)
        assert baseline == ratio.startswith("**"), row
