"""README.zh-CN.md says what README.md says: the same sections, code, tables, results and links, in another language."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.reporting.readme import BEGIN, END
from tests.snippets.pages import CHINESE, REPOSITORY, blocks

ENGLISH = REPOSITORY / "README.md"
FIGURES = re.compile(r"\d+(?:\.\d+)?")


def text_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def tables(page: Path) -> list[list[str]]:
    """The tables of a page as lists of rows."""
    groups: list[list[str]] = [[]]
    for line in text_of(page).splitlines():
        if line.startswith("|"):
            groups[-1].append(line)
        elif groups[-1]:
            groups.append([])
    return [table for table in groups if table]


def links(page: Path) -> list[str]:
    """Where a page links to, in order, but for the other language."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    return [link for link in targets if link not in (ENGLISH.name, CHINESE.name)]


def test_both_have_the_same_sections_in_the_same_order() -> None:
    levels = [re.findall(r"^(#+) ", text_of(page), re.M) for page in (ENGLISH, CHINESE)]
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
            assert FIGURES.findall(row) == FIGURES.findall(other), other


def test_both_link_to_the_same_places() -> None:
    assert sorted(links(ENGLISH)) == sorted(links(CHINESE))


def test_each_links_to_the_other() -> None:
    assert f"]({CHINESE.name})" in text_of(ENGLISH)
    assert f"]({ENGLISH.name})" in text_of(CHINESE)


def test_both_make_as_many_points() -> None:
    points = [re.findall(r"^- ", text_of(page), re.M) for page in (ENGLISH, CHINESE)]
    assert len(points[0]) == len(points[1])


def results_of(page: Path) -> str:
    return page.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def test_results_are_translated_whole() -> None:
    english, chinese = (results_of(page).split("\n") for page in (ENGLISH, CHINESE))
    assert len(english) == len(chinese)
    for line in chinese:
        assert not line or line.startswith("|") or re.search(r"[\u4e00-\u9fff]", line)
        assert not re.search(r"[\u4e00-\u9fff] [\u4e00-\u9fff]", line), line
        for cell in line.strip("|").split("|"):
            words = re.fullmatch(r"[a-z, +]{4,}", cell.strip())
            assert not words or words[0].strip() == "retention", f"no word for {cell}"
