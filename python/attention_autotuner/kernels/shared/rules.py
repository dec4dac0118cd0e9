"""Rules that candidates of every operation obey, and how they are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ...arch.occupancy import KernelNeeds, least_registers, register_cap
from ...arch.spec import ArchSpec
from ...core.candidate import Candidate
from ...core.operation import MAX_DIM_QK, MAX_DIM_V

Subject = TypeVar("Subject")
Rule = Callable[[Subject], "str | None"]  # the reason why not, or None
ArchRule = Callable[[KernelNeeds, ArchSpec], "str | None"]
Violation = tuple[str, str]  # the name of the rule, and the reason

MAX_STATE_REGISTERS = 128  # of a thread, of the kernels of family sm80


def first_violation(rules: Mapping[str, Rule[Subject]], subject: Subject) -> Violation | None:
    """The first of the rules that a subject breaks."""
    for name, rule in rules.items():
        reason = rule(subject)
        if reason is not None:
            return name, reason
    return None


def _value(subject: Any, name: str) -> int:
    """A knob of a subject or, where it has none of that name, what the subject itself has."""
    value: int = getattr(subject.knobs if hasattr(subject.knobs, name) else subject, name)
    return value


def within(knob: str, least: int, most: int) -> Rule[Any]:
    """A rule: a knob lies between two values, both included."""

    def rule(subject: Any) -> str | None:
        value = _value(subject, knob)
        return None if least <= value <= most else f"{knob} must be in {least}..{most}, got {value}"

    return rule


def known(knob: str, values: tuple[int, ...]) -> Rule[Any]:
    """A rule: a knob has one of some values."""

    def rule(subject: Any) -> str | None:
        value = _value(subject, knob)
        return None if value in values else f"{knob} must be one of {values}, got {value}"

    return rule


def multiple_of_16(knob: str, most: int) -> Rule[Any]:
    """A rule: a knob is a multiple of 16 up to some value."""

    def rule(subject: Any) -> str | None:
        value = _value(subject, knob)
        if value % 16 == 0 and 16 <= value <= most:
            return None
        return f"{knob} must be a multiple of 16 in 16..{most}, got {value}"

    return rule


def divides(knob: str, count: str, parties: str) -> Rule[Any]:
    """A rule: a knob is so many times 16, or a multiple, as another knob counts parties that share it."""

    def rule(subject: Any) -> str | None:
        value, number = _value(subject, knob), _value(subject, count)
        if value % (16 * number) == 0:
            return None
        return f"{knob} must be a multiple of 16 * {count}, got {value} for {number} {parties}"

    return rule


def product_within(first: str, second: str, least: int, most: int) -> Rule[Any]:
    """A rule: the product of two knobs lies between two values, both included."""

    def rule(subject: Any) -> str | None:
        a, b = _value(subject, first), _value(subject, second)
        if least <= a * b <= most:
            return None
        return f"{first} * {second} must be in {least}..{most}, got {a} * {b}"

    return rule


def state_fits_registers(subject: Any) -> str | None:
    """A thread's elements of a retention state fit its registers."""
    registers = subject.state_registers
    if registers <= MAX_STATE_REGISTERS:
        return None
    return (
        f"a thread's elements of the state must take at most {MAX_STATE_REGISTERS} registers, got "
        f"{registers}"
    )


def _copy_bytes_known(c: Candidate) -> str | None:
    return None if c.copy_bytes in (2, 16) else f"copy_bytes must be 2 or 16, got {c.copy_bytes}"


def _launch_bound_matters(kernel: KernelNeeds, spec: ArchSpec) -> str | None:
    ctas = kernel.ctas_per_sm
    if ctas == 1:
        return None
    cap = register_cap(kernel, spec)
    if cap < register_cap(kernel, spec, ctas - 1):
        return None
    return f"{ctas} CTAs leave as many registers a thread ({cap}) as {ctas - 1}: the same kernel"


def _smem_fits_block(kernel: KernelNeeds, spec: ArchSpec) -> str | None:
    if kernel.smem_bytes <= spec.smem_per_block_bytes:
        return None
    return (
        f"needs {kernel.smem_bytes} bytes of shared memory, {spec.name} gives a CTA "
        f"{spec.smem_per_block_bytes}"
    )


def _ctas_fit_sm(kernel: KernelNeeds, spec: ArchSpec) -> str | None:
    ctas = kernel.ctas_per_sm
    needed = ctas * (kernel.smem_bytes + spec.smem_reserved_per_block_bytes)
    if needed > spec.smem_per_sm_bytes:
        return (
            f"{ctas} CTAs need {needed} bytes of shared memory, an SM of {spec.name} has "
            f"{spec.smem_per_sm_bytes}"
        )
    threads = ctas * kernel.threads
    if threads > spec.max_threads_per_sm:
        return f"{ctas} CTAs have {threads} threads, {spec.name} holds {spec.max_threads_per_sm}"
    return None


def _registers_fit(kernel: KernelNeeds, spec: ArchSpec) -> str | None:
    needed, cap = least_registers(kernel), register_cap(kernel, spec)
    if needed <= cap:
        return None
    ctas, threads = kernel.ctas_per_sm, kernel.threads
    return f"needs about {needed} registers a thread, {ctas} CTAs of {threads} threads leave {cap}"


CLASS_PREDICATES: dict[str, Rule[Candidate]] = {
    "padded_dim_qk_range": multiple_of_16("padded_dim_qk", MAX_DIM_QK),
    "padded_dim_v_range": multiple_of_16("padded_dim_v", MAX_DIM_V),
}
COPY_PREDICATES: dict[str, Rule[Candidate]] = {"copy_bytes_known": _copy_bytes_known}
ARCH_PREDICATES: dict[str, ArchRule] = {
    "launch_bound_matters": _launch_bound_matters,
    "smem_fits_block": _smem_fits_block,
    "ctas_fit_sm": _ctas_fit_sm,
    "registers_fit": _registers_fit,
}


def needs_violation(kernel: KernelNeeds, spec: ArchSpec) -> Violation | None:
    """The first limit of a GPU that a kernel breaks."""
    for name, rule in ARCH_PREDICATES.items():
        reason = rule(kernel, spec)
        if reason is not None:
            return name, f"{kernel.name}: {reason}" if kernel.name else reason
    return None
