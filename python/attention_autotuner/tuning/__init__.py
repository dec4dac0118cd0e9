"""Choose, measure and remember.

:func:`tune` and :func:`tune_step` are loaded on first use, so that reading a record does not load the builder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .search import tune
    from .step import tune_step

__all__ = ["tune", "tune_step"]


def __getattr__(name: str) -> Any:
    """Import a search when it is first asked for."""
    if name in __all__:
        from . import step

        return getattr(step, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
