"""Configs of candidates as they were written in earlier words, and before kernels had names."""

from __future__ import annotations

from typing import Any

from attention_autotuner.kernels.configs import reworded

OLD_WORDS = {
    "padded_dim_qk": "class_qk",
    "padded_dim_v": "class_v",
    "raster": "rows_first",
    "longest_first": "heads_first",
    "one_pass": "fused",
    "two_kernels": "pair",
    "three_kernels": "split",
    "query_subtiles": "query_parts",
    "depth_slices": "parts",
    "slice_stages": "part_slots",
    "ping_pong": "turns",
    "precomputed": "given",
}


def in_old_words(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the fields and values that were renamed since."""
    old: dict[str, Any] = reworded(config, OLD_WORDS)
    return old


def before_kernels_had_names(config: dict[str, Any]) -> dict[str, Any]:
    """A config as written when the fields of the knobs identified the kernel."""
    old = {name: value for name, value in config.items() if name != "kernel"}
    knobs = old["knobs"]
    if config["kernel"] == "scores_forward_sm80":
        rows = {name: value for name, value in knobs.items() if name not in ("chunk", "states")}
        states = {"chunk": knobs["chunk"], "states": knobs["states"]}
        knobs = rows if knobs["states"] is None else {"rows": rows, **states}
    elif config["kernel"] == "chunks_sm80":
        knobs = {name: value for name, value in knobs.items() if value is not None}
    return in_old_words(old | {"knobs": knobs})
