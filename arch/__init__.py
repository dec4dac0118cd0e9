"""GPUs: specs, limits, and the policies that turn problems into candidates."""

from __future__ import annotations

from ..core.candidate import Rejection
from .a100 import A100
from .h100 import H100
from .policy import Policy
from .probe import DeviceProperties, probe
from .resolution import detect, from_properties, names, resolve
from .rtx4090 import RTX4090
from .spec import ArchSpec

__all__ = [
    "A100",
    "H100",
    "RTX4090",
    "ArchSpec",
    "DeviceProperties",
    "Policy",
    "Rejection",
    "detect",
    "from_properties",
    "names",
    "probe",
    "resolve",
]
