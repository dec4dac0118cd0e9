"""The flash-attn packages, each where it is installed: functions of ``[batch, seqlen, heads, dim]``.

flash-attn 4 compiles a kernel on the first call of every kind of problem, one after the other: of a suite of head dims
that takes longer than its comparison. It keeps kernels on disk if asked to, so several processes compile first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attention_autotuner.core.problem import Problem

from ..calls import Function, options_of, others_of, rows_of_heads
from ..contenders import DETERMINISTIC
from .base import Baseline, Limits, Mode, top_left, two_head_dims
from .compile_ahead import first_of_each, in_processes, run_ahead

HOPPER = (9, 0)
# flash-attn 4 reads it when it is imported.
KEEPS_KERNELS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


class FlashAttention2(Baseline):
    """flash-attn 2."""

    name = "flash_attn_2"
    title = "flash-attn 2"
    layout = staticmethod(rows_of_heads)
    module = "flash_attn"
    sinks = ""  # its keyword for them
    modifications = frozenset({"window", "softcap", "alibi_slopes", "packed"})
    limits: Limits = (two_head_dims, top_left)

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`; some versions return the LSE beside the output, which is dropped."""
        module, options = import_module(self.module), {**options_of(problem), **self.extra(problem)}
        function = module.flash_attn_varlen_func if problem.packed else module.flash_attn_func
        names = [self.sinks if name == "sinks" else name for name in others_of(problem)]

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> Any:
            result = function(q, k, v, **options, **dict(zip(names, others, strict=True)))
            return result[0] if isinstance(result, tuple) else result

        return run

    def extra(self, problem: Problem) -> Mapping[str, Any]:
        """Options of a call that a problem does not name."""
        return {}

    def limit(self, problem: Problem) -> str:
        """See :meth:`Baseline.limit`."""
        return self.absence() or super().limit(problem)

    def absence(self) -> str:
        """The reason why it cannot be timed on this machine, or an empty string."""
        try:
            spec = find_spec(self.module)
        except ModuleNotFoundError:  # the package around the module
            spec = None
        # flash-attn 4 lies in a folder of the name of flash-attn 2, which has no file of its own then.
        present = spec is not None and spec.origin is not None
        return "" if present else f"{self.title} is not installed"


def unlike_head_dims(problem: Problem) -> str:
    """The reason against V of another head dim than Q, where flash-attn 3 has no kernel of the two."""
    qk, v = problem.dim_qk, problem.dim_v
    taken = qk == v or qk <= 64 or (128 < qk <= 192 and 96 < v <= 128)
    return "" if taken else f"it has no kernel of {qk}/{v}"


class FlashAttention3(FlashAttention2):
    """flash-attn 3, for Hopper alone.

    A forward pass may split the keys as it sees fit, as its function for caches does: without, few queries on many
    keys leave most of the GPU idle.
    """

    name = "flash_attn_3"
    title = "flash-attn 3"
    module = "flash_attn_interface"
    modifications = frozenset({"window", "softcap", "packed"})
    limits: Limits = (top_left, unlike_head_dims)

    def extra(self, problem: Problem) -> Mapping[str, Any]:
        """See :meth:`FlashAttention2.extra`."""
        return {"num_splits": 0} if problem.direction == "forward" else {}

    def absence(self) -> str:
        """See :meth:`FlashAttention2.absence`."""
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else HOPPER
        foreign = "" if capability == HOPPER else f"{self.title} is for compute capability 9.0"
        return super().absence() or foreign


class FlashAttention4(FlashAttention2):
    """flash-attn 4, which compiles its kernels on their first call; see :func:`add_site`."""

    name = "flash_attn_4"
    title = "flash-attn 4"
    module = "flash_attn.cute"
    sinks = "learnable_sink"
    modifications = frozenset({"window", "softcap", "sinks", "packed"})
    limits = (top_left,)

    def get_ready(self, problems: Sequence[Problem], processes: int) -> None:
        """Compile in other processes, one for each kind of problem; this one then reads their kernels."""
        os.environ.setdefault(KEEPS_KERNELS, "1")
        work: list[tuple[FlashAttention4, Problem, Mode]] = [
            (self, problem, mode)
            for problem in first_of_each(problems, kind_of)
            for mode in self.modes([problem.direction])
        ]
        in_processes(run_ahead, work, processes)


class DeterministicPass(FlashAttention2):
    """A deterministic backward pass, where our deterministic mode is raced, which it is compared with."""

    gradients = "through autograd, beside our deterministic mode"

    def extra(self, problem: Problem) -> Mapping[str, Any]:
        """See :meth:`FlashAttention2.extra`."""
        return {"deterministic": True}

    def modes(self, modes: Sequence[Mode]) -> list[Mode]:
        """The backward pass alone; see :meth:`Baseline.modes`."""
        return [mode for mode in modes if mode == "backward"]

    def ours(self, problem: Problem, mode: Mode) -> str:
        """See :meth:`Baseline.ours`."""
        return DETERMINISTIC


def not_above_192(problem: Problem) -> str:
    """The reason against a backward pass without a deterministic form for wide heads."""
    beyond = max(problem.dim_qk, problem.dim_v) > 192
    return "it is not deterministic above 192 columns" if beyond else ""


class FlashAttention3Deterministic(DeterministicPass, FlashAttention3):
    """flash-attn 3's deterministic backward pass."""

    name = "flash_attn_3_deterministic"
    title = "flash-attn 3, deterministic"
    limits = (top_left, unlike_head_dims, not_above_192)


class FlashAttention4Deterministic(DeterministicPass, FlashAttention4):
    """flash-attn 4's deterministic backward pass."""

    name = "flash_attn_4_deterministic"
    title = "flash-attn 4, deterministic"


def kind_of(problem: Problem) -> Problem:
    """A problem without what flash-attn 4 compiles nothing for: the number of batch entries and of heads."""
    if problem.packed:
        return problem
    return replace(problem, batch=1, heads_q=problem.heads_q // problem.heads_kv, heads_kv=1)


INSTALLED = (FlashAttention3.name, FlashAttention3Deterministic.name)
"""The baselines that the package of flash-attn 3 brings."""

FROM_SITE = (FlashAttention4.name, FlashAttention4Deterministic.name)
"""The baselines that a folder of wheels brings; see :func:`add_site`."""


def beside_suites(site: Path | None) -> tuple[str, ...]:
    """The baselines that are raced beside those of any suite: flash-attn 3 where it is installed, and those of a site.

    Args:
        site: the folder of :func:`add_site`, or None.
    """
    installed = () if FlashAttention3().absence() else INSTALLED
    return installed if site is None else (*installed, *FROM_SITE)


def add_site(site: Path) -> None:
    """Make flash-attn 4 importable from a folder of unpacked wheels, before anything of it is imported.

    Raises:
        FileNotFoundError: the folder does not hold ``flash_attn/cute``.
    """
    if not (site / "flash_attn" / "cute").is_dir():
        raise FileNotFoundError(f"{site} does not hold flash_attn/cute")
    packages = site / "nvidia_cutlass_dsl" / "dsl_packages"
    sys.path[:0] = [str(folder) for folder in (site, packages) if folder.is_dir()]
