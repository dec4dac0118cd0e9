"""A code-generating autotuner for attention kernels.

Importing this package is cheap: torch is loaded by the first use of an operation, not by the import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import errors, settings
    from .api import (
        Decay,
        RetNetAttnFunc,
        flash_attn_func,
        flash_attn_varlen_func,
        matmul,
        retention_func,
        retnet_attn_func,
    )
    from .api.shared.warming import warmup
    from .serving.searching import tune, tune_problems, tune_step
    from .settings import mode
    from .tuning.functions import autotune, tune_together
    from .tuning.progress import listening

__all__ = [
    "Decay",
    "RetNetAttnFunc",
    "__version__",
    "autotune",
    "errors",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "listening",
    "matmul",
    "mode",
    "retention_func",
    "retnet_attn_func",
    "settings",
    "tune",
    "tune_problems",
    "tune_step",
    "tune_together",
    "warmup",
]

# The others are names in a module: of the calls, or of the searches.
_MODULES = ("errors", "settings")
_PLACES = {
    "listening": "tuning.progress",
    "mode": "settings",
    "warmup": "api.shared.warming",
    "tune": "serving.searching",
    "tune_problems": "serving.searching",
    "tune_step": "serving.searching",
    "autotune": "tuning.functions",
    "tune_together": "tuning.functions",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the import of the package stays free of torch.

    Raises:
        AttributeError: there is no such name.
        MissingPackageError: the name needs torch, which is not installed.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = name if name in _MODULES else _PLACES.get(name, "api")
    try:
        value: Any = importlib.import_module(f".{module}", __name__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from .errors import MissingPackageError

        raise MissingPackageError(
            f"{name} needs the package torch, which is not installed: pip install 'attention-autotuner[torch]'",
            name="torch",
        ) from error
    if name not in _MODULES:
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, including those not imported yet."""
    return sorted(__all__)
