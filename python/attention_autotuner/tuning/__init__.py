"""Choose, measure and remember.

:func:`tune` is loaded on first use, so that reading a record does not load the builder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .search import tune

__all__ = ["tune"]


def __getattr__(name: str) -> Any:
    """Import the search when it is first asked for."""
    if name != "tune":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .search import tune

    return tune
