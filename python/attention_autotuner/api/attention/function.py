"""``flash_attn_func``: attention on torch tensors and on arrays that speak DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...arch import Policy, naming
from ...core.problem import NO_WINDOW, CausalAlignment
from ...serving.pinning import Config
from ..shared import checks, options, plain
from ..shared.options import TensorLayout
from . import checks as attention_checks
from . import modified as attention_modified
from . import plan as attention_plan
from .autograd import apply_attention, differentiable_attention
from .bounded import attention_by_packing
from .modified_autograd import run_modified
from .modified_replay import Replay
from .torch_op import FORWARD_OP
from .views import BSHD, View

_MAX_SCALE = checks.MAX_SCALE
_CHOICES = (bool, type(None))


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    device_type: str | Policy | type[Policy] | None = None,
    *,
    layout: TensorLayout = "bhsd",
    causal: bool = False,
    softmax_scale: float | None = None,
    causal_alignment: CausalAlignment = "bottom_right",
    seqlens_k: Any = None,
    starts_k: Any = None,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    attn_mask: Any = None,
    sinks: Any = None,
    prefix_lens: Any = None,
    document_ids: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    config: Config | Sequence[Config] | None = None,
    **others: Any,
) -> Any:
    """Exact attention, ``softmax(softmax_scale * q k^T) v``, by the fastest kernel known for this problem.

    Runs on torch's current stream of the tensors' device and never synchronises. Untuned, a pick that came with the
    package or the architecture's default serves; what is not built yet is built on the first call that needs it
    (``attention-autotuner warmup`` builds ahead, a bundle brings it built).
    Under CUDA-graph capture the kernel must have run, or have been warmed up, before. Tensors on the CPU are served by
    the PyTorch reference.

    Gradients of q, k and v are exact, through o and through lse, and come from kernels chosen and tuned like the
    forward's (a problem of their own: ``direction="backward"``). Where one may be asked for, the call keeps q, k, v, o
    and lse, so memory stays linear in the sequence lengths; changing any of them in place before the backward is
    torch's usual error. Gradients can be differentiated again, by the PyTorch reference. There is no forward-mode
    derivative.

    Args:
        q: ``[batch, heads_q, seqlen_q, dim_qk]``, fp16 or bf16, unit stride in the last dim, any strides elsewhere. A
            torch tensor, or a CuPy or other array that offers ``__dlpack__``; q, k and v of one kind.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``; heads_q must be a multiple of heads_kv.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        device_type: whose search space and tuned picks to use: a policy, its class, a name such as ``"A100"``, or None
            for the GPU that q is on. The fourth argument of flash_attn's function is another, ``dropout_p``.
        layout: ``"bshd"`` where q, k, v and o are ``[batch, seqlen, heads, dim]``, as flash_attn has them; it costs no
            copy. lse is ``[batch, heads_q, seqlen_q]`` either way. A call that looks like one of the other layout is
            warned of once.
        causal: query row i sees keys ``j <= i + offset`` only; a row that sees none gives 0.
        softmax_scale: any finite number, negative and 0 included, NumPy's too; None is ``1 / sqrt(dim_qk)``.
        causal_alignment: offset is ``seqlen_k - seqlen_q`` for ``"bottom_right"``, 0 for ``"top_left"``.
        seqlens_k: ends of every batch entry's keys in k, int32 ``[batch]`` on q's device: entry b reads the keys
            ``starts_k[b] <= j < seqlens_k[b]`` alone, whatever memory holds beyond. Both are clamped to
            ``[0, seqlen_k]``, and read when the kernel runs, so that a captured graph follows them. A bottom-right
            diagonal hangs at ``seqlens_k[b]``: there row i sees ``j <= i + seqlens_k[b] - seqlen_q``. An entry
            without keys gives 0. Gradients come from packed sequences, for which q, k and v are copied unless they lie
            as ``[batch, seqlen, heads, dim]``; there is none beside attn_mask, prefix_lens and document_ids, nor with
            starts_k of a top-left diagonal. None is ``seqlen_k``.
        starts_k: first keys, likewise, for padding on the left. None is 0.
        window_size: keys that row i sees before and after its diagonal, the key ``i + offset``, both included; -1 for
            no bound. ``causal`` holds besides: a window of the last 1024 keys is ``causal=True`` with ``(1023, 0)``.
            Tiles without a visible key are skipped, in both directions.
        softcap: c of ``c tanh(S / c)``, which scaled scores S become; 0 for none.
        alibi_slopes: fp32 ``[heads_q]`` or ``[batch, heads_q]`` on q's device: after the softcap
            ``-slope |i + seqlen_k - seqlen_q - j|`` is added, ``seqlens_k[b]`` for ``seqlen_k``. They get no gradient.
        bias: fp32 ``[heads_q, 2 * D + 1]`` on q's device, contiguous, D at most 65536: after the softcap the
            entry at ``clamp(j - i - (seqlen_k - seqlen_q), -D, D) + D`` is added, ``seqlens_k[b]`` for ``seqlen_k``.
            Differentiable; its gradient costs time where the table requires one.
        attn_mask: broadcasts to ``[batch, heads_q, seqlen_q, seqlen_k]``, whatever the layout: boolean, True where a
            key takes part, or fp32, fp16 or bf16, which is added after the softcap; the latter gets a gradient where
            it requires one. A row whose keys are all hidden gives 0.
        sinks: fp32 ``[heads_q]`` on q's device: a logit of each head that joins the softmax's denominator and lse, not
            scaled and never masked; a row that sees no key gives 0 and its sink as lse. Differentiable.
        prefix_lens: int32 ``[batch]`` on q's device: with ``causal``, row i of entry b sees the keys
            ``j < prefix_lens[b]``, too. A window's left bound holds besides; it may have no right one.
        document_ids: int32 ``[batch, seqlen]`` on q's device, for as many queries as keys: row i sees key j only where
            their ids are equal; ``causal`` and windows hold besides. The ids of an entry must never decrease; on a GPU
            that is not looked at. Tiles of other documents are skipped, in both directions.
        return_lse: return ``(o, lse)``, with lse the natural logarithm of the softmax's denominator,
            ``[batch, heads_q, seqlen_q]`` in fp32, -inf for a row that sees no key. Both carry gradients.
        deterministic: whether two equal backward calls must agree bit for bit, which rules out kernels that add in no
            fixed order; None follows ``torch.are_deterministic_algorithms_enabled()`` as it stands at this call. o and
            lse agree either way.
        config: the candidate that serves, whatever was tuned: its name or its ``config``, as ``candidates --json`` has
            them; or two, for the forward and the backward. Nothing else serves in its place. None leaves it to tuning.
        others: options of flash_attn and SDPA at the value that leaves them off: ``block_mask=None``,
            ``block_table=None``, ``cu_seqlens=None``, ``dropout_p=0.0``, ``enable_gqa=True``,
            ``is_causal=False``, ``return_attn_probs=False``, ``score_mod=None``.

    Returns:
        o ``[batch, heads_q, seqlen_q, dim_v]`` in q's dtype, with q's order of dimensions in memory, dense; an array of
        q's own library if q is not a tensor. Empty batch, heads or seqlen_q give empty results, and seqlen_k = 0 gives
        o = 0 and lse = -inf.

    Raises:
        UnsupportedArgumentError: another option, or another value of one; a number as ``device_type``.
        UnsupportedProblemError: an argument is outside what the kernels support; the message names it.
        UnsupportedArchitectureError: ``device_type`` is unknown, or its kernels cannot run on the GPU of q.
        NotWarmError: a CUDA graph is being captured and the kernel is not ready.
        UnknownCandidateError: ``config`` is no candidate of this problem; the message lists names near it.
        ToolchainError, BuildError, NoCandidateError: the kernel had to be built and could not be, and ``config`` names
            it or ``ATTENTION_AUTOTUNER_STRICT_KERNELS`` is on. Else the PyTorch reference serves, with one warning.
    """
    if not torch.compiler.is_compiling() and torch._C._is_torch_function_mode_enabled():
        results = plain.without_default_device(flash_attn_func, **locals())
        if results is not NotImplemented:
            return results
    # What is plainly right needs no call of the check that knows what is wrong.
    if others or (device_type is not None and type(device_type) is not str):
        options.refuse_number("flash_attn_func", device_type)
        options.refuse_others(flash_attn_func, others, options.ATTENTION)
    if config is not None:
        device_type = plain.pinned_name(device_type, config)
    top_left = causal_alignment != "bottom_right"
    if (
        (
            softmax_scale is not None
            and not (type(softmax_scale) is float and -_MAX_SCALE <= softmax_scale <= _MAX_SCALE)
        )
        or (
            top_left is not False
            and (
                not isinstance(causal_alignment, str)  # type: ignore[redundant-expr]
                or causal_alignment != "top_left"
            )
        )
        or type(deterministic) not in _CHOICES
        or type(causal) is not bool  # type: ignore[redundant-expr]  # untyped callers
        or type(return_lse) is not bool
    ):
        softmax_scale = attention_checks.check_options(
            causal, softmax_scale, causal_alignment, return_lse, deterministic
        )
    # An array must not come as far as a comparison; a list is looked at behind the dispatcher.
    if window_size is not NO_WINDOW and not (
        isinstance(window_size, list)  # type: ignore[redundant-expr]  # untyped callers
        or (type(window_size) is tuple and [type(x) for x in window_size] == [int, int])
    ):
        window_size = attention_checks.check_window(window_size)
    bounds = {}
    if seqlens_k is not None or starts_k is not None:
        both = {"seqlens_k": seqlens_k, "starts_k": starts_k}
        bounds = {name: x for name, x in both.items() if x is not None}
    modified = (
        (window_size is not NO_WINDOW and window_size != NO_WINDOW)
        or alibi_slopes is not None
        or bias is not None
        or attn_mask is not None
        or sinks is not None
        or prefix_lens is not None
        or document_ids is not None
        or (type(softcap) is not float or softcap != 0.0)
    )
    view = BSHD if options.is_bshd(layout) else None
    eager = (view is not None or layout is options.BHSD) and not torch.compiler.is_compiling()
    replay = None
    arguments: attention_checks.Options = (softmax_scale, causal, top_left, "")
    if eager and device_type is not None:
        arguments = (softmax_scale, causal, top_left, naming.policy_name(device_type))
    # Without gradients, key bounds alone of tensors as kernels take them have a shorter way, below.
    bounded = bounds and (view is not None or torch.is_grad_enabled())
    if eager and (modified or bounded):
        bent = {
            "alibi_slopes": alibi_slopes,
            "bias_table": bias,
            "attn_mask": attn_mask,
            "sinks": sinks,
            "prefix_lens": prefix_lens,
            "document_ids": document_ids,
        }
        limits = {"seqlens_k": seqlens_k, "starts_k": starts_k} if bounds else {}
        replay = Replay.of((q, k, v), bent, limits, (window_size, softcap), arguments, view)
        if replay is not None and replay.bends_nothing:
            modified, arguments, window_size, replay = False, replay.options, NO_WINDOW, None
            causal = arguments[1]
        plan = None if replay is None else replay.plan()
        if replay is not None and plan is not None:
            return run_modified(replay, plan, return_lse, deterministic)
    if eager and not (modified or bounds):
        results = _replayed(q, k, v, arguments, return_lse, deterministic, view)
        if results is not None:
            return results
    addresses = None
    if not (torch.compiler.is_compiling() or modified or (bounds and torch.is_grad_enabled())):
        addresses = plain.addresses(q, k, v, *bounds.values())
    plainly = addresses is not None and len(addresses) == 3 + len(bounds)
    if plainly and layout is options.BHSD and q.is_cuda and k.is_cuda and v.is_cuda:
        if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
            if deterministic is None:
                deterministic = torch.are_deterministic_algorithms_enabled()
            return differentiable_attention(q, k, v, arguments, return_lse, deterministic)
        o, lse = attention_plan.attention_forward(q, k, v, arguments, return_lse, **bounds)
        return (o, lse) if return_lse else o
    values = {"alibi_slopes": alibi_slopes, "attn_mask": attn_mask, "sinks": sinks, "bias": bias}
    values |= {"prefix_lens": prefix_lens, "document_ids": document_ids}
    values = {name: x for name, x in values.items() if x is not None}
    named: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": softmax_scale,
        "causal_alignment": causal_alignment,
        "window_size": window_size,
        "softcap": softcap,
        "return_lse": return_lse,
        "deterministic": deterministic,
    }
    if layout is not options.BHSD or not all(
        isinstance(x, torch.Tensor) for x in (q, k, v, *bounds.values(), *values.values())
    ):
        tensors = {"q": q, "k": k, "v": v, **bounds, **values}
        return options.call_with_views(
            flash_attn_func, layout, tensors, device_type=device_type, **named
        )
    return _through_dispatcher(q, k, v, device_type, bounds, values, named, modified)


def _replayed(
    q: Any,
    k: Any,
    v: Any,
    arguments: attention_checks.Options,
    return_lse: bool,
    deterministic: bool | None,
    view: View | None,
) -> Any:
    """The results of a call without modifications or key bounds, as an earlier one like it had; None of other kinds.

    What is recognised is known to be right, so that nothing is checked again.
    """
    if (
        type(q) not in plain.PLAIN_TYPES
        or type(k) not in plain.PLAIN_TYPES
        or type(v) not in plain.PLAIN_TYPES
        or plain.is_watched()
        or q.is_nested  # which have no shape
        or k.is_nested
        or v.is_nested
        or (view is not None and not q.dim() == k.dim() == v.dim() == 4)
    ):
        return None
    differentiable = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )
    wanted = return_lse or differentiable
    plan = attention_plan.replayed_plan("eager", q, k, v, arguments, wanted, view)
    if plan is None:
        return None
    if differentiable:
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        return apply_attention(q, k, v, (plan, arguments, return_lse, deterministic, view))
    o, *others = plan.run(q, k, v)
    if view is not None:
        o = view.back_in_place(o)
    return (o, others[0]) if return_lse else o


def _through_dispatcher(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    device_type: str | Policy | type[Policy] | None,
    bounds: dict[str, torch.Tensor],
    values: dict[str, torch.Tensor],
    named: dict[str, Any],
    modified: bool,
) -> Any:
    """:func:`flash_attn_func` by torch's ops, for any tensors ``[batch, heads, seqlen, dim]``.

    Args:
        q: as there.
        k: see q.
        v: see q.
        device_type: see q.
        bounds: the key bounds that are there, by name.
        values: the tensors of modifications that are there, by name.
        named: its other arguments.
        modified: scores are.
    """
    checks.check_places(q=q, k=k, v=v, **bounds)
    plain.refuse_tangents(q, k, v, op="attention")
    if named["deterministic"] is None:
        named["deterministic"] = torch.are_deterministic_algorithms_enabled()
    # The gradient needs LSE: computed now it costs next to nothing, later another run of the kernel.
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    learned = torch.is_grad_enabled() and any(x.requires_grad for x in values.values())
    if bounds and (differentiable or learned):
        return attention_by_packing(q, k, v, bounds, values, device_type, **named)
    return_lse, deterministic = named["return_lse"], named["deterministic"]
    top_left = named["causal_alignment"] != "bottom_right"
    policy = "" if device_type is None else plain.policy_name(device_type)
    arguments = (named["softmax_scale"], named["causal"], top_left, policy)
    if modified:
        if "bias" in values:
            values["bias_table"] = values.pop("bias")  # the modification's name
        return attention_modified.attention(
            *(q, k, v, named["window_size"], named["softcap"], values, bounds),
            options=arguments,
            return_lse=return_lse,
            deterministic=deterministic,
            differentiable=differentiable,
        )
    limits = (bounds.get("seqlens_k"), bounds.get("starts_k"))
    o, lse = FORWARD_OP(q, k, v, *arguments, return_lse or differentiable, deterministic, *limits)
    return (o, lse) if return_lse else o
