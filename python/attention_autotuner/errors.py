"""Every error this package raises on purpose, each naming the constraint and the value that broke it.

All derive from :class:`AttentionAutotunerError`, and each also from the built-in exception that a caller would
expect (``ValueError`` for arguments, ``RuntimeError`` for machines), so that existing handlers keep working.
"""

from __future__ import annotations


class AttentionAutotunerError(Exception):
    """Base of all errors raised on purpose by this package."""


class UnsupportedProblemError(AttentionAutotunerError, ValueError):
    """The arguments name a problem that no kernel here can solve; the message names constraint and value."""


class UnsupportedArgumentError(UnsupportedProblemError, TypeError):
    """An argument that the function does not have, or that has no business in its place; the message names both."""


class ProblemFileError(UnsupportedProblemError):
    """A file of problems holds something else; the message names the file, the line and the field."""


class UnknownCandidateError(UnsupportedProblemError):
    """The ``config`` of a call names no candidate of its problem; the message lists names near it."""


class UnsupportedArchitectureError(AttentionAutotunerError, RuntimeError):
    """The requested architecture is unknown, or the present GPU cannot run kernels made for it."""


class ArchSpecError(AttentionAutotunerError, ValueError):
    """A file that describes a GPU is damaged; the message names the file and the field."""


class DistributedError(AttentionAutotunerError, RuntimeError):
    """Ranks that tune together do not come to one decision: one failed, is gone, or does something else."""


class NotWarmError(AttentionAutotunerError, RuntimeError):
    """A call under CUDA-graph capture would have had to build, load or prepare a kernel first."""


class ToolchainError(AttentionAutotunerError, RuntimeError):
    """The compiler, CMake, Ninja or the CUTLASS headers are missing or do not fit."""


class BuildError(AttentionAutotunerError, RuntimeError):
    """A kernel failed to compile; the message ends with the path of the kept log."""


class StoreError(AttentionAutotunerError, RuntimeError):
    """The kernel cache folder cannot be created, written or trusted."""


class LeaseError(StoreError):
    """Another process holds a lease for longer than one is waited for."""


class BundleError(AttentionAutotunerError, ValueError):
    """A folder is no bundle that this package can read, or must not be replaced by one."""


class UntrustedError(StoreError, BundleError):
    """A file or folder of a cache or a bundle belongs to, or can be changed by, somebody who is not trusted."""


class ArtifactError(AttentionAutotunerError, RuntimeError):
    """A built kernel library cannot be loaded, prepared or launched."""


class DeviceMemoryError(ArtifactError, MemoryError):
    """The device ran out of memory while a kernel was prepared or launched."""


class BusyError(AttentionAutotunerError, RuntimeError):
    """A GPU is at work for others, or takes no second process, so that a search cannot measure on it."""


class RecordError(AttentionAutotunerError, ValueError):
    """A tuning record cannot be read or does not follow the schema."""


class SettingsError(AttentionAutotunerError, ValueError):
    """An ``ATTENTION_AUTOTUNER_*`` setting has a value outside its documented range."""


class NoCandidateError(AttentionAutotunerError, RuntimeError):
    """A search ended without a usable kernel; the message tabulates why each candidate fell out."""


class NoKernelError(NoCandidateError):
    """No kernel of a GPU computes a problem, or none of its configurations is legal there."""


class UntunedError(AttentionAutotunerError, RuntimeError):
    """No measured pick is known for a call's problem, and the setting ``STRICT_PICKS`` wants one."""


class MissingPackageError(AttentionAutotunerError, ImportError):
    """An optional package is missing; the message names it and the command that installs it."""
