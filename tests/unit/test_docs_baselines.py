"""Figures of pages about baselines, held to the result files that they are from."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

from attention_autotuner.arch import resolve
from attention_autotuner.core.problem import Problem
from benchmarks.default_races import default_of, read_races, without_stages
from benchmarks.results import LEVEL, ratio_text
from tests.result_files import result
from tests.unit.test_docs_figures import greatest, shown, words_of

RACES = Path("benchmarks/results/nvidia-h200/forward_splits_tall.json.xz")


def ratios_of(suite: str, case: str) -> list[str]:
    """Our speed over flash-attn 3's forward and backward in one case."""
    rows = {(row["case"], row["modes"][0]): row["ratios"] for row in result(suite)["rows"]}
    modes = ("forward", "backward")
    return [f"{rows[case, mode][f'flash_attn_3 {mode}']['ratio']:.2f}" for mode in modes]


def test_the_kernel_log_has_those_of_flash_attn_3() -> None:
    text = words_of("kernel_log.md")
    decoding, least = shown("decode", "flash_attn_3", "forward")
    most = greatest("decode", "flash_attn_3 forward")
    same, least_same = shown("attention_backward", "flash_attn_3_deterministic", "backward")
    dims = shown("head_dims", "flash_attn_3", "backward")[0]
    (forward, backward), (windowed, back) = (
        ratios_of("score_modifications", case) for case in ("softcap_4k", "window_16k")
    )
    changed = result("kernel_log_races")["flash_attn_3_changed_scores"]["rows"]
    assert len(changed) == 16
    ahead, back_too = (
        [row["ratio"]["ratio"] for key, row in changed.items() if mode in key]
        for mode in ("forward", "backward")
    )
    for sentence in (
        f"as its own rules have it, {decoding}: from {least}, at the same batch of 64, to {most} at d64.",
        f"{same} of flash-attn 3's, which has none at d256, least {least_same}.",
        f"{dims} of flash-attn 3, which is 2 % ahead at d192,",
        f"{forward} and {windowed} of flash-attn 3 forward, {backward} and {back} backward",
        f"{min(ahead):.2f} to {max(ahead):.2f} forward and {min(back_too):.2f} to {max(back_too):.2f} backward",
    ):
        assert sentence in text
    assert ratios_of("head_dims", "d192_4k")[1] == "0.98"
    assert result("decode")["summary"]["flash_attn_3 forward"]["slower"] == 0


def test_gradients_that_disagree_are_not_timed() -> None:
    rows = {row["case"]: row for row in result("head_dims")["rows"] if "backward" in row["modes"]}
    for case in ("d72_4k", "d80_4k", "d112_4k"):
        entry = rows[case]["entries"]["flash_attn_4 backward"]
        assert "its results differ from ours by 1." in entry["outcome"]["reason"]
        for name in ("flash_attn_3", "sdpa_cudnn", "sdpa_flash"):
            assert rows[case]["ratios"][f"{name} backward"]["ratio"] > 1
    assert "At d72, d80 and d112 flash-attn 4's gradients" in words_of("kernel_log.md")


def test_sdpa_of_packed_sequences_waits_for_the_host() -> None:
    waits = result("packed_sequences")["rows"][0]["ratios"]["sdpa_flash forward"]
    said = f"{waits['ratio']:.2f} is ±{100 * LEVEL * waits['error']:.0f} %,"
    assert said in words_of("packed_sequences.md")


def test_the_page_about_decoding_has_the_results() -> None:
    page = words_of("decoding.md")
    rows = {row["case"]: row for row in result("decode")["rows"]}
    baselines = ("copy", "flash_attn_3", "flash_attn_4", "sdpa_cudnn", "sdpa_flash")
    for title, case in (
        ("one query on 8k keys, 32/8 heads of 128", "llama3_8b_batch_1_1_on_8k"),
        ("the same with 128k keys", "llama3_8b_batch_1_1_on_128k"),
        ("16 sequences, one query on 8k", "llama3_8b_batch_16_1_on_8k"),
        ("16 sequences, 16 queries on 8k", "llama3_8b_batch_16_16_on_8k"),
        ("64 sequences, one query on 8k", "llama3_8b_batch_64_1_on_8k"),
        ("16 sequences, heads of 64", "d64_batch_16_1_on_8k"),
        ("16 sequences, heads of 256", "d256_batch_16_1_on_8k"),
        ("16 sequences, 192/128, 16 heads", "d192_128_batch_16_1_on_8k"),
    ):
        ratios = [rows[case]["ratios"].get(f"{name} forward") for name in baselines]
        cells = [f"{rows[case]['entries']['pick']['median_us']:.1f}"]
        cells += ["-" if ratio is None else ratio_text(ratio["ratio"]) for ratio in ratios]
        assert f"| {title} | {' | '.join(cells)} |" in page


def test_the_page_about_decoding_has_the_races_of_chunks(repository: Path) -> None:
    page, choose = words_of("decoding.md"), default_of(resolve("H200"))
    others = {
        row["case"]: row for row in result("small_batches")["rows"] if row["modes"] == ["forward"]
    }
    races = read_races(repository / RACES)
    were_behind = []
    for title, case, shape in (
        ("512 queries on 32k keys, 4/1 heads", "llama3_8b_8_ranks_512_on_32k", "h4/1 s512x32768"),
        ("2k on 16k, 4/1", "llama3_8b_8_ranks_2k_on_16k", "h4/1 s2048x16384"),
        ("512 on 128k, 8/1", "llama3_70b_8_ranks_512_on_128k", "h8/1 s512x131072"),
        ("512 on 8k, 16/4", "llama3_8b_2_ranks_512_on_8k", "h16/4 s512x8192"),
        ("64 on 8k, 32/8", "llama3_8b_64_on_8k", "h32/8 s64x8192"),
    ):
        race = next(r for r in races if r.problem.describe().endswith(f" b1 {shape} d128 causal"))
        low = min(us for label, us in race.us.items() if "_overlap_" in label)
        cells = [low, race.us[without_stages(choose(race.problem))]]
        cells.append(others[case]["entries"]["flash_attn_3 forward"]["median_us"])
        if cells[2] < cells[0]:
            were_behind.append(others[case]["ratios"]["flash_attn_3 forward"]["ratio"])
        assert f"| {title} | {' | '.join(f'{us:.1f}' for us in cells)} |" in page
    assert len(were_behind) == 4
    said = f"these four rows have {min(were_behind):.2f} to {max(were_behind):.2f} now."
    assert said in words_of("kernel_log.md")
    assert result("small_batches")["summary"]["flash_attn_3 forward"]["slower"] == 0


def test_the_kernel_log_has_the_steps_of_grouped_heads() -> None:
    rows = {(row["case"], row["modes"][0]): row for row in result("models")["rows"]}
    cases = ("llama3_8b_8k", "llama3_70b_8k", "qwen2_5_7b_4k")
    raced = [rows[case, "backward"] for case in cases]
    theirs, ours = (
        [row["entries"][label]["median_us"] for row in raced]
        for label in ("flash_attn_3 backward", "pick")
    )
    said = [f"{a:.0f}, {b:.0f} and {c:.0f}" for a, b, c in (theirs, ours)]
    log = words_of("kernel_log.md")
    assert f"take it {said[0]} us, and us {said[1]}" in log
    three, four = (
        "{:.2f}, {:.2f} and {:.2f}".format(
            *(row["ratios"][f"{name} backward"]["ratio"] for row in raced)
        )
        for name in ("flash_attn_3", "flash_attn_4")
    )
    assert f"of Qwen2.5 7B have {three} of flash-attn 3 and {four} of flash-attn 4" in log


HEADS_OF_PACKED = {
    "packed_16k": "16",
    "packed_llama3_8b": "32/8, Llama-3 8B",
    "packed_llama3_70b": "64/8, Llama-3 70B",
    "packed_llama3_70b_tp8": "8/1, the same on 8 GPUs",
    "packed_qwen2_5_7b": "28/4, Qwen2.5 7B",
}
PARTS_OF_PACKED = """
18 sequences, 8/1: B1 S3 T3
18 sequences, 16/2: B1 S2 T2
2048, 1024, 2 x 512, 64/8: B1 S2
2048, 1024, 2 x 512, 8/1: B1 S8
4 x 4096, 64/8: Q1 S3 T3
4 x 4096, 28/4: B1 S3 T3
1 x 8192, 8/1: B1 S4 T4
1 x 8192, 28/4: B1 S2 T2
1 x 8192, 64/8: B1 S3 T3
1 x 16384, 64/8: S1 S3 T3
1 x 16384, 8/1: B1 S4 T4
6000 and 7 short ones, 64/8: B1 S2 T2
6000 and 7 short ones, 8/1: B1 S8
"""  # the kernel before, the one with parts and a tail, and the one in longer steps; with its parts


def test_packed_sequences_are_as_their_page_and_the_log_say() -> None:
    rows = {(row["case"], row["modes"][0]): row for row in result("packed_sequences")["rows"]}
    modes = ("forward", "backward")

    def ratio(case: str, name: str, mode: str) -> str:
        return f"{rows[case, mode]['ratios'][f'{name} {mode}']['ratio']:.2f}"

    def both(case: str, name: str) -> str:
        return " and ".join(ratio(case, name, mode) for mode in modes)

    page = Path("docs/packed_sequences.md").read_text(encoding="utf-8")
    for case, heads in HEADS_OF_PACKED.items():
        names = ("flash_attn_3", "flash_attn_4", "equal_lengths")
        assert f"| {heads} | {' | '.join(both(case, name) for name in names)} |" in page
    assert f"with 16 heads it has {both('packed_16k', 'sdpa_flash')}: it waits" in page
    three, four = (
        "{}, {}, {} and {}".format(
            *(ratio(case, name, "backward") for case in list(HEADS_OF_PACKED)[1:])
        )
        for name in ("flash_attn_3", "flash_attn_4")
    )
    said = f"have {three} of flash-attn 3 and {four} of flash-attn 4, with 18"
    assert said in words_of("kernel_log.md")


def test_the_kernel_log_has_the_races_of_packed_parts() -> None:
    runs = result("kernel_log_races")["attention_backward_packed_parts"]
    page = Path("docs/kernel_log.md").read_text(encoding="utf-8")
    for line in PARTS_OF_PACKED.strip().splitlines():
        case, _, raced = line.rpartition(": ")
        kernels = raced.split()
        us = [
            runs[name]["rested_us"].get(case) for name in ("before", "with_tails", "longer_steps")
        ]
        cells = [f"{of[kernel]:.0f}" for of, kernel in zip(us, kernels, strict=False)]
        cells += ["-"] * (3 - len(kernels)) + [f"{us[len(kernels) - 1]['flash_attn_3']:.0f}"]
        assert f"| {case} | {' | '.join(cells)} |" in page


def test_defaults_of_packed_modified_sequences_are_as_the_log_says() -> None:
    raced, log = packed_modified_races(), words_of("kernel_log.md")
    chosen = [(us[name], us) for us, name in raced]
    before = geometric_mean([us / others["default before"] for us, others in chosen])
    fastest = geometric_mean([us / min(others.values()) for us, others in chosen])
    assert len(raced) == 80
    said = f"{before:.2f} of the time of those before in the geometric mean, and {fastest:.3f}"
    assert said in log
    dims = result("kernel_log_races")["attention_backward_packed_parts"]["other_dims_us"]
    of_groups: dict[bool, list[float]] = {True: [], False: []}
    for label, us in dims.items():
        of = {way: t for way in ("stored", "queued") for name, t in us.items() if way in name}
        if len(of) == 2:
            of_groups[not label.endswith("16/16")].append(of["stored"] / of["queued"])
    grouped, alone = (f"{min(x):.2f} to {max(x):.2f}" for x in of_groups.values())
    said = f"take {grouped} of the time of queued ones where heads share keys, and {alone} where"
    assert said in log


def packed_modified_races() -> list[tuple[dict[str, float], str]]:
    """Times of kernels of each race of packed modified sequences, and the name of the default's of today."""
    run = result("kernel_log_races")["attention_backward_packed_parts"]
    races = []
    for label, us in run["modified_us"].items():
        modified, *of_lengths, heads = label.split(", ")
        lengths = run["lengths"][", ".join(of_lengths)]
        window = int(modified.split()[1]) - 1 if modified.startswith("window") else -1
        names: dict[str, tuple[str, ...]] = {"ALiBi": ("alibi_slopes",), "softcap": ("softcap",)}
        heads_q, heads_kv = map(int, heads.split("/"))
        problem = Problem(
            direction="backward", dtype="bf16", causal=True, batch=len(lengths), heads_q=heads_q,
            heads_kv=heads_kv, seqlen_q=max(lengths), seqlen_k=max(lengths), dim_qk=128, dim_v=128,
            packed_rows=(sum(lengths),) * 2, window_size=(window, -1),
            modifications=names.get(modified, ()),
        )  # fmt: skip
        default = resolve("H100").default(problem).name.partition("_fused_keys_")[2]
        for usual in ("_raster_persistent_early_gathered", "_early_gathered", "_c16"):
            default = default.replace(usual, "")
        races.append((us, default))
    return races


def test_the_kernel_log_has_the_races_of_parts() -> None:
    run, log = result("kernel_log_races")["attention_backward_parts"], words_of("kernel_log.md")
    shown = 0
    for race in run["races"]:
        b, h, s, dim, _ = race["shape"].split()
        times = race["us"], race["us_at_the_power_limit"]
        cells = [
            ", ".join(f"{us[part]:.0f}" for us in times) if part in times[0] else "-"
            for part in ("1 part", "2 parts", "3 parts", "4 parts", "flash-attn 3")
        ]
        row = f"| {b[1:]} x {h[1:]} x {s[1:]} | {' | '.join(cells)} |"
        shown += dim == "d128" and row in log
    assert shown == 7
    moved = [kernels["pass"]["dram_mb"] / 1e3 for kernels in run["traffic"]]
    said = "moves {:.1f} GB in one part, {:.1f} in two, {:.1f} in three and {:.1f} in four"
    assert said.format(*moved) in log
    alone = {race["kernel"]: f"{race['us']:.0f}" for race in run["one_at_a_time"]}
    ours, in_lists = alone["g2c80t3x2 claimed, 1 part"], alone["g2c64t3x2 in 32 lists"]
    assert f"took {alone['flash-attn 3']} us with 64/8 heads of 8192 tokens and ours {ours}" in log
    assert f"in 32 lists, which takes {in_lists} us" in log
    in_turn, (before, *_) = run["in_turn"]["us"], run["before"]
    limited = before["us_at_the_power_limit"]
    ratios = [us["2 parts"] / us["1 part"] for us in (in_turn, limited)]
    assert f"two parts took {ratios[0]:.3f} times as long there, and {ratios[1]:.2f} alone" in log
    earlier = run["suites_before"]["ratios"]
    backward = [x for key, x in earlier["models"].items() if " backward " in key]
    three, four = (
        [ratio_text(x[name]) for x in backward] for name in ("flash_attn_3", "flash_attn_4")
    )
    said = ", and ".join("{}, {} and {}".format(*ratios) for ratios in (three, four))
    assert f"of flash-attn 4, {said} before." in log
    few_heads = [x["flash_attn_3"] for x in earlier["small_batches"].values()]
    slower = [ratio for ratio in few_heads if ratio < 1]
    assert len(slower) == 4
    assert f"8k to 128k keys, {min(slower):.2f} to {max(slower):.2f}." in log
    grid = geometric_mean([x["flash_attn_3"] for x in earlier["attention_backward"].values()])
    assert f"of flash-attn 3 for {grid:.2f} before" in log
    few = next(race["us"] for race in run["races"] if "h28/4 s2048" in race["shape"])
    assert f"takes {few['2 parts']:.0f} us in two parts, {few['by rule']:.0f} in seven" in log
