"""Everyone we are compared with: one registry, from which every benchmark takes its peers.

An implementation is a function that torch can differentiate, what it cannot compute, and where it has one a pair of
operators below autograd. How it is timed follows from the *way*: the forward pass without gradients, the backward pass
alone, or both as one step. A new one is an entry of :data:`IMPLEMENTATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.nn.attention import SDPBackend

from attention_autotuner.core.problem import Direction, Op, Problem
from attention_autotuner.tuning.measure import Entry

from . import fla_peer, retention_peers
from .calls import (
    OTHERS,
    BackwardCall,
    Call,
    ForwardCall,
    Function,
    Layout,
    StepCall,
    as_given,
    rows_of_heads,
)
from .gradients import CUDNN, FLASH, FusedBackwardEntry, FusedOps
from .library_peers import (
    compile_flex_ahead,
    fa2_absence,
    fa2_function,
    fa3_absence,
    fa3_function,
    make_flex,
    make_sdpa,
)
from .peer import Peer
from .rivals import AUTOGRAD, CALL, PICK, STEP

Way = Literal["forward", "backward", "step"]
WAYS: tuple[Way, ...] = ("forward", "backward", "step")
DIRECTION_OF: dict[Way, Direction] = {
    "forward": "forward",
    "backward": "backward",
    "step": "backward",
}
"""Way -> the direction of the problem that is measured; a step is timed on the inputs of its backward problem."""
_KINDS: dict[Way, type[Call]] = {
    "forward": ForwardCall,
    "backward": BackwardCall,
    "step": StepCall,
}
Limit = Callable[[Problem], str]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """Another implementation of one of our operations.

    Attributes:
        name: in results and on the command line.
        title: in tables.
        op: the operation that it computes.
        make: the function for a problem, of q, k, v and the operation's other tensors.
        limits: each answers why a problem cannot be computed the way we do, or an empty string.
        fused: its operators below autograd, used where they take the problem.
        layout: between our tensors and the function's, either way.
        called: forward passes are held against our function called the same way, not against our kernel alone.
        ready: told of all problems that it will be timed on, and how many processes it may use.
    """

    name: str
    title: str
    op: Op
    make: Callable[[Problem], Function]
    limits: tuple[Limit, ...] = ()
    fused: FusedOps | None = None
    layout: Layout = as_given
    called: bool = False
    ready: Callable[[Sequence[Problem], int], None] | None = None

    def can_run(self, problem: Problem) -> str | None:
        """Why it cannot be timed on a problem here, or None."""
        if problem.op != self.op:
            return f"it computes {self.op}, not {problem.op}"
        return next((reason for limit in self.limits if (reason := limit(problem))), None)

    def below_autograd(self, problem: Problem, way: Way) -> FusedOps | None:
        """The operators that time a way without autograd, where there are some that take the problem."""
        if way == "forward" or grouped_heads(problem) or other_diagonal(problem):
            return None
        return self.fused

    def against(self, problem: Problem, way: Way) -> str:
        """The label of ours that does the same work."""
        if way == "forward":
            return CALL if self.called else PICK
        if way == "backward":
            return PICK
        return AUTOGRAD if self.below_autograd(problem, way) is None else STEP

    def entry(self, problem: Problem, way: Way) -> Entry:
        """What is timed."""
        fused = self.below_autograd(problem, way)
        if fused is not None:
            return FusedBackwardEntry(
                name=self.name, ops=fused, causal=problem.causal, step=way == "step"
            )
        return _KINDS[way](
            name=self.name,
            function=self.make(problem),
            others=OTHERS[problem.op],
            layout=self.layout,
        )

    def peer(self, problem: Problem, way: Way) -> Peer:
        """The peer that it is on one problem."""
        return Peer(
            name=self.name,
            title=self.title,
            entry=lambda each: self.entry(each, way),
            refusal=lambda each: self.can_run(each) or "",
            against=self.against(problem, way),
            ready=self.ready,
        )


def other_diagonal(problem: Problem) -> str:
    """SDPA's own causal mask starts at the top left."""
    if problem.causal and problem.causal_offset != 0:
        return "its causal mask is aligned top-left"
    return ""


def grouped_heads(problem: Problem) -> str:
    """The operators below SDPA, and some backends, repeat no heads."""
    if problem.heads_q != problem.heads_kv:
        return "it takes as many heads of k and v as of q"
    return ""


def one_head_dim(problem: Problem) -> str:
    """Where all of q, k and v must be as wide."""
    if problem.dim_qk != problem.dim_v:
        return f"it takes one head dim, not {problem.dim_qk}/{problem.dim_v}"
    return ""


def bottom_right(problem: Problem) -> str:
    """Where a causal mask ends at the bottom right."""
    if problem.causal and problem.causal_alignment == "top_left" and _oblong(problem):
        return "its causal mask is aligned bottom-right"
    return ""


def _oblong(problem: Problem) -> bool:
    return problem.seqlen_q != problem.seqlen_k


def _absence(missing: Callable[[], str]) -> Limit:
    return lambda problem: missing()


def _by_name(*found: Implementation) -> dict[str, Implementation]:
    return {each.name: each for each in found}


FLASH_TITLE, CUDNN_TITLE = "FlashAttention-2 (torch SDPA)", "cuDNN (torch SDPA)"
FLEX_TITLE = "FlexAttention (torch.compile)"
IMPLEMENTATIONS: dict[str, Implementation] = _by_name(
    Implementation(
        name="sdpa_flash",
        title=FLASH_TITLE,
        op="attention",
        make=make_sdpa(SDPBackend.FLASH_ATTENTION, lower_right=True),
        limits=(one_head_dim, bottom_right),
        fused=FLASH,
    ),
    Implementation(
        name="sdpa_cudnn",
        title=CUDNN_TITLE,
        op="attention",
        make=make_sdpa(SDPBackend.CUDNN_ATTENTION),
        limits=(other_diagonal,),
        fused=CUDNN,
    ),
    Implementation(
        name="sdpa_efficient",
        title="memory-efficient (torch SDPA)",
        op="attention",
        make=make_sdpa(SDPBackend.EFFICIENT_ATTENTION),
        limits=(grouped_heads, other_diagonal),
    ),
    Implementation(
        name="flex",
        title=FLEX_TITLE,
        op="attention",
        make=make_flex,
        ready=compile_flex_ahead,
    ),
    Implementation(
        name="flash_attn_2",
        title="flash-attn 2",
        op="attention",
        make=fa2_function,
        limits=(_absence(fa2_absence), one_head_dim, bottom_right),
        layout=rows_of_heads,
    ),
    Implementation(
        name="flash_attn_3",
        title="flash-attn 3",
        op="attention",
        make=fa3_function,
        limits=(_absence(fa3_absence), bottom_right),
        layout=rows_of_heads,
    ),
    Implementation(
        name="compiled",
        title=retention_peers.COMPILED,
        op="retnet",
        make=retention_peers.compiled,
        limits=(retention_peers.unlike_the_formula,),
        ready=retention_peers.compile_ahead,
    ),
    Implementation(
        name="eager",
        title=retention_peers.EAGER,
        op="retnet",
        make=retention_peers.eager,
        limits=(retention_peers.unlike_the_formula,),
    ),
    Implementation(
        name="fla",
        title=retention_peers.FLA,
        op="retention",
        make=lambda problem: fla_peer.chunk_retention,
        limits=(grouped_heads, lambda problem: fla_peer.absence()),
        layout=rows_of_heads,
        called=True,
        ready=fla_peer.compile_ahead,
    ),
)
"""Name -> implementation; the order is that of tables."""
