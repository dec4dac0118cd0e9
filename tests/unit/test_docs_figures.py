"""Figures in the prose of pages, held to the result files that they are from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import geometric_mean
from typing import Any

import pytest

from attention_autotuner.tuning.sampling import GRAPH_BELOW_US
from tests.result_files import result, summary
from tests.snippets.pages import REPOSITORY


def words_of(page: str) -> str:
    """A page's text with line breaks as spaces."""
    return " ".join((REPOSITORY / "docs" / page).read_text(encoding="utf-8").split())


def shown(benchmark: str, baseline: str, mode: str) -> tuple[str, str]:
    """Geometric mean and least of our speed over a baseline's, as pages show them."""
    mean, least = summary(benchmark, baseline, mode)
    return f"{mean:.2f}", f"{least:.2f}"


def training() -> Iterator[str]:
    slower = 1 / result("attention_backward")["summary"]["deterministic"]["geometric_mean"]
    yield f"over the benchmarks' grid they take {slower:.2f} times as long on an H200"
    report = result("train_gpt")
    runs, agreement = report["runs"], report["agreement"]
    yield f"On an H200, {report['steps']} steps"
    yield f"differ by {agreement['mean_ratio']:.2f} of the noise on average"
    yield f"and {agreement['worst_ratio']:.2f} at worst"
    ours, sdpa, other = (
        f"{runs[name]['step_ms']:.2f}"
        for name in ("flash_attn_func", "SDPA", "SDPA, other backend")
    )
    yield f"a step takes {ours} ms, with SDPA as torch chooses it {sdpa}, with its other backend {other};"
    (peak,) = {f"{runs[n]['peak_bytes'] / 2**20:.0f}" for n in ("flash_attn_func", "SDPA")}
    yield f"{peak} MiB at peak with either"
    for name in ("train_gpt_compiled", "train_gpt_compiled_4k"):
        bars = result(name)["bars"]["all"]
        ours, flash, cudnn = (
            f"{bars['step_ms'][name]:.2f}"
            for name in ("flash_attn_func", "SDPA, flash", "SDPA, cuDNN")
        )
        yield f"a step takes {ours} ms, {flash} with SDPA's FlashAttention-2 and {cudnn} with its cuDNN,"
        yield f"{bars['time']:.2f} of the faster one's; the gap of losses is {bars['gap']:.2f}"


def cpp() -> Iterator[str]:
    report = result("cpp_agreement")
    count = {6: "six"}[len(report["cases"])]
    worse = f"{report['bar'] * 100:.0f} %"
    yield f"times {count} cases by each in turn, and fails where digests differ or medians"
    yield f"medians do by more than {worse}"
    yield f"A case takes {report['rounds']} rounds"
    assert report["rest"] == 3.0
    yield "Both sides rest three times as long"
    yield f"a graph for launches below {GRAPH_BELOW_US:.0f} us"
    yield f"Kernels under {GRAPH_BELOW_US:.0f} us are timed by CUDA graphs"


def score_modifications() -> Iterator[str]:
    rows = {(r["case"], *r["modes"]): r["ratios"] for r in result("score_modifications")["rows"]}
    for case in ("alibi_4k", "softcap_4k", "sinks_4k", "window_16k", "window_sinks_16k"):
        both = [
            [rows[case, mode].get(f"{over} {mode}") for mode in ("forward", "backward")]
            for over in ("plain", "flex")
        ]
        cells = [
            " and ".join(f"{r['ratio']:.2f}" for r in pair) if all(pair) else "-" for pair in both
        ]
        yield f" | {' | '.join(cells)} |"


def readme() -> Iterator[str]:
    three, four, cudnn, two = (
        shown("attention_backward", name, "backward")[0]
        for name in ("flash_attn_3", "flash_attn_4", "sdpa_cudnn", "sdpa_flash")
    )
    yield f"backward {three}x flash-attn 3, {four}x flash-attn 4, {cudnn}x cuDNN and {two}x FlashAttention-2;"


def matmul() -> Iterator[str]:
    mean, least = shown("gemm", "cublas", "forward")
    yield f"{mean} of cuBLAS in geometric mean over 8 shapes, least {least},"


def bundles() -> Iterator[str]:
    assert result("first_call")["bar_seconds"] == 1.0
    yield "to one second"


def troubleshooting() -> Iterator[str]:
    builds = result("kernel_log")["attention_backward"]["builds"]
    yield f"of {builds['kernels']} kernels the slowest took {builds['slowest_seconds']:.0f} s"


def greatest(suite: str, baseline: str) -> str:
    ratios = (row["ratios"].get(baseline) for row in result(suite)["rows"])
    return f"{max(ratio['ratio'] for ratio in ratios if ratio):.2f}"


def _mean_at(dim: int, name: str) -> str:
    """The grid's geometric mean of a ratio at one head dim."""
    rows = result("attention_backward")["rows"]
    backward = [row for row in rows if "backward" in row["modes"]]
    ratios = [row["ratios"] for row in backward if row["problem"].get("dim_qk", 128) == dim]
    return f"{geometric_mean([x[name]['ratio'] for x in ratios]):.2f}"


def _over_compiled(mode: str) -> list[str]:
    """Our speed over torch.compile's for retnet with a mask, in the order of the cases."""
    rows = [row for row in result("retnet")["rows"] if row["modes"] == [mode]]
    return [f"{row['ratios'][f'compiled {mode}']['ratio']:.2f}" for row in rows]


def kernel_log() -> Iterator[str]:
    log, measured = result("kernel_log"), result("bring_up")
    mma = max(log["mma_sync"]["fma_per_clk_per_sm_by_warps"].values())
    rate, sms = measured["ceilings"]["wgmma_fp16"], measured["environment"]["num_sms"]
    wgmma = rate["value"] / rate["sm_clock_hz"] / sms / 2
    yield f"peaks at {mma:.0f} FMA per clock and SM here ({log['mma_sync']['tflops']:.0f} TFLOP/s"
    yield f"{mma / wgmma * 100:.0f} % of the {wgmma:.0f} that wgmma reaches"
    by_mma = log["attention_forward_by_mma_sync"]
    mean, least = (f"{by_mma['sdpa_flash'][figure]:.2f}" for figure in ("geometric_mean", "min"))
    yield f"The whole grid with version 6, tuned picks: geometric mean {mean}, least {least}, and"
    yield f"and {by_mma['sdpa_cudnn']['geometric_mean']:.2f} of cuDNN (`kernel_log.json`"
    for suite, baselines in (
        ("attention_forward", ("sdpa_cudnn",)),
        ("head_dims", ("sdpa_cudnn", "flash_attn_4")),
    ):
        for name in baselines:
            title = {"sdpa_cudnn": "cuDNN", "flash_attn_4": "flash-attn 4"}[name]
            yield f"{shown(suite, name, 'forward')[0]} of {title}"
    yield " and ".join(
        shown("attention_forward", name, "forward")[0] for name in ("sdpa_flash", "flash_attn_4")
    )
    cudnn, flash = (
        shown("attention_forward_bf16", name, "forward")[0] for name in ("sdpa_cudnn", "sdpa_flash")
    )
    yield f"{cudnn} of cuDNN, {flash} of FlashAttention-2 |"
    flash, cudnn, copy = (
        shown("decode", name, "forward")[0] for name in ("sdpa_flash", "sdpa_cudnn", "copy")
    )
    yield f"Measured in bf16: {copy} of a copy in geometric mean"
    yield f"Over SDPA's FlashAttention-2 {flash}, over cuDNN {cudnn}:"
    by_mma = result("kernel_log_races")["attention_backward_by_mma_sync"]
    (mean, least), (step, least_step) = (
        (f"{figures['geometric_mean']:.2f}", f"{figures['min']:.2f}")
        for figures in (by_mma[f"sdpa_flash {mode}"] for mode in ("backward", "step"))
    )
    yield f"The whole grid, tuned picks: geometric mean {mean}, least {least}; forward and backward"
    yield f"forward and backward together {step} and {least_step}; and "
    yield f"and {by_mma['sdpa_cudnn backward']['geometric_mean']:.2f} of cuDNN (`kernel_log.json`"
    yield f"It takes {1 / by_mma['deterministic']['geometric_mean']:.2f} times as long as the pick"
    mean, least = shown("attention_backward", "sdpa_cudnn", "backward")
    flash = shown("attention_backward", "sdpa_flash", "backward")[0]
    yield f"{mean} of cuDNN in geometric mean, least {least}; {flash} of FlashAttention-2;"
    steps = [shown("attention_backward", name, "step")[0] for name in ("sdpa_cudnn", "sdpa_flash")]
    yield f"forward and backward together {steps[0]} and {steps[1]}."
    for shape, us in log["attention_backward_sm90_early"]["us"].items():
        cells = [f"{time:.1f}" for time in us.values()]
        yield f"| {' | '.join([shape, *cells, *['-'] * (4 - len(cells))])} |"
    for suite in ("attention_forward", "attention_forward_bf16", "head_dims"):
        yield f"{shown(suite, 'flash_attn_3', 'forward')[0]} of flash-attn 3"
    three = shown("attention_backward", "flash_attn_3", "backward")[0]
    same_bits = result("attention_backward")["summary"]
    peer = "flash_attn_4_deterministic backward"
    dims, same = ([_mean_at(d, x) for d in (64, 128, 256)] for x in ("flash_attn_3 backward", peer))
    yield f"of flash-attn 3 {three}: {dims[0]} at d64, {dims[1]} at d128 and {dims[2]} at d256"
    assert same_bits[peer]["min_at"].startswith("d64_8k ")
    yield f"it takes {1 / same_bits['deterministic']['geometric_mean']:.2f} times as long as the usual mode"
    yield f"has {same[0]}, {same[1]} and {same[2]} of the speed of flash-attn 4's deterministic mode"
    yield f"at d64, d128 and d256, least {same_bits[peer]['min']:.2f} (d64, 8k), and"
    for shape, us in list(log["attention_backward_sm90_queued"]["us"].items())[:12]:
        queued = min(time for name, time in us.items() if "queued" in name)
        yield f"| {shape} | {us['no order']:.0f} | {us['two passes']:.0f} | {queued:.0f} |"
    ahead, back, both = map(_over_compiled, ("forward", "backward", "step"))
    yield f"{ahead[0]} and {ahead[1]} times `torch.compile` at 256/512, {ahead[2]} at 256, {ahead[3]} at 128"
    yield f"and {ahead[4]} at 64, **geometric mean {shown('retnet', 'compiled', 'forward')[0]}**"
    yield f"{', '.join(back[:4])} and {back[4]} times `torch.compile`, geometric mean"
    yield f"geometric mean {shown('retnet', 'compiled', 'backward')[0]}**; whole steps {', '.join(both[:4])}"
    yield f"and {both[4]}, mean {shown('retnet', 'compiled', 'step')[0]}."
    tuned = [
        shown("retnet", "compiled_autotuned", mode)[0] for mode in ("forward", "backward", "step")
    ]
    yield f"products (`retnet_max_autotune`): {tuned[0]} forward, {tuned[1]} backward and {tuned[2]} in steps."
    narrow = next(
        row
        for row in result("retnet")["rows"]
        if row["case"] == "b8_h16_s2048_d128_128" and row["modes"] == ["backward"]
    )
    operations = 6 * 2 * 8 * 16 * 2048**2 * 128
    ours, compiled = (
        operations / narrow["entries"][name]["median_us"] / 1e6
        for name in ("pick", "compiled backward")
    )
    product = next(row for row in result("gemm")["rows"] if row["title"] == "8192 x 8192 x 8192")
    yield f"its six products run at {ours:.0f} TFLOP/s"
    yield f"at {product['entries']['pick']['tflops']:.0f} (8192 x 8192 x 8192, `gemm.json`)"
    yield f"1.6 times `torch.compile` would be {1.6 * compiled:.0f}."
    spared = result("kernel_log_races")["retnet_backward_spared_registers"]
    *usual, unusual = sorted(
        [
            *spared["torch_compile_us"]["d128/128"],
            narrow["entries"]["compiled backward"]["median_us"],
        ]
    )
    assert len(usual) == 7
    yield f"took {usual[0]:.0f} to {usual[-1]:.0f} us in seven runs, and {unusual:.0f} in one where"
    first_races = [race["us"][0] for race in spared["races"]]
    for name, label in (("before", "before"), ("kept", "64 columns kept")):
        yield f"| {label} | {first_races[0][name]:.0f} | {first_races[1][name]:.0f} | {first_races[2][name]:.0f} |"
    times = {name: x["median_us"] for name, x in log["retnet_backward_decay"]["us"].items()}
    pairs = [
        [
            min(us for name, us in times.items() if f"_{family}_fp16_d{dim}x" in name)
            for family in ("sm90", "sm80")
        ]
        for dim in (256, 128, 64)
    ]
    yield " | ".join(f"{native:.0f}, {other:.0f}" for native, other in pairs)
    first, *others = (f"{other / native:.2f}" for native, other in pairs)
    yield f"{first}, {others[0]} and {others[1]} times as fast"
    by_mma = log["retnet"]["forward_by_mma_sync"]["geometric_mean"]
    yield f"geometric mean {by_mma:.2f}. Backward, tuned"
    yield f"geometric mean {log['retnet']['backward_by_mma_sync']['geometric_mean']:.2f} (both in"
    yield f"geometric mean {log['retnet_wgmma']['version_2']['geometric_mean']:.2f} (`kernel_log.json`)"
    before = log["retnet_wgmma_race_before"]["geometric_mean"]
    yield f"geometric mean {before['compiled_forward']:.2f}."
    yield f"geometric mean {before['compiled_backward']:.2f}, where"
    by_mma = log["retention_wgmma"]["forward_by_mma_sync"]["geometric_mean"]
    mean, least = shown("retention", "fla", "forward")
    most = greatest("retention", "fla forward")
    yield f"against fla: {least} to {most}, geometric mean {mean}, where `mma.sync` had {by_mma:.2f}"
    mean, least = shown("retention", "fla", "step")
    yield f"now {least} to {greatest('retention', 'fla step')}, geometric mean {mean}"


def retention_of_packed() -> Iterator[str]:
    ratios = result("kernel_log")["retention_packed_uneven"]["ratio_of_rows"]
    yield f"a row takes {ratios['forward']:.1f} times as long forward and {ratios['backward']:.1f} backward"


@pytest.mark.parametrize(
    ("page", "sentences"),
    [
        ("training.md", training),
        ("cpp.md", cpp),
        ("bundles.md", bundles),
        ("matmul.md", matmul),
        ("score_modifications.md", score_modifications),
        ("../README.md", readme),
        ("troubleshooting.md", troubleshooting),
        ("kernel_log.md", kernel_log),
        ("retention.md", retention_of_packed),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_figures_in_prose_are_those_of_the_results(page: str, sentences: Any) -> None:
    text = words_of(page)
    missing = [sentence for sentence in sentences() if sentence not in text]
    assert missing == []


# --- the tables of the kernel log -----------------------------------------------------------------


def rows_of(heading: str) -> dict[str, list[str]]:
    """Cells of the first table below a heading of the kernel log, by the number of the version."""
    text = (REPOSITORY / "docs" / "kernel_log.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d+)\. (.*) \|$", text.split(f"## {heading}\n")[1].split("\n## ")[0], re.M
    )
    return {number: rest.split(" | ") for number, rest in rows}


def shapes_of(group: Any, version: str) -> dict[tuple[int, int, bool], float]:
    """Our best speed over FlashAttention-2's of one development version, by head dim, length and mask."""
    runs = [run for run in group["runs"] if run["version"] in (version, f"{version}, more tiles")]
    speeds: dict[tuple[int, int, bool], float] = {}
    for shape in (shape for run in runs for shape in run["shapes"]):
        if "flash_attention_2_ms" in shape:
            fused = [ms for plan, ms in shape["ms"].items() if plan.startswith("fused")]
            speed = shape["flash_attention_2_ms"] / min(fused)
        else:
            fastest = shape["fastest"]
            rates = (
                fastest.values() if isinstance(fastest, dict) else [x["tflops"] for x in fastest]
            )
            speed = max(rates) / shape["flash_attention_2_tflops"]
        place = (shape.get("dim", shape.get("dim_qk")), shape["seqlen"], shape["causal"])
        speeds[place] = max(speed, speeds.get(place, 0.0))
    return speeds


FORWARD = ((4096, False), (4096, True), (512, False))
BACKWARD = ((1024, False), (8192, False), (1024, True), (8192, True))


@pytest.mark.parametrize(
    ("heading", "group", "versions", "columns"),
    [
        ("Attention forward, family sm80", "", "134", FORWARD),
        ("Attention backward, family sm80", "attention_backward", "134", BACKWARD),
    ],
    ids=["forward", "backward"],
)
def test_ratios_in_the_kernel_log_are_those_of_its_runs(
    heading: str, group: str, versions: str, columns: tuple[tuple[int, bool], ...]
) -> None:
    log, rows = result("kernel_log_sm80"), rows_of(heading)
    for version in versions:
        speeds = shapes_of(log[group] if group else log, version)
        cells = rows[version][2:5]
        for dim, cell in zip((64, 128, 256), cells, strict=True):
            ratios = [float(ratio) for ratio in re.findall(r"\d\.\d+", cell)]
            if ratios:  # the page's were rounded from times with more digits
                expected = [speeds[dim, seqlen, causal] for seqlen, causal in columns]
                assert ratios == pytest.approx(expected, abs=0.01), (version, dim)


def test_backward_defaults_between_buckets_are_as_the_log_says() -> None:
    races = result("kernel_log_races")["backward_defaults_between_buckets"]["races"]
    ratios = [
        race["us"][race["of_exact_length"]] / race["us"][race["of_bucket"]]
        for race in races
        if race["of_exact_length"] != race["of_bucket"]
        and 257 <= int(re.findall(r" s(\d+) ", race["shape"])[0]) <= 1500
    ]
    said = f"{geometric_mean(ratios):.2f} times as long over {len(ratios)} shapes of 257 to 1500"
    assert said in (REPOSITORY / "docs/kernel_log.md").read_text(encoding="utf-8")


def test_whole_tiles_found_once_are_as_the_log_says() -> None:
    races = result("kernel_log_races")["attention_backward_sm90_whole_tiles"]["races"]
    ratios = {
        race["shape"]: f"{race['us']['found once'] / race['us']['before']:.3f}"
        for race in races
        if {"found once", "before"} <= race["us"].keys()
    }

    def of(kind: str) -> list[str]:
        shapes = [f"{kind} d{dim} {seqlen}" for dim in (64, 128) for seqlen in (4096, 16384)]
        return [ratios[shape] for shape in shapes]

    prefix, documents, softcap = map(of, ("prefix", "documents", "softcap"))
    text = words_of("kernel_log.md")
    for sentence in (
        f"prefix {prefix[0]} and {prefix[1]} at d64 (4k and 16k tokens), {prefix[2]} and {prefix[3]} at d128",
        f"documents {', '.join(documents[:3])} and {documents[3]}",
        f"softcap {softcap[0]} and {softcap[1]}",
        f"| {softcap[2]} and {softcap[3]}: there are no registers",
    ):
        assert sentence in text


def test_queued_shares_are_as_the_log_says() -> None:
    races = result("kernel_log_races")["attention_backward_sm90_queued"]
    ratios = {
        race["shape"]: race["us"]["now"] / race["us"]["before"] for race in races["before_and_now"]
    }

    def spread(*starts: str) -> tuple[float, float, float]:
        those = [ratio for shape, ratio in ratios.items() if shape.startswith(starts)]
        return geometric_mean(those), min(those), max(those)

    (mean, _, _), (_, *of_64), (_, *of_128) = spread("d64", "d128"), spread("d64"), spread("d128")
    _, *windows = spread("window")
    text = words_of("kernel_log.md")
    for sentence in (
        f"deterministic mode takes {mean:.2f} of its time before in geometric mean",
        f"d64 {of_64[0]:.2f} to {of_64[1]:.2f}, d128 {of_128[0]:.2f} to {of_128[1]:.2f}), in windows "
        f"{windows[0]:.2f} to {windows[1]:.2f}",
        f"with four query heads a head of keys {ratios['bf16 d128 32/8 4096 causal']:.2f}, at d112 without a mask, "
        f"by turns now, {ratios['bf16 d112 4096']:.2f}.",
    ):
        assert sentence in text
    apart = {race["shape"]: race["us"] for race in races["apart"]}
    before, after = (f"c80t3x2 keys1 fixed share{how}" for how in ("", ", two threads, apart"))
    figures = [
        f"{apart[f'd128 {s}'][after] / apart[f'd128 {s}'][before]:.2f}"
        for s in (2048, 4096, 8192, 16384, 3333)
    ]
    assert "{} at 2k, {} at 4k, {} at 8k, {} at 16k, {} at 3333;".format(*figures) in text


def test_sections_of_heads_are_as_the_log_says() -> None:
    races = result("kernel_log_races")["attention_backward_sm90_sections"]
    ratios = {race["shape"]: race["ratio"] for race in races["before_and_now"]}

    def spread(start: str, *, without: str = " ") -> str:
        those = [
            ratio
            for shape, ratio in ratios.items()
            if shape.startswith(f"{start} ") and shape.split()[1] not in without.split()
        ]
        assert len(those) >= 3
        return f"{min(those):.2f} to {max(those):.2f}"

    others = "few gqa window causal"
    text = words_of("kernel_log.md")
    assert (
        f"deterministic mode takes {spread('d64', without=others)} of its time at d64 without a mask, "
        f"{spread('d64 causal')} with one, {spread('d64 window')} in windows, "
        f"{spread('d128', without=others)} at d128 without a mask"
    ) in text
    assert f"1.19 with a block an SM, {ratios['d128 gqa 3333']:.2f} and 1.08" in text
    waits = {race["shape"]: race["us"] for race in races["waits"]}
    claimed, fixed = (
        [waits[f"d64 {n}"][f"{how}, no waits"] / waits[f"d64 {n}"]["fixed share"] for n in counts]
        for how, counts in (("claimed", (4096, 8192, 16384)), ("fixed share", (4096,)))
    )
    assert (
        f"a fixed share {fixed[0]:.2f} at 4k to 16k, claimed blocks {claimed[0]:.2f}, {claimed[1]:.2f} "
        f"and {claimed[2]:.2f}"
    ) in text
    usual = {race["shape"]: race["ratio"] for race in races["usual_before_and_now"]}
    few_steps = [usual[f"d64 {n}"] for n in ("512", "1024", "2048", "causal 512", "causal 1024")]
    assert (
        "d64 {:.2f} at 512, {:.2f} at 1k, {:.2f} at 2k, causal {:.2f} and {:.2f}".format(*few_steps)
    ) in text


def test_queued_packed_sequences_are_as_the_log_says() -> None:
    races = result("kernel_log_races")["attention_backward_sm90_packed"]
    sections = {race["shape"]: race["us"] for race in races["sections"]}
    changed = {race["shape"]: race["us"] for race in races["modifications"]}
    text = words_of("kernel_log.md")

    def of_usual(shape: str, heads: int = 0) -> float:
        us = sections[shape]
        queued = us[f"queued, {heads} heads side by side" if heads else "queued, by the rule"]
        return queued / us["first shares stored, longest blocks first"]

    def of_passes(start: str) -> list[float]:
        ratios = [
            us["queued"] / us["two passes"] for s, us in changed.items() if s.startswith(start)
        ]
        return [min(ratios), max(ratios)]

    plain = [
        changed[f"plain {dim} packed{causal}"]["queued"]
        / changed[f"plain {dim} packed{causal}"]["two passes"]
        for causal in (" causal", "")
        for dim in ("d64", "d128")
    ]
    times = [us["queued"] / us["usual mode"] for us in changed.values()]
    of_mode = [min(times), max(times)]
    equal = [of_usual(f"d128 {shape}") for shape in ("8x2k", "4x4k", "2x8k", "4x8k")]
    for sentence, figures in (
        (
            "over two passes {:.2f} and {:.2f} causal at d64 and d128, {:.2f} and {:.2f} without",
            plain,
        ),
        (
            "over the usual mode {:.2f} causal and {:.2f} without a mask",
            [of_usual("d64 causal", 1), of_usual("d64 full", 1)],
        ),
        (
            "causal {:.2f} at both dims, {:.2f} without a mask at d64 and {:.2f} at d128",
            [of_usual("d64 causal", 16), of_usual("d64 full"), of_usual("d128 full", 16)],
        ),
        (
            "32 of 512 tokens {:.2f} at both, six of 512 to 8192 {:.2f} at both",
            [of_usual("d128 short causal", 8), of_usual("d128 long causal", 4)],
        ),
        (
            "32/8 heads {:.2f} and {:.2f}.",
            [of_usual("d64 gqa causal", 4), of_usual("d128 gqa causal", 2)],
        ),
        ("{:.2f} with 2k, {:.2f} with 4k, {:.2f} and {:.2f} with two and four of 8k", equal),
        ("{:.2f} with one of 16k", [of_usual("d128 one causal", 2)]),
        (
            "| {:.2f} and {:.2f} of the usual mode, which adds in bulk",
            [of_usual("d128 1 head causal"), of_usual("d64 3 heads causal")],
        ),
        ("sinks {:.2f} to {:.2f}", of_passes("sinks")),
        ("ALiBi {:.2f} to {:.2f}", of_passes("alibi")),
        ("a softcap {:.2f} to {:.2f}", of_passes("softcap")),
        (
            "a bias {:.2f} to {:.2f}; of the usual mode's time {:.2f} to {:.2f}",
            [*of_passes("bias"), *of_mode],
        ),
    ):
        assert sentence.format(*figures) in text
