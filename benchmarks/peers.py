"""Whom each benchmark of one operation and direction meets, by name.

The names are those of its result file. What stands behind them is in :mod:`.implementations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.nn.attention import SDPBackend

from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning.measure import CallableEntry, Entry

from .calls import StepCall
from .gradients import FusedBackwardEntry
from .implementations import (
    IMPLEMENTATIONS,
    Implementation,
    Way,
    grouped_heads,
    other_diagonal,
)
from .library_peers import make_sdpa
from .peer import Peer
from .retention_peers import RETENTION, RETNET
from .rivals import AUTOGRAD, PICK, STEP

AUTOGRAD_SEQLEN = 2048  # through autograd, one length of each row of a grid is timed
FLASH, CUDNN, FLEX = (IMPLEMENTATIONS[name] for name in ("sdpa_flash", "sdpa_cudnn", "flex"))


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """An implementation in one way, under a benchmark's own name for it."""

    name: str
    implementation: Implementation
    way: Way

    def __call__(self, problem: Problem) -> Entry:
        fused = self.implementation.fused
        if self.way != "forward" and fused is not None:
            step = self.way == "step"
            return FusedBackwardEntry(name=self.name, ops=fused, causal=problem.causal, step=step)
        return CallableEntry(name=self.name, function=self.implementation.make(problem))


def _below_sdpa(problem: Problem) -> str:
    return grouped_heads(problem) or other_diagonal(problem)


def _forward(implementation: Implementation, refusal: Callable[[Problem], str]) -> Peer:
    name = implementation.name
    return Peer(
        name=name,
        title=implementation.title,
        entry=_Timed(name=name, implementation=implementation, way="forward"),
        refusal=refusal,
    )


def _backward(implementation: Implementation) -> Peer:
    name = implementation.name
    return Peer(
        name=name,
        title=implementation.title,
        entry=_Timed(name=name, implementation=implementation, way="backward"),
        refusal=_below_sdpa,
        against=PICK,
    )


def _step(implementation: Implementation) -> Peer:
    name = f"{implementation.name}_step"
    return Peer(
        name=name,
        title=f"{implementation.title}, forward + backward",
        entry=_Timed(name=name, implementation=implementation, way="step"),
        refusal=_below_sdpa,
        against=STEP,
    )


def _flash_autograd(problem: Problem) -> Entry:
    function = make_sdpa(SDPBackend.FLASH_ATTENTION)(problem)
    return StepCall(name="sdpa_flash_autograd", function=function)


def _by_name(*peers: Peer) -> dict[str, Peer]:
    return {peer.name: peer for peer in peers}


ATTENTION_FORWARD = _by_name(
    _forward(FLASH, other_diagonal),
    _forward(CUDNN, other_diagonal),
    _forward(FLEX, lambda problem: ""),
)
ATTENTION_BACKWARD = _by_name(
    _backward(FLASH),
    _backward(CUDNN),
    _step(FLASH),
    _step(CUDNN),
    Peer(
        name="sdpa_flash_autograd",
        title=f"{FLASH.title}, forward + backward through autograd",
        entry=_flash_autograd,
        refusal=other_diagonal,
        against=AUTOGRAD,
        asked=lambda problem: problem.seqlen_q == AUTOGRAD_SEQLEN,
    ),
)
PEERS: dict[str, dict[str, Peer]] = {
    "attention_forward": ATTENTION_FORWARD,
    "attention_backward": ATTENTION_BACKWARD,
    "retnet": RETNET,
    "retention": RETENTION,
}
"""Benchmark -> peer by name."""
