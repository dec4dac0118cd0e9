"""Figures of pages about baselines, held to the result files that they are from."""

from __future__ import annotations

from benchmarks.results import LEVEL
from tests.result_files import result
from tests.unit.test_docs_figures import greatest, shown, words_of


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
