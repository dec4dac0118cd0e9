"""The pages and tables of results: from result files, whole by themselves, readable, with the cases that we lose."""

from __future__ import annotations

import json
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="curves need matplotlib, the extra `report`")

from attention_autotuner.core.problem import Problem
from benchmarks import report, results
from benchmarks.reporting import readme, site
from benchmarks.reporting.curves import draw, limits_of, series_of
from benchmarks.suites import SUITES
from tests.layout import CHROMIUM, layout

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1400, 900, 420)


@pytest.fixture(scope="module")
def built() -> dict[str, str]:
    return site.build(results.RESULTS)


# --- the committed results ------------------------------------------------------------------------


def test_the_readmes_show_the_committed_results() -> None:
    assert report.main(["--check"]) == 0, "run python -m benchmarks.report"


def test_the_readmes_name_each_baseline_that_beats_us() -> None:
    gpus = site.load(results.RESULTS)
    for language in ("en", "zh"):
        text = readme.block(gpus, language)
        for documents in gpus.values():
            for row in readme.rows_of(documents):
                words = readme.CHINESE if language == "zh" else readme.ENGLISH
                line = f"| {' | '.join(readme.cells(row, words))} |"
                assert line in text
                assert ("**" in line.split("|")[3]) == ("**" in line.split("|")[5])


def test_results_are_compact_and_were_made_of_suites() -> None:
    paths = [p for p in results.RESULTS.glob("*/*.json") if p.stem in SUITES]
    assert {path.stem for path in paths} == set(SUITES)
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        assert document["schema"] == results.SCHEMA
        assert (
            results.rounded(results.summarise(SUITES[path.stem], document["rows"]))
            == (document["summary"])
        ), path
        blocks = len(document["rows"]) + len(document["runs"]) + 1
        assert path.stat().st_size < 2500 * blocks, path


def test_nothing_is_fetched_from_anywhere(built: dict[str, str]) -> None:
    for name, text in built.items():
        links = re.findall(r"(?:href|src|srcset|action)=[\"']([^\"']*)", text)
        assert [link for link in links if not link.startswith("#")] == [], name
        addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, name
        assert not re.search(r"@import|@font-face|<(?:link|iframe|object|embed|img)\b", text)
        assert not re.search(r"url\((?!#)", text)


def test_links_lead_to_places_on_the_page(built: dict[str, str]) -> None:
    page = built[site.PAGE]
    targets = re.findall(r'<a href="#([^"]+)"', page)
    ids = re.findall(r' id="([^"]+)"', page)
    assert targets
    assert set(targets) <= set(ids)
    sections = [anchor for anchor in ids if anchor in targets]
    assert len(set(sections)) == len(sections)


def test_curves_have_titles_and_units(built: dict[str, str]) -> None:
    curves = {name: svg for name, svg in built.items() if name.endswith(".svg")}
    assert len(curves) >= 2
    for name, svg in curves.items():
        assert "<title>" in svg
        for word in ("TFLOP/s", "sequence length", "ours"):
            assert word in unescape(svg), name
        assert name in built[site.RESULTS]


# --- what is shown --------------------------------------------------------------------------------


def row(seqlen: int, ratio: float | None, causal: bool = False, **rest: Any) -> dict[str, Any]:
    problem = Problem(seqlen_q=seqlen, seqlen_k=seqlen, causal=causal)
    ours = {"median_us": 100.0, "tflops": 300.0}
    theirs: dict[str, Any] = {"median_us": 100.0 * (ratio or 1.0), "tflops": 250.0}
    if ratio is None:
        theirs = {"outcome": {"kind": "launch_failed", "reason": "no kernel for <this>"}}
    compared = {"ratio": ratio, "error": 0.002, "ours": "pick"}
    return {
        "key": f"{seqlen} forward fp16",
        "case": f"d128_{seqlen}",
        "title": f"d128 {seqlen}",
        "modes": ["forward"],
        "ours": "pick",
        "layer": "default",
        "pick": "a_kernel",
        "run": "r",
        "problem": {**vars(problem)},
        "entries": {"pick": ours, "sdpa_flash forward": theirs},
        "ratios": {} if ratio is None else {"sdpa_flash forward": compared},
        "clocks": {"sm_clock_mhz": 1700.0, "power_draw_w": 500.0},
        **rest,
    }


def race(*rows: dict[str, Any], **rest: Any) -> dict[str, Any]:
    environment = {
        "gpu_name": "NVIDIA X",
        "driver": "1.2",
        "torch": "2.13",
        "time_utc": "2026-11-21",
    }
    return {
        "schema": 2,
        "suite": "attention_forward",
        "title": "Attention forward",
        "unit": "tflops",
        "spec": "H200",
        "baselines": {"sdpa_flash": "Flash"},
        "runs": {"r": {"environment": environment, "libraries": {"triton": "3"}}},
        "rows": list(rows),
        "summary": results.summarise(SUITES["attention_forward"], rows),
        "unmeasured": {"late forward fp16": "the 8 s were used up"},
        **rest,
    }


DOCUMENT = race(row(512, 0.8), row(1024, 1.001), row(2048, 1.3), row(4096, None))


def shown(folder: Path, **documents: Any) -> dict[str, str]:
    """The site of some files of one GPU."""
    place = folder / "nvidia-x"
    place.mkdir(exist_ok=True)
    for name, document in documents.items():
        results.write(place / f"{name}.json", document)
    return site.build(folder)


def test_comparisons_are_faster_even_or_slower_by_their_intervals() -> None:
    compared = site.results_of(DOCUMENT)
    assert [result.standing for result in compared] == ["slower", "even", "faster", ""]
    assert compared[3].reason == "launch failed: no kernel for <this>"
    assert "rgba(230" in compared[0].colour
    assert "rgba(94" in compared[2].colour
    figures = DOCUMENT["summary"]["sdpa_flash forward"]
    assert (figures["faster"], figures["even"], figures["slower"]) == (1, 1, 1)
    assert (figures["min"], figures["min_at"]) == (0.8, "512 forward fp16")
    assert figures["geometric_mean"] == pytest.approx((0.8 * 1.001 * 1.3) ** (1 / 3))
    assert [result.case for result in site.losses(DOCUMENT)] == ["d128 512"]


def test_losses_are_marked_in_tables_and_listed(tmp_path: Path) -> None:
    files = shown(tmp_path, attention_forward=DOCUMENT)
    page = files[site.PAGE]
    assert '<td data-key="0.8" class="loss">▼ 0.80 ±0.4%</td>' in page  # in the list of losses
    assert page.count("▼ 0.80</td>") == 2  # in the table of colours, and as the least
    assert "no time" in page
    assert escape("no kernel for <this>") in page
    assert "late forward fp16: the 8 s were used up" in page
    assert "SM clock after each race 1700 to 1700 MHz" in page
    assert "**0.80** (512 forward fp16) | 1, 1, 1 |" in files[site.RESULTS]
    assert "NVIDIA X, driver 1.2, torch 2.13, SM clock" in files[site.RESULTS]


def test_without_results_that_is_said(tmp_path: Path) -> None:
    files = site.build(tmp_path)
    assert "No results are committed yet" in files[site.PAGE]
    assert "No results are committed yet" in files[site.RESULTS]


def test_suites_and_baselines_are_listed_with_their_sources(built: dict[str, str]) -> None:
    for suite in SUITES.values():
        assert f"**`{suite.name}`**: {suite.title}" in built[site.CASES]
        for case in suite.cases:
            assert case.source in built[site.CASES]
    assert "| `sdpa_cudnn` | cuDNN (torch SDPA) | attention | below" in built[site.TABLE]


def test_a_rate_of_a_decoding_suite_is_of_bytes(tmp_path: Path) -> None:
    document = race(row(512, 1.2), suite="decode", title="X", unit="gb_per_s")
    moved = Problem(seqlen_q=512, seqlen_k=512).bytes_moved
    page = shown(tmp_path, decode=document)[site.PAGE]
    assert f">{moved / 100.0 / 1e3:,.0f}</td>" in page
    assert ">GB/s</button>" in page
    assert "<svg" not in page  # no grid, no curves


def test_curves_are_of_ours_and_of_baselines_with_more_than_one_length() -> None:
    assert series_of(DOCUMENT) == {
        (128, False): {
            "ours": {512: 300.0, 1024: 300.0, 2048: 300.0, 4096: 300.0},
            "Flash": {512: 250.0, 1024: 250.0, 2048: 250.0},
        }
    }
    assert draw(race(row(512, 1.0)), {}) is None
    assert draw(DOCUMENT, {"a limit": 600.0}) == draw(DOCUMENT, {"a limit": 600.0})


def test_a_limit_is_the_measured_one_where_it_was_measured() -> None:
    by_spec = limits_of("H200", None)
    assert list(by_spec) == ["mma.sync, by the specification", "wgmma, by the specification"]
    assert by_spec["wgmma, by the specification"] == pytest.approx(989.4, rel=1e-3)
    up = {"ceilings": {"mma_fp16": {"value": 6.6e14}, "wgmma_fp16": {"kind": "crashed"}}}
    both = limits_of("H200", up)
    assert list(both.values()) == [pytest.approx(660.0), by_spec["wgmma, by the specification"]]
    assert len(limits_of("A100", None)) == 1  # no wgmma there
    assert limits_of("unknown", None) == {}


def test_small_sections_are_there_where_their_file_is(tmp_path: Path) -> None:
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
        "retention_decode": {
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
    headings = (
        "Bringing the GPU up", "C++ beside Python", "Decoding with retention", "First call without"
    )  # fmt: skip
    empty = site.build(tmp_path)[site.PAGE]
    assert not any(heading in empty for heading in headings)
    page = shown(tmp_path, **files)[site.PAGE]
    assert all(heading in page for heading in headings)
    assert ">4.27</td>" in page
    assert ">0.89</td>" in page  # of what the specification says
    assert "ex2" not in page
    assert "ceilings 20 s, total 300 s" in page
    assert ">10.0</td>" in page  # percent of gain
    assert ">driver</td>" in page
    assert ">1.0123</td>" in page
    assert ">11.00</td>" in page
    assert ">the same</td>" in page
    assert ">no</td>" in page
    assert "400 rounds may differ by 3%: 1 of 2 cases agree" in page
    assert "rested 3 times as long as one took" in page
    assert ">93%</td>" in page
    assert "NVIDIA X, torch 2.13" in page
    assert ">0.750</td>" in page
    assert "3 processes" in page
    assert page.index("<h3>Decoding with retention") < page.index("<h3>C++ beside Python")


def test_rows_of_several_runs_show_the_first_and_the_last_time() -> None:
    runs = {
        day: {"environment": {"gpu_name": "NVIDIA X", "time_utc": f"2026-11-{day}"}}
        for day in ("22", "20", "21")
    }
    assert site.place_of({"runs": runs}) == "NVIDIA X, 2026-11-20, 2026-11-22"
    assert site.place_of({"environment": {"gpu_name": "NVIDIA X"}}) == "NVIDIA X"


# --- the READMEs ----------------------------------------------------------------------------------


def test_the_readmes_are_rewritten_between_their_markers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in report.LANGUAGES:
        (tmp_path / name).write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    arguments = ["--results", str(tmp_path / "results"), "--root", str(tmp_path)]
    results.write(tmp_path / "results" / "nvidia-x" / "attention_forward.json", DOCUMENT)
    assert report.main([*arguments, "--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert report.main(arguments) == 0
    english, chinese = ((tmp_path / name).read_text() for name in report.LANGUAGES)
    assert english.startswith(f"before\n{readme.BEGIN}\nOur speed over the other's on one NVIDIA X")
    assert english.endswith(f"\n{readme.END}\nafter\n")
    assert "| attention | forward | Flash | 3 | 1.01 | **0.80** |" in english
    assert "| 注意力 | 前向 | Flash | 3 | 1.01 | **0.80** |" in chinese
    assert report.main([*arguments, "--check"]) == 0


def test_a_baseline_stands_once_and_in_bold_where_it_beats_us() -> None:
    def summary(**means: float) -> dict[str, Any]:
        return {
            name.replace("__", " "): {"geometric_mean": mean, "min": mean - 0.5, "problems": 3}
            for name, mean in means.items()
        }

    titles = {"baselines": {"sdpa_flash": "Flash", "sdpa_cudnn": "cuDNN", "flex": "Flex"}}
    documents = {
        "attention_forward": {**titles, "summary": summary(sdpa_flash__forward=1.5)},
        "attention_backward": {
            **titles,
            "summary": summary(
                sdpa_flash__backward=1.1,
                sdpa_flash__step=1.05,
                sdpa_flash__autograd=1.3,
                sdpa_cudnn__backward=0.7,
                sdpa_cudnn__step=0.9,  # by less than the backward pass alone
                deterministic=0.9,
            ),
        },
        "models": {
            **titles, "summary": summary(sdpa_flash__forward=2.0, sdpa_cudnn__forward=0.6, flex__step=1.6)
        },
    }  # fmt: skip
    rows = [readme.cells(row, readme.ENGLISH) for row in readme.rows_of(documents)]
    assert rows == [
        ["attention", "forward", "Flash", "3", "1.50", "1.000"],
        ["attention, layers of models", "forward", "**cuDNN**", "3", "**0.60**", "**0.10**"],
        ["attention", "backward", "Flash", "3", "1.10", "**0.60**"],
        ["attention", "backward", "**cuDNN**", "3", "**0.70**", "**0.20**"],
        ["attention", "forward + backward", "Flash", "3", "1.05", "**0.55**"],
        ["attention, layers of models", "forward + backward", "Flex", "3", "1.60", "1.10"],
    ]


@pytest.mark.parametrize(
    "text", ["", readme.BEGIN, f"{readme.END}{readme.BEGIN}", readme.BEGIN * 2]
)
def test_markers_must_be_there_once_and_in_order(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        readme.replaced(text, "new")


# --- how it looks ---------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to lay the page out")
def test_nothing_overflows_or_overlaps(built: dict[str, str], tmp_path: Path) -> None:
    assert {width: layout(built[site.PAGE], width, tmp_path) for width in WIDTHS} == {
        width: [] for width in WIDTHS
    }


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to lay the page out")
def test_the_look_reports_faults(tmp_path: Path) -> None:
    paragraph = '<p style="width:900px">wide</p>'
    svg = '<svg width="90" height="40"><text y="20">one</text><text x="3" y="20">two</text>'
    svg += '<text x="80" y="39">outside</text></svg>'
    complaints = layout(f"<!doctype html><body>{paragraph}{svg}</body>", 420, tmp_path)
    assert "the page scrolls sideways" in complaints
    assert "off the page: p wide" in complaints
    assert 'on "two": text one' in complaints
    assert "cut off: text outside" in complaints
