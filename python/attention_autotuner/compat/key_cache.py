"""Caches of ``flash_attn_with_kvcache``: checks of all before anything is written, and the writing."""

from __future__ import annotations

from typing import Any

import torch

from ..api.attention.checks import check_bounds
from ..api.shared import checks, plain
from ..core.memo import Table
from ..core.operation import require
from ..errors import UnsupportedProblemError
from .tensors import check_tensor, check_three, padded_shape

# Kinds of calls whose tensors fit: to check them takes several times 10 us, at every step of decoding.
_FITTING: Table[Any, bool] = Table("caches.fitting", bound=256)


def check_caches(
    q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, lengths: Any, leftpad: Any
) -> None:
    """Check the tensors of a call, as the function underneath does; their values are not looked at.

    Raises:
        UnsupportedProblemError: they do not fit together, or it would refuse them.
    """
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    ends = {"cache_seqlens": lengths, "cache_leftpad": leftpad}
    key = _kind_of(*tensors.values(), *ends.values())
    if key is not None and key in _FITTING:
        plain.refuse_tangents(q, k_cache, v_cache, op="attention")
        return
    for name, x in tensors.items():
        if x is not None or name not in ("k", "v"):
            check_tensor(name, x)
            checks.check_layout(name, x)
            checks.check_dims(name, x, "[batch, seqlen, heads, dim]")
            same = x.shape[0] == q.shape[0]
            require(same, f"{name} must have q's batch of {len(q)}, got {len(x)}")
    plain.refuse_tangents(q, k_cache, v_cache, op="attention")
    checks.check_places(q=q, k_cache=k_cache, v_cache=v_cache)
    checks.check_kinds(q, k_cache, v_cache)
    check_three(4, q, k_cache, v_cache)
    shapes = (padded_shape(x) for x in (q, k_cache, v_cache))
    checks.check_shapes(*((batch, heads, seqlen, dim) for batch, seqlen, heads, dim in shapes))
    for name, x in ends.items():
        if x is not None and not (name == "cache_seqlens" and isinstance(x, int)):
            check_tensor(name, x)
            checks.check_like(name, x, q.shape[:1], torch.int32, q.device)
    if leftpad is not None:
        check_bounds(q, cache_leftpad=leftpad)
    if k is not None or v is not None:
        if k is None or v is None or lengths is None:
            raise UnsupportedProblemError(
                "k, v and cache_seqlens must be given together where new keys are written, got k="
                f"{checks.shown(k)}, v={checks.shown(v)}, cache_seqlens={checks.shown(lengths)}"
            )
        for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
            shape = (*k.shape[:2], *cache.shape[2:])
            checks.check_like(name, x, shape, cache.dtype, cache.device)
            if _overlaps(cache):
                raise UnsupportedProblemError(
                    f"{name}_cache must have memory of its own for each element where new keys are written, got "
                    f"the strides {tuple(cache.stride())} for {tuple(cache.shape)}: clone it"
                )
    if key is not None:
        _FITTING.remember(key, True)


def _kind_of(*tensors: Any) -> Any:
    """All that the checks depend on of tensors, numbers and None; None of others, and while torch compiles."""
    if torch.compiler.is_compiling():
        return None
    kinds: list[Any] = []
    for x in tensors:
        if type(x) in plain.PLAIN_TYPES and x.layout is torch.strided and not x.is_nested:
            kinds.append((x.shape, x.dtype, x.device, x.stride()))
        elif x is None or type(x) is int:
            kinds.append(type(x))
        else:
            return None
    return tuple(kinds)


def _overlaps(x: torch.Tensor) -> bool:
    """Return True where elements of a tensor may share memory, as those of an expanded one do."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def lengths_of(q: torch.Tensor, lengths: Any, new: int, size: int) -> torch.Tensor | None:
    """The keys that caches have, int32 ``[batch]``, of a number or a tensor; values on a GPU are not looked at.

    Raises:
        UnsupportedProblemError: they are something else, or negative, or leave no space for the new keys.
    """
    if lengths is None:
        return None
    most = size - new
    words = "cache_seqlens must be from 0 to {} for {} new keys in a cache of {}, got {}"
    if isinstance(lengths, int):
        require(0 <= lengths <= most, words.format(most, new, size, lengths))
        return q.new_full(q.shape[:1], lengths, dtype=torch.int32)
    tensor: torch.Tensor = lengths
    if checks.has_values(tensor):
        wrong = [x for x in tensor.tolist() if not 0 <= x <= most]
        require(not wrong, words.format(most, new, size, wrong))
    return tensor.contiguous()


def append(ends: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write new keys and values behind those of every batch entry; nothing waits for the GPU to check the space.

    Args:
        ends: of the keys that are there.
        pairs: of a cache and what is new.
    """
    batch, seqlen = pairs[0][1].shape[:2]
    rows = ends.long()[:, None]  # as torch indexes by
    if seqlen != 1:
        rows = rows + torch.arange(seqlen, device=ends.device)
    entries = torch.arange(batch, device=ends.device)[:, None]
    with torch.no_grad():
        for cache, new in pairs:
            cache.index_put_((entries, rows), new)
