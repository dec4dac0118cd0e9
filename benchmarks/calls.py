"""Functions timed as a program would call them: forward alone, backward alone on a graph that is kept, or both.

Each call takes the inputs in the layout that its function wants, which is made outside any timing, and hands its
results back in ours, so that two implementations can be compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
import torch._functorch.config as functorch_config

from attention_autotuner.core.problem import NO_WINDOW, Problem
from attention_autotuner.errors import AttentionAutotunerError
from attention_autotuner.operations.attention.modified import CU_SEQLENS, attention_modified
from attention_autotuner.operations.attention.modified_inputs import SOFTCAP, modifiers_of
from attention_autotuner.operations.bindings import make_inputs
from attention_autotuner.operations.shared.tensors import Inputs, Outputs

Results = tuple[torch.Tensor, ...]
Layout = Callable[[torch.Tensor], torch.Tensor]
Function = Callable[..., Any]
Lengths = tuple[int, ...]
ROUNDING = 0.05  # of a norm, of which bf16 rounds off 0.004
LEARNED = ("sinks", "bias_table")  # whose gradients our kernels compute beside those of q, k and v


class DisagreementError(AttentionAutotunerError, RuntimeError):
    """A baseline computes something else than we do."""


def as_given(tensor: torch.Tensor) -> torch.Tensor:
    """Our own layout, ``[batch, heads, seqlen, dim]``."""
    return tensor


def rows_of_heads(tensor: torch.Tensor) -> torch.Tensor:
    """``[batch, seqlen, heads, dim]`` from ours, and ours from that."""
    return tensor.transpose(1, 2)


def packed_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[total, heads, dim]`` of packed sequences from ours, and ours from that."""
    return tensor[0].transpose(0, 1) if tensor.dim() == 4 else tensor.transpose(0, 1)[None]


@dataclass(kw_only=True)
class BoundEntry(ABC):
    """An entry of a race that is bound to each set of inputs outside any timing.

    Attributes:
        name: how it is reported.
    """

    name: str
    _runs: list[Callable[[], Any]] = field(default_factory=list, repr=False)

    def prepare(self, inputs: Sequence[Inputs], outputs: Sequence[Outputs]) -> None:
        """Bind every set and run once, so that what is compiled or tuned on a first call is over."""
        self._runs = [self._bind(tensors) for tensors in inputs]
        self.run(0)

    def run(self, index: int) -> None:
        """Run on a set of inputs and drop the results."""
        self._runs[index]()

    @abstractmethod
    def _bind(self, inputs: Inputs) -> Callable[[], Any]:
        """The function to time on one set of inputs."""


@dataclass(kw_only=True)
class Call(BoundEntry):
    """A function of q, k and v and of other tensors, of which those in :data:`LEARNED` have a gradient, too.

    Attributes:
        function: returns the output.
        others: names of the tensors that it takes after q, k and v.
        layout: between ours and the function's, either way.
    """

    function: Function
    others: tuple[str, ...] = ()
    layout: Layout = as_given

    def results(self, index: int) -> Results:
        """Call the function; o, or the gradients of q, k and v, in our layout."""
        return tuple(self.layout(result.detach()) for result in self._runs[index]()[:3])

    def _read(self, inputs: Inputs) -> tuple[Results, Results]:
        """q, k and v, or the two factors of a product, as leaves, and the others."""
        names = (name for name in ("q", "k", "v", "a", "b") if name in inputs.tensors)
        read = (inputs.tensors[name].detach() for name in names)
        laid_out = (self.layout(tensor).contiguous() for tensor in read)
        leaves = tuple(tensor.requires_grad_() for tensor in laid_out)
        others = (inputs.tensors[name].detach() for name in self.others)
        return leaves, tuple(
            x.requires_grad_(name in LEARNED) for name, x in zip(self.others, others, strict=True)
        )

    def _gradients(
        self, o: torch.Tensor, leaves: Results, others: Results, dout: torch.Tensor
    ) -> Results:
        """The gradients of q, k and v and of what is learned, which a function need not read."""
        wanted = (*leaves, *(x for x in others if x.requires_grad))
        return torch.autograd.grad(o, wanted, dout, retain_graph=True, allow_unused=True)

    def _dout(self, inputs: Inputs, o: torch.Tensor) -> torch.Tensor:
        """The gradient of the output, in memory as the output is."""
        return torch.empty_like(o).copy_(self.layout(inputs.tensors["dout"]))


class ForwardCall(Call):
    """The output, without a gradient recorded."""

    def _bind(self, inputs: Inputs) -> Callable[[], Results]:
        leaves, others = self._read(inputs)
        # FlexAttention leaves the kernels of flash-attn 4 where a tensor that bends scores could have a gradient.
        tensors = [x.detach() for x in (*leaves, *others)]

        def call() -> Results:
            with torch.no_grad():
                return (self.function(*tensors),)

        return call


class BackwardCall(Call):
    """The gradients of q, k and v from what one forward pass saved, again and again."""

    def _bind(self, inputs: Inputs) -> Callable[[], Results]:
        leaves, others = self._read(inputs)
        # A compiled backward pass would otherwise write over what it is given, and refuse a second run.
        with functorch_config.patch(donated_buffer=False):
            o = self.function(*leaves, *others)
            dout = self._dout(inputs, o.detach())

            def call() -> Results:
                return self._gradients(o, leaves, others, dout)

            call()  # here a compiled function compiles its backward pass
        return call


class StepCall(Call):
    """Forward and backward."""

    def _bind(self, inputs: Inputs) -> Callable[[], Results]:
        leaves, others = self._read(inputs)
        with torch.no_grad():
            dout = self._dout(inputs, self.function(*leaves, *others))

        def call() -> Results:
            o = self.function(*leaves, *others)
            return self._gradients(o, leaves, others, dout)

        return call


def others_of(problem: Problem) -> tuple[str, ...]:
    """Names of the tensors that functions of a problem take after q, k and v."""
    if problem.op == "retnet":
        return ("mask",)
    valued = tuple(name for name in problem.modifications if name != "softcap")
    return (*valued, *(CU_SEQLENS if problem.packed else ()))


def options_of(problem: Problem) -> dict[str, Any]:
    """The mask, window, softcap and greatest lengths, by the names that flash-attn and we have for them."""
    options: dict[str, Any] = {"causal": problem.causal}
    if problem.window_size != NO_WINDOW:
        options["window_size"] = problem.window_size
    if "softcap" in problem.modifications:
        options["softcap"] = SOFTCAP
    if problem.packed:
        options |= {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
    return options


def inputs_of(lengths: Mapping[Problem, Lengths], problem: Problem, *, seed: int) -> Inputs:
    """Inputs of a problem on the current GPU, with packed sequences of given lengths where there are some.

    Args:
        lengths: of the sequences of problems, of queries and of keys; others have typical ones.
        problem: what is computed.
        seed: of the numbers.
    """
    # Even seeds give values of one shape and kind, so that what is compiled for one set of inputs serves all.
    made = make_inputs(problem, seed=2 * seed)
    if problem not in lengths:
        return made
    ends = torch.tensor([0, *accumulate(lengths[problem])], dtype=torch.int32)
    tensors = {**made.tensors, **dict.fromkeys(CU_SEQLENS, ends.to(made.q.device))}
    packed = replace(made, tensors=tensors)
    if problem.direction == "backward":
        qkv, modifiers = (packed.q, packed.k, packed.v), modifiers_of(problem, packed)
        o, lse = attention_modified(*qkv, modifiers=modifiers, causal=problem.causal)
        packed = replace(packed, tensors={**tensors, "o": o.to(made.q.dtype), "lse": lse})
    return packed


def scale_of(problem: Problem) -> float:
    """The scale that every implementation is called with."""
    return float(problem.dim_qk**-0.5)


def matrices(
    problem: Problem, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors ``[m, k]`` and ``[k, n]`` of a product, as views of what lies in memory."""
    a, b = a[0, 0], b[0, 0]
    of_a, of_b = problem.operands
    return (a if of_a == "n" else a.T), (b if of_b == "n" else b.T)


def ours(problem: Problem, device_type: str | None) -> Function:
    """Our public function of a problem's operation, with a training program's choices.

    Retention takes the usual decays, no initial state, and is not asked for a final one.
    """
    import attention_autotuner as package

    causal, scale = problem.causal, scale_of(problem)

    def attention(q: Any, k: Any, v: Any, *others: Any) -> Any:
        named = {**options_of(problem), **dict(zip(others_of(problem), others, strict=True))}
        if "bias_table" in named:
            named["bias"] = named.pop("bias_table")  # the modification, as functions call it
        if not problem.packed:
            return package.flash_attn_func(q, k, v, device_type, **named)
        named |= zip("qkv", map(packed_rows, (q, k, v)), strict=True)
        return packed_rows(package.flash_attn_varlen_func(device_type=device_type, **named))

    functions: dict[str, Function] = {
        "attention": attention,
        "retnet": lambda q, k, v, mask: package.retnet_attn_func(
            q, k, v, mask, device_type, scale=scale, causal=causal
        ),
        "retention": lambda q, k, v: package.retention_func(
            q, k, v, None, device_type, output_final_state=False
        )[0],
        "gemm": lambda a, b: package.matmul(*matrices(problem, a, b), device_type)[None, None],
    }
    return functions[problem.op]


def peak_bytes(call: Call) -> int:
    """Device memory that one call takes at its highest, results included, beside what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call.run(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def difference(results: Results, expected: Results) -> list[float]:
    """Norm of the difference over the norm of the second, of each result."""
    return [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(results, expected, strict=True)
    ]


def ours_like(theirs: Call, problem: Problem, device_type: str | None) -> Call:
    """Our public function, called as a baseline is."""
    return type(theirs)(name="ours", function=ours(problem, device_type), others=others_of(problem))


def check_results(problem: Problem, device_type: str | None, entry: object, inputs: Inputs) -> None:
    """Compare a baseline's results with those of our function called the same way.

    Args:
        problem: that the entry solves.
        device_type: of our function.
        entry: of a baseline, bound to inputs; one that is no :class:`Call` hands no results back and is left alone.
        inputs: the first that it is bound to.

    Raises:
        DisagreementError: a result is further off than rounding takes it.
    """
    if not isinstance(entry, Call):
        return
    mine = ours_like(entry, problem, device_type)
    mine.prepare([inputs], [])
    off = difference(entry.results(0), mine.results(0))
    if not all(error < ROUNDING for error in off):  # which is not so of NaN
        shown = ", ".join(f"{error:.3g}" for error in off)
        raise DisagreementError(f"its results differ from ours by {shown} of their norm")


def side_by_side(problem: Problem, theirs: Call, device_type: str | None) -> dict[str, Any]:
    """A baseline's call and our function called the same way, on the current GPU.

    Args:
        problem: makes the inputs.
        theirs: a baseline's call.
        device_type: of our function.

    Returns:
        ``peak_bytes`` of both, ``difference`` of the results (o, or the gradients of q, k and v), and ``scores_bytes``:
        what one tensor of all scores would take.
    """
    mine = ours_like(theirs, problem, device_type)
    inputs = [make_inputs(problem, seed=0)]
    for call in (mine, theirs):
        call.prepare(inputs, [])
    scores = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return {
        "peak_bytes": {"ours": peak_bytes(mine), "theirs": peak_bytes(theirs)},
        "scores_bytes": 2 * scores,
        "difference": difference(mine.results(0), theirs.results(0)),
    }
