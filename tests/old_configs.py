"""Configs of candidates as they were written before kernels had names."""

from __future__ import annotations

from typing import Any


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
    return old | {"knobs": knobs}
