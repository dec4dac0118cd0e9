"""Pages have the races of packed sequences of few queries."""

from __future__ import annotations

from pathlib import Path

from tests.result_files import result
from tests.snippets.pages import REPOSITORY
from tests.unit.test_docs_figures import words_of

PAGE = "docs/packed_sequences.md"


def shown(ratio: float) -> str:
    """A ratio as tables have it: with a third digit where two would say that nobody is ahead."""
    return f"{ratio:.3f}" if f"{ratio:.2f}" == "1.00" else f"{ratio:.2f}"


def lines_of(page: str) -> list[str]:
    return Path(REPOSITORY / page).read_text(encoding="utf-8").splitlines()


def test_the_page_has_the_suite() -> None:
    document = result("packed_tokens")
    lines = lines_of(PAGE)
    for row in document["rows"]:
        cells = [f"{row['entries']['pick']['median_us']:.1f}"]
        for name in ("copy", "flash_attn_3", "flash_attn_4"):
            raced = row["ratios"].get(f"{name} forward")
            cells.append(shown(raced["ratio"]) if raced else "-")
        ending = f" | {' | '.join(cells)} |"
        assert [line for line in lines if line.endswith(ending)], row["case"]
    assert len(document["rows"]) == 11


def test_the_log_has_the_races() -> None:
    race, log = (
        result("kernel_log_races")["attention_forward_packed_tokens"],
        words_of("kernel_log.md"),
    )
    lines = lines_of("docs/kernel_log.md")
    for name, us in race["us"].items():
        if name == "64 of 48 tokens":
            continue
        cells = [f"{us[key]:.1f}" if key in us else "-" for key in COLUMNS]
        assert f"| {name} | {' | '.join(cells)} |" in lines
    alike, listed = race["as_many_parts_for_all_us"], race["list_us"]
    unlike, short = alike["16 on 1k to 32k"], alike["64 of 48 tokens"]
    before, since = listed["parts_by_all_threads"], listed["parts_by_warps"]
    alone = race["us"]["64 of 48 tokens"]
    for said in (
        f"took {unlike['fastest']:.1f} us for flash-attn 3's {unlike['flash_attn_3']:.1f}",
        f"The list took {before['16 on 8k']:.1f} us with 16 sequences and {before['64 on 512 to 16k']:.1f}",
        f"it takes {since['16 on 8k']:.1f} and {since['64 on 512 to 16k']:.1f}",
        f"64 of 48 tokens take {alone['default']:.1f} us, flash-attn 3 {alone['flash_attn_3']:.1f}",
        f"{short['three_warpgroups']:.1f} to {short['two_warpgroups']:.1f} (of another",
    ):
        assert said in log
    page = words_of("packed_sequences.md")
    for said in (
        f"heads take {alone['default']:.0f} us by default",
        f"and {alone['flash_attn_3']:.0f} with flash-attn 3",
        f"kernels that take {short['three_warpgroups']:.0f} (",
    ):
        assert said in page


def test_the_changelog_and_the_log_have_the_means() -> None:
    document = result("packed_tokens")
    rows = {row["case"]: row for row in document["rows"]}
    three, four = (document["summary"][f"flash_attn_{n} forward"] for n in (3, 4))
    equal = rows["tokens_16_8k"]["ratios"]["flash_attn_4 forward"]["ratio"]
    log = words_of("kernel_log.md")
    mean = f"{three['geometric_mean']:.2f} of flash-attn 3, least {three['min']:.2f}"
    assert f"that is {mean}, and {four['geometric_mean']:.2f} of flash-attn 4" in log
    assert f"16 caches of equal length ({equal:.2f})" in log
    assert (four["slower"], three["slower"], four["min"]) == (1, 0, round(equal, 6))
    race = result("kernel_log_races")["attention_forward_packed_tokens"]["us"].values()
    shares = [us["default"] / us["whole_tiles"] for us in race]
    changelog = " ".join(lines_of("CHANGELOG.md"))
    assert f"{min(shares):.2f} to {max(shares[:-1]):.2f} of the" in changelog
    said = f"has {three['geometric_mean']:.2f} of flash-attn 3's speed and {four['geometric_mean']:.2f}"
    assert said in changelog
    readme = " ".join(lines_of("README.md"))
    assert f"flash-attn 4 is {100 * (1 / equal - 1):.0f} % faster with 16 of one length" in readme


COLUMNS = ("whole_tiles", "one_part", "default", "flash_attn_3")
