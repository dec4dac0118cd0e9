"""Figures of the kernel log about masks and tables on Hopper, held to the races that they are from."""

from __future__ import annotations

import re
from typing import Any

from tests.result_files import result
from tests.snippets.pages import REPOSITORY
from tests.unit.test_docs_figures import words_of


def test_masks_and_tables_are_as_the_log_says() -> None:
    races = result("kernel_log_races")["attention_sm90_masks_and_tables"]
    text = words_of("kernel_log.md")
    of_other: dict[str, list[float]] = {}
    for race in (*races["wide"], *races["tables"]):
        shape, us = race["shape"], race["us"]
        dim, kind, *direction = shape.split(maxsplit=2)
        if dim in ("d192", "d256"):
            kind = "a table" if kind == "bias" else "others"
            of_other.setdefault(f"{dim} {kind}", []).append(us["sm90"] / us["sm80"])
        else:
            way = direction[0].split()[0]
            summed = " summed" if way == "backward" and kind == "bias_sinks" else ""
            of_other.setdefault(way + summed, []).append(us["sm90"] / us["sm80"])
    masks = {race["shape"]: race["us"] for race in races["masks"]}

    def over_plain(dim: str, direction: str, kind: str) -> float:
        plain = masks[f"plain {dim} {direction} causal"]["plain"]
        return float(masks[f"{dim} {direction} causal, {kind}"]["default"]) / plain

    def over_other(dim: str) -> list[float]:
        both = (masks[f"{dim} forward causal, {kind}"] for kind in ("boolean", "added"))
        return [us["default"] / us["sm80"] for us in both]

    backward = [
        us["default"] / us["sm80"]
        for shape, us in masks.items()
        if "sm80" in us and "back" in shape
    ]
    calls = races["calls"]
    long = {call["shape"]: call["us"] for call in calls if "s2048" in call["shape"]}
    steps = [
        long[f"b4 h16 s2048 d128 bf16 [1,h,s,s]{with_gradient}"][f"{whose} step"] / 1000
        for whose in ("ours", "efficient")
        for with_gradient in (", with its gradient", "")
    ]
    ratios = {
        (call["shape"], way): call["us"][f"ours {way}"] / call["us"][f"efficient {way}"]
        for call in calls
        for way in ("fwd", "step")
    }
    learned = [x for (shape, way), x in ratios.items() if "gradient" in shape and way == "step"]
    others = {key: x for key, x in ratios.items() if "gradient" not in key[0]}
    behind, even, ahead = (
        sorted(x for (shape, _), x in others.items() if length in shape)
        for length in ("s256", "s1024", "s2048")
    )
    for sentence, figures in (
        (
            "at d256 {:.2f} to {:.2f} with windows, a softcap",
            [min(of_other["d256 others"]), max(of_other["d256 others"])],
        ),
        (
            "at d192 {:.2f} to {:.2f}.",
            [min(of_other["d192 others"]), max(of_other["d192 others"])],
        ),
        ("the table is right and takes {:.2f} |", of_other["d256 a table"]),
        (
            "forward {:.2f} to {:.2f}, backward {:.2f} to {:.2f} with sinks",
            [f(of_other[way]) for way in ("forward", "backward summed") for f in (min, max)],
        ),
        (
            "gradient, {:.2f} to {:.2f} where",
            [min(of_other["backward"]), max(of_other["backward"])],
        ),
        (
            "| {:.2f} of a plain call at d128, causal, boolean, {:.2f} added in bf16;",
            [over_plain("d128", "forward", kind) for kind in ("boolean", "added")],
        ),
        ("bf16; {:.2f} and {:.2f} of `sm80`", over_other("d128")),
        (
            "d64 {:.2f} and {:.2f}, d256 {:.2f} and {:.2f} |",
            [*over_other("d64"), *over_other("d256")],
        ),
        ("| {:.2f} to {:.2f}; ", [min(backward), max(backward)]),
        (
            "{:.2f} of a plain call at d128, {:.2f} at d64, {:.2f} at d256.",
            [over_plain(dim, "backward", "boolean") for dim in ("d128", "d64", "d256")],
        ),
        (
            "a step took {:.1f} ms with it and {:.1f} without, where SDPA's memory-efficient "
            "attention takes {:.1f} and {:.1f}.",
            steps,
        ),
        ("is {:.1f} to {:.1f} times as fast with the gradient.", [min(learned), max(learned)]),
        ("took {:.1f} to {:.1f} times as long as it, forward and steps;", [behind[0], behind[-1]]),
        ("d64 it is even ({:.2f} to {:.2f}),", [even[0], even[-1]]),
        ("ours has {:.1f} to {:.1f} times its speed.", [1 / ahead[-1], 1 / ahead[0]]),
    ):
        assert sentence.format(*figures) in text, sentence.format(*figures)


def test_gradients_and_patches_are_as_the_log_says() -> None:
    races = result("kernel_log_races")["attention_mask_gradient"]
    text = words_of("kernel_log.md")
    sums = {(x["version"], x["shape"].split()[-1]): x["us"]["sums"] for x in races["versions"]}
    profiles = races["profiles"]
    of_heads = [us for (_, kind), us in sums.items() if kind == "[1,h,s,s]"]
    last = [sums["addresses once a tile", kind] for kind in ("[b,1,1,s]", "[b,h,s,s]")]
    calls = {call["shape"]: call["us"] for call in races["calls"]}
    with_gradient = ", with its gradient"
    steps = [
        calls["b4 h16 s2048 d128 bf16 [1,h,s,s]" + more][whose] / 1000
        for whose in ("ours step", "efficient step")
        for more in (with_gradient, "")
    ]

    def span(shape: str, way: str, *, gradient: bool) -> list[float]:
        ratios = [
            us[f"ours {way}"] / us[f"efficient {way}"]
            for name, us in calls.items()
            if shape in name and (with_gradient in name or not gradient)
        ]
        return [min(ratios), max(ratios)]

    def over_before(races: list[dict[str, Any]], words: str) -> list[float]:
        ratios = [
            race["us"]["new"] / race["us"]["old"]
            for race in races
            if race["shape"].startswith("mask") and re.fullmatch(words, race["shape"][5:])
        ]
        return [min(ratios), max(ratios)]

    def over_patches(words: str) -> list[float]:
        before = {race["shape"]: race["us"] for race in races["patches"]}
        ratios = [
            race["us"]["new"] / before[race["shape"]]["new"]
            for race in races["pairs_early"]
            if race["shape"].startswith("mask") and re.fullmatch(words, race["shape"][5:])
        ]
        return [min(ratios), max(ratios)]

    pairs = [
        {race["shape"]: race["us"]["new"] for race in races[name]}[f"mask d{dim} forward"]
        for dim in (64, 128, 256)
        for name in ("pairs_early", "patches")
    ]
    in_patches = [race["us"]["patches"] / race["us"]["entries"] for race in races["one_function"]]
    other = [
        race["us"]["sm90"] / race["us"]["sm80"]
        for race in races["masks"]
        if not race["shape"].startswith("plain")
    ]
    short = (span("s256", "fwd", gradient=False), span("s256", "step", gradient=False))
    for sentence, figures in (
        ("| {:.0f} us for a mask of heads.", of_heads[:1]),
        ("| {:.0f} us: {} instructions of a warp", [of_heads[1], profiles[0]["instructions"]]),
        (
            "two 16-bit entries a load | 900 us | {:.0f} us: {} instructions, {:.2f} of them",
            [of_heads[2], profiles[1]["instructions"], profiles[1]["ipc"]],
        ),
        ("| {:.0f} us; {:.0f} for a mask of keys, {:.0f} for one of all", [*of_heads[3:], *last]),
        ("{:.1f} ms for {:.1f} without, where that takes {:.1f} and {:.1f}:", steps),
        ("{:.2f} to {:.2f} of its time at d128,", span("s2048 d128", "step", gradient=True)),
        ("{:.2f} to {:.2f} at d256,", span("d256", "step", gradient=True)),
        ("{:.2f} to {:.2f} at d64 and 1024 tokens", span("s1024", "step", gradient=True)),
        (
            "| forward {:.2f} to {:.2f} of before with an added mask,",
            over_before(races["patches"], ".* forward added"),
        ),
        ("{:.2f} to {:.2f} boolean;", over_before(races["patches"], ".* forward")),
        ("backward {:.2f} to {:.2f} |", over_before(races["patches"], ".* backward.*")),
        ("boolean {:.0f} us for {:.0f} at d64, {:.0f} for {:.0f} at d128, {:.0f} for", pairs[:5]),
        ("| forward {:.2f} to {:.2f} added, backward", over_patches(".* forward added")),
        ("{:.2f} to {:.2f} at d64 and d128,", over_patches("d(64|128) backward.*")),
        ("{:.2f} and {:.2f} at d256: no |", over_patches("d256 backward.*")),
        ("| {:.2f} to {:.2f} times its time: no.", [min(in_patches), max(in_patches)]),
        ("takes {:.2f} to {:.2f} of `sm80`'s time with masks now", [min(other), max(other)]),
        ("take {:.2f} to {:.2f} of the time of SDPA's", short[0]),
        ("and steps {:.2f} to {:.2f}.", short[1]),
    ):
        assert sentence.format(*figures) in text, sentence.format(*figures)
    readme = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"training step at 256 tokens took up to {short[1][1]:.1f}x as long as with SDPA's"
        in readme
    )


def test_steps_of_small_heads_are_as_the_log_says() -> None:
    races = result("kernel_log_races")["attention_backward_sm90_small_heads"]
    text = words_of("kernel_log.md")
    long, even = "128, serial, 2 and 2 stages, 2 of dS", "64, interleaved, 4 and 4 stages, 2 of dS"

    def ratio(shape: str, words: str = long) -> float:
        us: dict[str, float] = next(x["us"] for x in races["races"] if x["shape"] == shape)
        return next(t for name, t in us.items() if words in name) / next(iter(us.values()))

    def ratios(where: str, words: str, *, causal: bool) -> list[float]:
        return [
            t / next(iter(x["us"].values()))
            for x in races[where]
            if x["shape"] in (["d32 causal", "d32 bwd"] if causal else ["d32"])
            for name, t in x["us"].items()
            if re.match(words, name)
        ]

    serial = (ratios("stages", re.escape(long), causal=causal) for causal in (True, False))
    ahead = (ratios("stages", "128, S ahead", causal=causal) for causal in (True, False))
    by_keys = ratios("orders", "128, .*keys", causal=True)
    spills = [build["spill_store_bytes"] for build in races["three_warpgroups"]]
    us = races["before"]["us"]
    bent = [ratio(name) for name in ("sinks", "alibi_slopes", "bias_table", "prefix_lens")]
    rows = [ratio(f"b1 s16384{causal}") for causal in (" causal", "")]
    rows += [ratio(f"b8 s2048{causal}") for causal in (" causal", "")]
    rows += [ratio(f"b32 s512{causal}") for causal in (" causal", "")]
    for sentence, figures in (
        (
            "4 and 4 {:.2f} causal and {:.2f} without a mask",
            [ratios("stages", even, causal=causal)[0] for causal in (True, False)],
        ),
        ("{:.2f} causal and {:.2f} without a mask;", [x[0] for x in serial]),
        (
            "{:.2f} and {:.2f} with 16k tokens, {:.2f} and {:.2f} with 2k, {:.2f} and {:.2f} with 512",
            rows,
        ),
        ("a bias and prefixes {:.2f} to {:.2f},", [min(bent), max(bent)]),
        ("four query heads a head of keys {:.2f},", [ratio("gqa")]),
        ("deterministic {:.2f} and {:.2f};", [ratio("det causal"), ratio("det")]),
        (
            "but {:.2f} with a softcap, {:.2f} with a mask, {:.2f} packed",
            [ratio("softcap"), ratio("attn_mask"), ratio("packed")],
        ),
        (
            "{:.2f} to {:.2f} causal, {:.2f} to {:.2f} without a mask",
            [end(x) for x in ahead for end in (min, max)],
        ),
        ("{:.2f} to {:.2f} |", [min(by_keys), max(by_keys)]),
        ("it spills {} to {} bytes in any order", [min(spills), max(spills)]),
        ("flash-attn 4 was even ({:.3f} of its speed", [us["flash_attn_4"] / us["ours"]]),
    ):
        assert sentence.format(*figures) in text, sentence.format(*figures)


def test_turns_and_searches_of_documents_are_as_the_log_says() -> None:
    run = result("kernel_log_races")["attention_forward_documents"]
    text = words_of("kernel_log.md")

    def ratios(races: str, way: str, over: str) -> dict[str, str]:
        """The time of a way over another's, by the shape from its heads on."""
        return {
            re.sub(r"attention \w+ bf16 b\d+ h", "h", race["shape"]): (
                f"{race['us'][way] / race['us'][over]:.3f}"
            )
            for race in run[races]
        }

    def of_documents(races: str, way: str, over: str) -> list[str]:
        pairs = ratios(races, way, over).items()
        return [ratio for shape, ratio in pairs if shape.endswith("documents")]

    gains: dict[str, list[float]] = {"forward": [], "backward": []}
    for race in run["search and sums"]:
        if "documents" in race["shape"]:
            us = race["us"]
            gains[race["shape"].split()[1]].append(us["before"] - us["after"])
    forward, backward = gains["forward"], gains["backward"]
    by_turns = of_documents("turns", "after", "before")
    last = ratios("turns in all kernels", "and the last warpgroup first", "before")
    (alone,) = of_documents("order alone", "the last warpgroup first", "before")
    ahead = of_documents("next tile ahead", "next tile read and begun ahead", "turns")
    plain = ratios("next tile ahead", "next tile read and begun ahead", "before")
    sums = ratios("search and sums", "after", "before")
    code = list(run["machine code"].values())
    raced = sum(race["raced"] for race in run["candidates"][::2])  # of each head dim
    for race in run["candidates"]:
        default = next(
            us for label, us in race["us"].items() if "scores_first_optimistic_turns" in label
        )
        assert len(race["us"]) == race["raced"]
        assert default <= 1.001 * min(race["us"].values())
    others = [
        min(us for label, us in race["us"].items() if word in label) / min(race["us"].values())
        for word, races in (("g3n128", run["candidates"][:2]), ("n80", run["candidates"][2:]))
        for race in races
    ]
    suite = [row for row in run["suite, fp16"] if row["mode"] == "forward"]
    bars = [1.1 * row["share of tiles"] * row["plain us"] + 5 for row in suite]
    profile = run["profile of d64, 4k, % of samples of warps that compute"]

    def listed(figures: list[float]) -> str:
        return "{:.1f}, {:.1f}, {:.1f} and {:.1f}".format(*figures)

    for sentence in (
        f"is then at {listed([row['pick us'] for row in suite])} us",
        f"in that run + 5 us are {listed(bars)}",
        f"issue slots busy for {run['profile of d64, 4k']['issue slots busy %']:.0f} % of the time",
        f"{code[0]} instructions before the loop",
        f"{code[1]} moves a step",
        f"Of {raced} candidates that claim",
        f"{sums['h8/1 s1024 d64']} with 8 heads of one at 1k, d64, {sums['h8/1 s2048 d128 causal']} at 2k, d128, "
        f"{sums['h4/1 s4096 d128 causal']} with 4 heads of one at 4k and {sums['h8/2 s1024 d128 causal']} with 2 x 8/2",
        f"{sums['h8 s512 d64 causal sinks']} with 32 x 8 x 512, d64, "
        f"{sums['h8/1 s2048 d64 causal window 127:-1 sinks']} in a window with 8 heads of one at 2k, d64, and "
        f"{sums['h16 s4096 d128 causal sinks']} at 4k, d128",
        f"in the loop for {profile['loop']} % of their samples, {profile['of these waits for a turn']:.1f} of "
        f"them at the wait for a turn, and {profile['beside it']} % beside it",
        f"forward {min(forward):.1f} to {max(forward):.1f} us less, "
        f"backward {min(backward):.1f} to {max(backward):.1f}",
        f"{', '.join(by_turns[:3])} and {by_turns[3]} (d64 4k, 16k, d128 4k, 16k). Default",
        f"d128 causal 2k {last['h16 s2048 d128 causal']} and 4k {last['h16 s4096 d128 causal']}, "
        f"32/8 heads {last['h32/8 s2048 d128 causal']}",
        f"softcap {last['h16 s4096 d128 causal softcap']}: not there",
        f"{alone} at d64, 4k: the others hold their turns",
        f"over the turns {', '.join(ahead[:3])} and {ahead[3]}",
        f"d64 {plain['h32 s2048 d64 causal']} at 2k and {plain['h32 s4096 d64 causal']} at 4k, but "
        f"d128 {plain['h16 s2048 d128 causal']} at 2k and {plain['h16 s4096 d128 causal']} at 4k",
        f"3 warpgroups with 128 keys {others[0]:.2f} and {others[1]:.2f} at d64, "
        f"80 keys {others[2]:.2f} and {others[3]:.2f} at d128",
    ):
        assert sentence in text


def test_max_autotune_chooses_as_the_log_says() -> None:
    products = result("kernel_log_races")["retnet_max_autotune"]["products"]
    said = f"cuBLAS for {products['cublas']} of its {sum(products.values())} products"
    assert said in words_of("kernel_log.md")
