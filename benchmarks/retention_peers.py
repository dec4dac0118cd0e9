"""Whom retention is compared with: the masked formula through torch.compile and eagerly, and fla's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attention_autotuner.core.problem import Direction, Problem

from . import fla_peer
from .ahead import blank_inputs, in_processes
from .calls import BackwardCall, Call, ForwardCall, Function, StepCall, rows_of_heads, scale_of
from .peer import Peer
from .rivals import AUTOGRAD, CALL, PICK

COMPILED, EAGER = "the formula through torch.compile", "the formula in eager PyTorch"
FLA = "fla's chunk_retention"


_KINDS: dict[Direction, type[Call]] = {"forward": ForwardCall, "backward": BackwardCall}


@dataclass(frozen=True, kw_only=True)
class _Going:
    """Whether a problem goes in one direction."""

    direction: Direction

    def __call__(self, problem: Problem) -> bool:
        return problem.direction == self.direction


def formula(scale: float) -> Function:
    """Retention with an explicit mask and its normaliser, as one would write it down."""

    def retnet(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
        x = (q @ k.transpose(-1, -2) * scale) * mask
        r = x.abs().sum(-1, keepdim=True).clamp(min=1).detach()
        return (x / r) @ v

    return retnet


def compiled(problem: Problem) -> Function:
    """The formula through ``torch.compile``, for one shape."""
    torch._dynamo.reset()  # or the shapes before this one count against the recompile limit
    function: Function = torch.compile(formula(scale_of(problem)), dynamic=False)
    return function


def eager(problem: Problem) -> Function:
    """The formula as it stands."""
    return formula(scale_of(problem))


def _masked(
    name: str, kind: type[Call], make: Callable[[Problem], Function]
) -> Callable[[Problem], Call]:
    return lambda problem: kind(name=name, function=make(problem), others=("mask",))


def compile_ahead(problems: Sequence[Problem], processes: int) -> None:
    """Compile the formula for every problem at once, into the cache that torch keeps on disk."""
    in_processes(_compile_one, [(problem,) for problem in problems], processes)


def _compile_one(problem: Problem) -> None:
    import torch._inductor.config as inductor_config

    inductor_config.compile_threads = 1  # there are as many of these processes as cores
    kind = _KINDS[problem.direction]
    call = kind(name="ahead", function=compiled(problem), others=("mask",))
    call.prepare([blank_inputs(problem, "cuda")], [])


def unlike_the_formula(problem: Problem) -> str:
    """Why the formula is not what a problem asks for, or an empty string."""
    if problem.mask != "explicit":
        return "it takes its mask as a tensor"
    if problem.heads_q != problem.heads_kv:
        return "it repeats no heads"
    return ""


def _unlike_fla(problem: Problem) -> str:
    if problem.heads_q != problem.heads_kv:
        return "it takes as many heads of k and v as of q"
    return fla_peer.absence()


def _fla(name: str, kind: type[Call]) -> Callable[[Problem], Call]:
    return lambda problem: kind(name=name, function=fla_peer.chunk_retention, layout=rows_of_heads)


def _retnet_peers() -> list[Peer]:
    found = []
    for source, title, make in (("compiled", COMPILED, compiled), ("eager", EAGER, eager)):
        for direction, kind in _KINDS.items():
            name = f"{source}_{direction}"
            found.append(
                Peer(
                    name=name,
                    title=f"{title}, {direction}",
                    entry=_masked(name, kind, make),
                    refusal=unlike_the_formula,
                    against=PICK,
                    asked=_Going(direction=direction),
                    ready=compile_ahead if make is compiled else None,
                )
            )
    return found


RETNET = {peer.name: peer for peer in _retnet_peers()}
RETENTION = {
    peer.name: peer
    for peer in (
        Peer(
            name="fla_forward",
            title=f"{FLA}, forward",
            entry=_fla("fla_forward", ForwardCall),
            refusal=_unlike_fla,
            against=CALL,
            asked=_Going(direction="forward"),
            ready=fla_peer.compile_ahead,
        ),
        Peer(
            name="fla_step",
            title=f"{FLA}, forward + backward",
            entry=_fla("fla_step", StepCall),
            refusal=_unlike_fla,
            against=AUTOGRAD,
            asked=_Going(direction="backward"),
        ),
    )
}
