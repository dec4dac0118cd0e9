"""The page and the figures of results: drawn the same twice, up to date, readable, with the cases that we lose."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib, the extra `report`")

import matplotlib as mpl

from attention_autotuner.core.problem import Problem
from benchmarks import report
from benchmarks.reporting import drawing, site
from benchmarks.reporting.chinese import chinese
from benchmarks.reporting.curves import curves, passes_of, series_of
from benchmarks.reporting.duels import duels_of, losses, place_of, standings
from benchmarks.reporting.heatmaps import heatmap, panels_of, short, wrapped
from benchmarks.reporting.limits import limits_of
from benchmarks.reporting.sections import load, race_section
from benchmarks.reporting.small_sections import (
    agreement_section,
    bring_up_section,
    decode_section,
    first_call_section,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PROBE = Path(__file__).resolve().parents[1] / "overflow.js"
WIDTHS = (1400, 900, 420)
PINNED = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def built() -> site.Site:
    return site.build(RESULTS)


# --- files ----------------------------------------------------------------------------------------


def test_what_shows_results_shows_the_committed_ones(
    built: site.Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "build", lambda root: built)  # once is enough
    assert PINNED is not None
    if mpl.__version__ != PINNED[1]:
        pytest.skip(f"figures are compared with matplotlib {PINNED[1]}, here is {mpl.__version__}")
    assert report.main(["--check"]) == 0, "run python -m benchmarks.report"


def test_a_second_drawing_is_the_same() -> None:
    results = load(RESULTS / "nvidia-h200")
    name, document = results.races()[0]
    assert race_section(results, name, document) == race_section(results, name, document)


def test_nothing_is_fetched_from_anywhere(built: site.Site) -> None:
    for text in (built.page, *built.figures.values()):
        links = re.findall(r"(?:href|src|srcset|action)=[\"']([^\"']*)", text)
        assert [link for link in links if not link.startswith("#")] == []
        addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
        assert not re.search(r"@import|@font-face|<(?:link|iframe|object|embed|img)\b", text)
        assert not re.search(r"url\((?!#)", text)


def test_links_lead_to_places_on_the_page(built: site.Site) -> None:
    targets = re.findall(r'<a href="#([^"]+)"', built.page)
    ids = re.findall(r' id="([^"]+)"', built.page)
    assert targets
    assert set(targets) <= set(ids)
    sections = [each for each in ids if each in targets]
    assert len(set(sections)) == len(sections)


def test_figures_have_titles_units_and_both_colourings(built: site.Site) -> None:
    assert any(name.endswith("_curves.svg") for name in built.figures)
    for name, svg in built.figures.items():
        assert "<title>" in svg
        assert "prefers-color-scheme: dark" in svg
        assert not any(stand_in in svg for stand_in in drawing.VARIABLES)
        words = {"_curves": ("TFLOP/s", "sequence length", "ours"), "_speedup": ("speed over",)}
        kind = next(kind for kind in words if kind in name)
        for word in words[kind]:
            assert word in unescape(svg), name


def test_figures_of_results_that_are_gone_are_removed(tmp_path: Path) -> None:
    old = tmp_path / "docs" / "figures" / "nvidia-x" / "old.svg"
    old.parent.mkdir(parents=True)
    old.write_text("<svg/>")
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    other = tmp_path / "README.zh-CN.md"
    other.write_text("no markers here\n")
    arguments = ["--results", str(tmp_path / "none"), "--docs"]
    arguments += [str(tmp_path / "docs"), "--readme", str(readme), str(other)]
    assert report.main([*arguments, "--check"]) == 1
    assert report.main(arguments) == 0
    assert not old.exists()
    assert "No results are committed yet" in (tmp_path / "docs" / site.PAGE).read_text()
    assert other.read_text() == "no markers here\n"
    assert report.main([*arguments, "--check"]) == 0


# --- what is shown --------------------------------------------------------------------------------


def row(seqlen: int, ratio: float | None, causal: bool = False, **rest: Any) -> dict[str, Any]:
    problem = Problem(seqlen_q=seqlen, seqlen_k=seqlen, causal=causal)
    ours = {"outcome": {"kind": "ok", "reason": ""}, "median_us": 100.0, "tflops": 300.0}
    theirs: dict[str, Any] = {**ours, "median_us": 100.0 * (ratio or 1.0), "tflops": 250.0}
    if ratio is None:
        theirs = {"outcome": {"kind": "launch_failed", "reason": "no kernel for <this>"}}
    return {
        "problem": {**vars(problem)},
        "name": problem.describe(),
        "entries": {"pick": ours, "flash": theirs},
        "ratios": {} if ratio is None else {"flash": {"ratio": ratio, "error": 0.002}},
        "clocks": {"sm_clock_mhz": 1700.0, "power_draw_w": 500.0},
        **rest,
    }


def race(*rows: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {
        "benchmark": "attention_forward",
        "spec": "H200",
        "peers": {"flash": "Flash, forward"},
        "contests": {"flash": ["pick", "flash"], "deterministic": ["deterministic", "pick"]},
        "environment": {"gpu_name": "NVIDIA X", "driver": "1.2", "time_utc": "2026-11-21"},
        "rows": list(rows),
        **rest,
    }


DOCUMENT = race(row(512, 0.8), row(1024, 1.001), row(2048, 1.3), row(4096, None))


def test_duels_are_faster_even_or_slower_by_their_intervals() -> None:
    found = duels_of(DOCUMENT)
    assert [duel.verdict for duel in found] == ["slower", "even", "faster", None]
    assert found[3].reason == "theirs: launch failed: no kernel for <this>"
    (standing,) = standings(DOCUMENT)
    assert (standing.faster, standing.even, standing.slower, standing.problems) == (1, 1, 1, 3)
    assert (standing.least, standing.least_at) == (0.8, "d128 512")
    assert standing.mean == pytest.approx((0.8 * 1.001 * 1.3) ** (1 / 3))
    assert [duel.case for duel in losses(DOCUMENT)] == ["d128 512"]


def test_losses_are_marked_in_the_figure_and_in_the_tables() -> None:
    svg = heatmap(DOCUMENT, "x", "X")
    assert svg is not None
    assert svg.count("▼ 0.80") == 1
    assert svg.count("▼") == 2  # the other is in the legend
    assert ">1.30<" in svg
    assert ">no time<" in svg
    section = race_section(load(Path("/none")), "attention_forward", DOCUMENT)
    assert '<td class="loss" data-key="0.8">▼ 0.80 ±0.4%</td>' in section.inner
    assert escape("no kernel for <this>") in section.inner
    assert "SM clock after each race 1700 to 1700 MHz" in section.inner


def test_a_suite_has_rows_of_cases_and_columns_of_peers() -> None:
    contests = {"flash": ["pick", "flash"]}
    rows = [
        row(512, ratio, case=name, title=name.upper(), way=way, contests=contests)
        for name, way, ratio in (("a", "forward", 1.2), ("a", "step", 0.7), ("b", "forward", None))
    ]
    document = race(*rows, benchmark="suite_x", title="X", suite="x", unit="gb_per_s")
    (panel,) = panels_of(document)
    assert panel.rows == ("A, forward", "A, forward + backward", "B, forward")
    assert panel.columns == ("Flash",)
    moved = Problem(seqlen_q=512, seqlen_k=512).bytes_moved
    assert duels_of(document)[0].rate == pytest.approx(moved / 100.0 / 1e3)
    assert passes_of(document) == []


def test_curves_are_of_ours_and_of_others_with_more_than_one_length() -> None:
    found = series_of(DOCUMENT, "forward")
    assert found == {
        (128, False): {
            "ours": {512: 300.0, 1024: 300.0, 2048: 300.0, 4096: 300.0},
            "Flash, forward": {512: 250.0, 1024: 250.0, 2048: 250.0},
        }
    }
    assert curves(race(row(512, 1.0)), "forward", [], "x", "X") is None
    assert curves(DOCUMENT, "backward", [], "x", "X") is None


def test_a_limit_is_the_measured_one_where_there_is_one() -> None:
    by_spec = limits_of("H200", None)
    assert [limit.title for limit in by_spec] == [
        "mma.sync, by the specification",
        "wgmma, by the specification",
    ]
    assert by_spec[1].tflops == pytest.approx(989.4, rel=1e-3)
    log = {"mma_sync": {"tflops": 638.3}}
    assert limits_of("H200", None, log)[0].title == "mma.sync, measured"
    up = {"ceilings": {"mma_fp16": {"value": 6.6e14}, "wgmma_fp16": {"kind": "crashed"}}}
    both = limits_of("H200", up, log)
    assert [limit.tflops for limit in both] == [pytest.approx(660.0), by_spec[1].tflops]
    assert len(limits_of("A100", None)) == 1  # no wgmma there
    assert limits_of("unknown", None) == []


def test_small_sections_are_there_where_their_file_is(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-x"
    folder.mkdir()
    environment = {"gpu_name": "NVIDIA X", "torch": "2.13"}
    files: dict[str, Any] = {
        "bring_up": {
            "environment": environment,
            "ceilings": {"hbm_copy": {"value": 4.27e12, "spread": 1e10}, "exp": {"kind": "crashed"}},
            "expected": {"hbm_copy": 4.8e12},
            "seconds": {"ceilings": 20.4, "total": 300.0},
            "problems": [
                {"problem": "p", "status": "tuned", "pick": "k", "median_us": 9.0, "default_us": 9.9, "gain": 0.1}
            ],
            "spec": {"num_sms": 132},
            "sources": {"num_sms": "driver"},
        },
        "cpp_agreement": {
            "environment": environment,
            "bar": 0.03,
            "rounds": 400,
            "rest": 3.0,
            "cases": [
                {
                    "case": "one", "python_us": [10.0, 12.0, 11.0], "cpp_us": [11.0], "ratio": 1.0123,
                    "digest": "a", "cpp_digest": "a", "agrees": True, "error": "",
                },
                {
                    "case": "two", "python_us": [10.0], "cpp_us": [10.4], "ratio": 1.04,
                    "digest": "b", "cpp_digest": "b", "agrees": False, "error": "",
                },
            ],
        },
        "decode": {
            "environment": environment,
            "problem": "a token",
            "copy_gb_per_s": 4200.0,
            "rows": [
                {"candidate": "k", "ways": {"in place": {"us": 9.5, "gb_per_s": 3900, "share_of_copy": 0.93}}}
            ],
        },
        "first_call": {
            "environment": environment,
            "shape": [1, 2, 512, 64],
            "bar_seconds": 1.0,
            "seconds": {"forward": [0.25, 0.5, 0.75], "backward": [0.125, 0.5, 0.625]},
        },
    }  # fmt: skip
    makers = (bring_up_section, agreement_section, decode_section, first_call_section)
    assert [make(load(folder)) for make in makers] == [None] * 4
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    up, cpp, decode, first = (make(load(folder)) for make in makers)
    assert up is not None
    assert cpp is not None
    assert decode is not None
    assert first is not None
    assert ">4.27</td>" in up.inner
    assert ">0.89</td>" in up.inner  # of what the specification says
    assert "ex2" not in up.inner
    assert "ceilings 20 s, total 300 s" in up.inner
    assert ">10.0</td>" in up.inner  # percent of gain
    assert ">driver</td>" in up.inner
    assert ">1.0123</td>" in cpp.inner
    assert ">11.00</td>" in cpp.inner
    assert ">the same</td>" in cpp.inner
    assert ">no</td>" in cpp.inner
    assert "400 rounds may differ by 3%: 1 of 2 cases agree" in cpp.inner
    assert "rested 3 times as long as one took" in cpp.inner
    assert ">93%</td>" in decode.inner
    assert "NVIDIA X, torch 2.13" in decode.inner
    assert ">0.750</td>" in first.inner
    assert "3 processes" in first.inner
    page = site.build(tmp_path).page
    assert page.index("Decoding with retention") < page.index("C++ beside Python")


def test_titles_are_shortened_and_wrapped() -> None:
    assert short("Flash, forward + backward through autograd") == "Flash through autograd"
    assert short("Flash, backward") == "Flash"
    assert wrapped("FlexAttention (torch.compile)") == "FlexAttention\n(torch.compile)"
    assert place_of({**DOCUMENT, "rows": []}) == "NVIDIA X, driver 1.2, 2026-11-21"


def test_rows_of_an_earlier_run_are_told_by_their_own_time() -> None:
    times = ("2026-11-20T09:00", "2026-11-20T08:00", "2026-11-22T09:00", None)
    clocks = {"sm_clock_mhz": None, "power_draw_w": None}
    rows = [{"clocks": {**clocks, "time_utc": time}} for time in times]
    told = place_of({**DOCUMENT, "rows": rows})
    assert told.endswith(", 2026-11-21, rows of an earlier run since 2026-11-20T08:00")
    assert "earlier" not in place_of({**DOCUMENT, "rows": rows[2:]})
    line = (
        "NVIDIA X, driver 1, CUDA 2, torch 3, 2026-11-21, rows of an earlier run since 2026-11-20."
    )
    assert "2026-11-20 起" in chinese(line)
    assert "rows" not in chinese(line)


# --- how it looks ---------------------------------------------------------------------------------

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def layout(page: str, width: int, folder: Path) -> list[str]:
    """What overflows, is cut off or overlaps at a width, by a headless browser."""
    probed = page.replace("</body>", f"<script>{PROBE.read_text()}</script></body>")
    # In a frame, because a window of a browser has a least width.
    frame = (
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{escape(probed)}"></iframe>'
    )
    read = "addEventListener('load', () => { document.title = document.querySelector('iframe').contentDocument.title })"
    outer = folder / f"{width}.html"
    outer.write_text(f"<!doctype html><meta charset=utf-8>{frame}<script>{read}</script>")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,1000"]
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stdout[:500]
    answer = json.loads(unescape(title[1]))
    assert width - 20 <= answer["width"] <= width
    return list(answer["found"])


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to lay the page out")
def test_nothing_overflows_or_overlaps(built: site.Site, tmp_path: Path) -> None:
    assert {width: layout(built.page, width, tmp_path) for width in WIDTHS} == {
        width: [] for width in WIDTHS
    }


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to lay the page out")
def test_the_look_finds_what_is_wrong(tmp_path: Path) -> None:
    wide = '<p style="width:900px">wide</p>'
    svg = '<svg width="90" height="40"><text y="20">one</text><text x="3" y="20">two</text>'
    svg += '<text x="80" y="39">outside</text></svg>'
    found = layout(f"<!doctype html><body>{wide}{svg}</body>", 420, tmp_path)
    assert "the page scrolls sideways" in found
    assert "off the page: p wide" in found
    assert 'on "two": text one' in found
    assert "cut off: text outside" in found
