"""Figures of the kernel log about calls behind other kernels, held to the races that they are from."""

from __future__ import annotations

from tests.result_files import result
from tests.unit.test_docs_figures import words_of

ROWS = (
    (
        "BERT's two sequences forward {} -> {}",
        "streams",
        "attention forward fp16 b2 h16 s512 d64",
    ),
    ("and backward {} -> {},", "streams", "attention backward fp16 b2 h16 s512 d64"),
    ("both {} -> {};", "streams", "attention forward and backward fp16 b2 h16 s512 d64"),
    (
        "one token on 8k keys {} -> {},",
        "streams",
        "attention forward bf16 b1 h32/8 s1x8192 d128 causal",
    ),
    ("retention's {} -> {},", "streams", "retention forward bf16 b4 h8 s1 d256/512"),
    ("8 x 8 x 512 of it {} -> {};", "streams", "retention forward bf16 b8 h8 s512 d128"),
    ("retnet's mask forward {} -> {},", "streams", "retnet forward fp16 b1 h8 s1024 d128 explicit"),
    ("backward {} -> {}; 2048", "streams", "retnet backward fp16 b1 h8 s1024 d128 explicit"),
    ("2048 x 2048 x 2048 {} -> {}.", "streams", "gemm forward bf16 2048x2048x2048"),
    (
        "4 heads of 4k tokens, {} -> {} in a stream",
        "streams",
        "attention forward fp16 b1 h4/1 s4096 d128 causal",
    ),
    ("{} -> {} in a graph", "graphs", "attention forward fp16 b1 h4/1 s4096 d128 causal"),
    (
        "packed forward {} -> {},",
        "streams",
        "attention forward bf16 18 sequences packed in 16384 rows h16 d128 causal",
    ),
    (
        "documents {} -> {};",
        "streams",
        "attention forward fp16 b4 h32 s4096 d64 causal document-ids",
    ),
)
LISTED = ("packed", "document-ids", "h4/1 s4096")  # or whose tiles are claimed


def test_calls_behind_others_are_as_the_log_says() -> None:
    race, text = result("kernel_log_races")["calls_behind_others"], words_of("kernel_log.md")
    for sentence, where, shape in ROWS:
        us = next(row["us"] for row in race[where] if row["shape"] == shape)
        wanted = sentence.format(f"{us['before']:.1f}", f"{us['after']:.1f}")
        assert wanted in text, wanted
    step = next(
        row["entries"]
        for row in result("small_batches")["rows"]
        if row["key"].startswith("bert_large_2x512 step")
    )
    labels, before = ("autograd", "step"), race["bert_step_before"]
    then = " us where its kernels in a CUDA graph took ".join(f"{before[x]:.1f}" for x in labels)
    since = " and ".join(f"{step[x]['median_us']:.1f}" for x in labels)
    assert f"took {then} ({since} since)" in text


def test_gains_of_calls_behind_others_are_as_the_log_says() -> None:
    race, text = result("kernel_log_races")["calls_behind_others"], words_of("kernel_log.md")
    gains: dict[tuple[str, bool], list[float]] = {}
    for where in ("streams", "graphs"):
        for row in race[where]:
            if "forward and" in row["shape"] or any(words in row["shape"] for words in LISTED):
                continue  # of two calls, or of another row of the table
            gain = row["us"]["before"] - row["us"]["after"]
            gains.setdefault((where, "backward" in row["shape"]), []).append(gain)
    ranges = [f(gains["streams", backward]) for backward in (False, True) for f in (min, max)]
    assert "| {:.1f} to {:.1f} us forward, {:.1f} to {:.1f} backward:".format(*ranges) in text
    graphs = gains["graphs", False]
    assert f"In graphs 0 to {max(graphs):.1f} us:" in text
    assert min(graphs) > -0.05
    backward = next(
        row["us"]
        for row in race["streams"]
        if row["shape"].startswith("attention backward bf16 18 sequences")
    )
    assert 0.995 < backward["after"] / backward["before"] < 1.005  # a tie
