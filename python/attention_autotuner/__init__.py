"""A code-generating autotuner for attention kernels.

Importing this package is cheap: torch is loaded by the first use of an operation, not by the import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import errors, settings
    from .api import Decay, RetNetAttnFunc, flash_attn_func, retention_func, retnet_attn_func
    from .serving.dispatch import tune, tune_step

__all__ = [
    "Decay",
    "RetNetAttnFunc",
    "__version__",
    "errors",
    "flash_attn_func",
    "retention_func",
    "retnet_attn_func",
    "settings",
    "tune",
    "tune_step",
]

# Public name -> (module, attribute); no attribute means the module itself.
_EXPORTS = {
    "Decay": (".api", "Decay"),
    "RetNetAttnFunc": (".api", "RetNetAttnFunc"),
    "errors": (".errors", ""),
    "flash_attn_func": (".api", "flash_attn_func"),
    "retention_func": (".api", "retention_func"),
    "retnet_attn_func": (".api", "retnet_attn_func"),
    "settings": (".settings", ""),
    "tune": (".serving.dispatch", "tune"),
    "tune_step": (".serving.dispatch", "tune_step"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the import of the package stays free of torch.

    Raises:
        AttributeError: there is no such name.
        MissingPackageError: the name needs torch, which is not installed.
    """
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _EXPORTS[name]
    try:
        value: Any = importlib.import_module(module_name, __name__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from .errors import MissingPackageError

        raise MissingPackageError(
            f"{name} needs the package torch, which is not installed: pip install 'attention-autotuner[torch]'",
            name="torch",
        ) from error
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, including those not imported yet."""
    return sorted(__all__)
