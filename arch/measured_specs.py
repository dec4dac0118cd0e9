"""Specs that were measured on a GPU: files that say what each number is and where it comes from.

The user's own lie in ``<cache_dir>/arch/<gpu>.json``, those that come with the package in ``arch/measured/<gpu>.json``;
``attention-autotuner bring-up`` writes them. A file serves the GPU whose name it bears, and the name of its spec.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..core.identity import slug
from ..core.trust import read_json
from ..errors import ArchSpecError
from .probe import ATTRIBUTES, DeviceProperties, two_integers
from .spec import ArchSpec

_log = logging.getLogger(__name__)

SCHEMA = 1
USER_FOLDER = "arch"  # under the cache folder
SHIPPED = Path(__file__).with_name("measured")
MAY_BE_ZERO = ("wgmma_flops_per_clk_per_sm",)

# What a device says of itself; the rest of a spec is rates, the clock, and names.
_SPEC_FIELDS = {item.name for item in fields(ArchSpec)}
LIMITS = tuple(name for name in ATTRIBUTES if name in _SPEC_FIELDS)


@dataclass(frozen=True, kw_only=True)
class MeasuredSpec:
    """A measured spec with its origins.

    Attributes:
        spec: the numbers.
        sources: for every field of the spec, where its value comes from.
        policy: name of the policy that it belongs to; None for a GPU that has none but its own.
        environment: of the measurement, as :class:`~..tuning.environment.Environment` has it.
    """

    spec: ArchSpec
    sources: Mapping[str, str]
    policy: str | None
    environment: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The form of the file."""
        return {"schema": SCHEMA, **asdict(self)}

    def fits(self, properties: DeviceProperties) -> bool:
        """True where a device is of the measured kind: its chip, with as many SMs."""
        spec, p = self.spec, properties
        return (spec.compute_capability, spec.num_sms) == (p.compute_capability, p.num_sms)

    def on(self, properties: DeviceProperties) -> ArchSpec:
        """The spec within the limits that a device gives today: drivers differ in some of them."""
        return replace(self.spec, **limits_of(properties))


def limits_of(properties: DeviceProperties) -> dict[str, Any]:
    """The fields of a spec that a device says of itself."""
    return {name: getattr(properties, name) for name in LIMITS}


def user_path(cache_dir: Path, device_name: str) -> Path:
    """Where the user's own spec of a GPU lies, or would lie."""
    return cache_dir / USER_FOLDER / f"{slug(device_name)}.json"


def for_device(device_name: str, cache_dir: Path) -> MeasuredSpec | None:
    """The spec measured on GPUs of a name: the user's, else the package's, else None.

    Raises:
        ArchSpecError: the file is damaged; the message names it and the field.
    """
    for path in (user_path(cache_dir, device_name), SHIPPED / f"{slug(device_name)}.json"):
        measured = _serving(path) if path.is_file() else None
        if measured is not None:
            return measured
    return None


def named(name: str, cache_dir: Path) -> MeasuredSpec | None:
    """The measured spec of a name, e.g. ``H200``: the user's, else the package's, else None.

    Args:
        name: as :func:`~.resolution.plain_name` gives it; case does not matter.
        cache_dir: the user's.

    Raises:
        ArchSpecError: a file whose own name has this name in it is damaged.
    """
    wanted = name.lower()
    for folder in (cache_dir / USER_FOLDER, SHIPPED):
        for path in sorted(folder.glob("*.json")):
            # Another GPU's file is none of the caller's business, damaged or not.
            if wanted in path.stem.replace("-", ""):
                measured = _serving(path)
                if measured is not None and measured.spec.name.lower() == wanted:
                    return measured
    return None


def _serving(path: Path) -> MeasuredSpec | None:
    """A file's spec; None for what another version of the package wrote, which is no damage."""
    data = _load(path)
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is int and schema != SCHEMA:
        _log.info("%s is of schema %d, not %d: it is passed over", path, schema, SCHEMA)
        return None
    return read(path)


def _load(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ArchSpecError(f"cannot read the measured spec {path}: {error}") from error


def read(path: Path) -> MeasuredSpec:
    """Read a file.

    Raises:
        ArchSpecError: it cannot be read, is of another schema, or a field is missing, unknown or outside its limits.
    """
    data = _load(path)
    try:
        return parse(data)
    except ArchSpecError as error:
        raise ArchSpecError(
            f"the measured spec {path} is damaged: {error}; remove it, or run `attention-autotuner bring-up` again"
        ) from error


def parse(data: Any) -> MeasuredSpec:
    """Rebuild from :meth:`MeasuredSpec.to_json`.

    Raises:
        ArchSpecError: a field is missing, unknown or outside its limits; the message names it.
    """
    if not isinstance(data, dict):
        raise ArchSpecError(f"it must be a JSON object, got {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise ArchSpecError(f"schema must be {SCHEMA}, got {data.get('schema')!r}")
    for name in ("spec", "sources", "environment"):
        if not isinstance(data.get(name), dict):
            kind = type(data.get(name)).__name__
            raise ArchSpecError(f"{name} must be an object, got {kind}")
    spec, sources, policy = data["spec"], data["sources"], data.get("policy")
    if policy is not None and not isinstance(policy, str):
        raise ArchSpecError(f"policy must be a name or null, got {policy!r}")
    known = {item.name: item.type for item in fields(ArchSpec)}
    unknown = sorted(spec.keys() - known.keys())
    if unknown:
        raise ArchSpecError(f"spec.{unknown[0]} is no field of a spec")
    for name in known:
        if name not in spec:
            raise ArchSpecError(f"spec.{name} is missing")
        if not isinstance(sources.get(name), str):
            raise ArchSpecError(f"sources.{name} must be a text, got {sources.get(name)!r}")
    values = {name: _value(name, kind, spec[name]) for name, kind in known.items()}
    return MeasuredSpec(
        spec=ArchSpec(**values), sources=sources, policy=policy, environment=data["environment"]
    )


def _value(name: str, kind: Any, value: Any) -> Any:
    """One field of a spec, checked against the type that the class declares."""
    if kind == "str":
        if isinstance(value, str) and value:
            return value
        raise ArchSpecError(f"spec.{name} must be a text, got {value!r}")
    if kind == "tuple[str, ...]":
        if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
            return tuple(value)
        raise ArchSpecError(f"spec.{name} must be a list of texts, got {value!r}")
    if kind == "tuple[int, int]":
        return two_integers(f"spec.{name}", value)
    if kind == "int" and type(value) is not int:
        raise ArchSpecError(f"spec.{name} must be an integer, got {value!r}")
    number = checked_number(f"spec.{name}", value)
    return int(number) if kind == "int" else number


def checked_number(name: str, value: Any) -> float:
    """A number of a spec, which is positive; wgmma's rate may be 0.

    Args:
        name: of the field, after whatever it is a part of.
        value: out of a file.

    Raises:
        ArchSpecError: it is no number or outside its limits; the message begins with the name.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ArchSpecError(f"{name} must be a number, got {value!r}")
    if value < 0 or (value == 0 and not name.endswith(MAY_BE_ZERO)):
        raise ArchSpecError(f"{name} must be positive, got {value!r}")
    return float(value)
