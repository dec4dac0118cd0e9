"""``flash_attn_varlen_func``: attention of packed sequences, whose lengths stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...arch import Policy
from ...core.operation import require
from ...core.problem import NO_WINDOW, CausalAlignment
from ...serving.pinning import Config
from ..shared import checks, interop, options, plain
from ..shared.options import Off
from . import checks as attention_checks
from .modified import FORWARD_OP
from .modified_autograd import run_modified
from .modified_replay import Replay
from .views import ROWS

PADDED = "packed sequences say their lengths by cu_seqlens_q and cu_seqlens_k"
OTHERS = {
    **options.ATTENTION,
    "attn_mask": Off(hint="packed sequences take no mask of every pair"),
    "document_ids": Off(hint="packed sequences are documents"),
    "prefix_lens": Off(hint="sequences of one batch take them, in flash_attn_func"),
    "seqlens_k": Off(hint=PADDED),
    "starts_k": Off(hint=PADDED),
}


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    device_type: str | Policy | type[Policy] | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    causal_alignment: CausalAlignment = "bottom_right",
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    config: Config | Sequence[Config] | None = None,
    **others: Any,
) -> Any:
    """Exact attention of sequences that lie one after the other: each sees its own keys alone.

    The lengths are read when the kernel runs: nothing waits for them, nothing is built when they change, and a captured
    graph follows them as long as the tensors' shapes hold. Kernels work on the blocks of rows that there are. Streams,
    builds, the CPU and gradients are as of :func:`.flash_attn_func`.

    Args:
        q: ``[total_q, heads_q, dim_qk]``, fp16 or bf16, unit stride in the last dim; torch tensors, or arrays that
            offer ``__dlpack__``, of one kind.
        k: ``[total_k, heads_kv, dim_qk]``; heads_q must be a multiple of heads_kv.
        v: ``[total_k, heads_kv, dim_v]``.
        cu_seqlens_q: int32 ``[sequences + 1]`` on q's device, from 0, ascending: sequence b has the rows
            ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``, perhaps none. Rows behind the last sequence give o = 0, and
            their gradients are 0. Values on a GPU are not read here, and so not checked.
        cu_seqlens_k: the same of keys.
        max_seqlen_q: the greatest length of queries, from which the kernel is chosen; it bounds nothing.
        max_seqlen_k: the same of keys.
        device_type: as of :func:`.flash_attn_func`, as are the others but for what follows.
        causal: row i of a sequence sees its keys ``j <= i + seqlen_k - seqlen_q``.
        softmax_scale: None is ``1 / sqrt(dim_qk)``.
        causal_alignment: ``"top_left"``: ``j <= i``.
        window_size: keys before and after a row's diagonal.
        softcap: c of ``c tanh(S / c)``; 0 for none.
        alibi_slopes: fp32 ``[heads_q]`` or ``[sequences, heads_q]``.
        bias: fp32 ``[heads_q, 2 * D + 1]``, by distances from each sequence's own diagonal.
        sinks: fp32 ``[heads_q]``.
        return_lse: return ``(o, lse)``, with lse ``[heads_q, total_q]`` in fp32, as flash_attn has it.
        deterministic: None follows ``torch.are_deterministic_algorithms_enabled()``.
        config: the candidate that serves, or two.
        others: options that :func:`.flash_attn_func` has and packed sequences do not, at the value that leaves them
            off.

    Returns:
        o ``[total_q, heads_q, dim_v]`` in q's dtype, with q's order of dimensions in memory, dense.

    Raises:
        UnsupportedArgumentError: another option, or another value of one; a number as ``device_type``.
        UnsupportedProblemError: an argument is outside what the kernels support; the message names it.
        NotWarmError, UnsupportedArchitectureError, UnknownCandidateError, ToolchainError, BuildError,
            NoCandidateError: as :func:`.flash_attn_func` says.
    """
    if not torch.compiler.is_compiling() and torch._C._is_torch_function_mode_enabled():
        results = plain.without_default_device(flash_attn_varlen_func, **locals())
        if results is not NotImplemented:
            return results
    options.refuse_number("flash_attn_varlen_func", device_type, "eighth")
    options.refuse_others(flash_attn_varlen_func, others, OTHERS)
    optional = {"alibi_slopes": alibi_slopes, "bias": bias, "sinks": sinks}
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    tensors |= {name: x for name, x in optional.items() if x is not None}
    if not all(isinstance(x, torch.Tensor) for x in tensors.values()):
        return interop.call_with_tensors(
            flash_attn_varlen_func,
            tensors,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            device_type=device_type,
            causal=causal,
            softmax_scale=softmax_scale,
            causal_alignment=causal_alignment,
            window_size=window_size,
            softcap=softcap,
            return_lse=return_lse,
            deterministic=deterministic,
            config=config,
        )
    scale = attention_checks.check_options(
        causal, softmax_scale, causal_alignment, return_lse, deterministic
    )
    max_seqlen_q, max_seqlen_k = checks.whole(max_seqlen_q), checks.whole(max_seqlen_k)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        checks.check_longest(name, length)
    left, right = attention_checks.check_window(window_size)
    causal = causal or right == 0
    window = (left, -1 if causal else right)
    if config is not None:
        device_type = plain.pinned_name(device_type, config)
    policy = "" if device_type is None else plain.policy_name(device_type)
    arguments = (scale, causal, causal_alignment == "top_left", policy)
    named = {
        "alibi_slopes": alibi_slopes,
        "bias_table": bias,
        "attn_mask": None,
        "sinks": sinks,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
    }
    longest = (max_seqlen_q, max_seqlen_k)
    if not torch.compiler.is_compiling():
        replay = Replay.of_packed((q, k, v), named, longest, (window, softcap), arguments)
        plan = None if replay is None else replay.plan()
        if replay is not None and plan is not None:
            return run_modified(replay, plan, return_lse, deterministic)
    checks.check_places(**tensors)
    plain.refuse_tangents(*tensors.values(), op="attention")
    for name in ("q", "k", "v"):
        rank = tensors[name].dim()
        require(
            rank == 3,
            f"{name} must have 3 dimensions [rows of all sequences, heads, dim], got {rank}",
        )
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    call: Any = (
        *map(ROWS.to_kernel, (q, k, v)),
        *(*arguments, deterministic, *window, options.as_float("softcap", softcap)),
        *(alibi_slopes, None, sinks, None, None),
        *(cu_seqlens_q, cu_seqlens_k, *longest, bias),
    )
    o, lse = FORWARD_OP(*call)
    o = ROWS.back(o)
    return (o, lse.squeeze(0)) if return_lse else o
