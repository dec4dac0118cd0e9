"""Every knob that the environment may turn, in one typed table, read in one place.

:data:`TABLE` is the whole list; :func:`from_environment` turns an environment into :class:`Settings`, :func:`current`
answers what is in force, and :func:`override` changes it for a block of code. Nothing else in the package reads
environment variables that start with :data:`PREFIX`.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import functools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from .errors import SettingsError

PREFIX = "ATTENTION_AUTOTUNER_"

Mode = Literal["off", "cached", "tune"]
Effort = Literal["none", "quick", "full"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]

_LOGGER_NAME = "attention_autotuner"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def default_cache_dir() -> Path:
    """Where kernels and records are kept when ``CACHE_DIR`` does not say: the user's cache folder."""
    try:
        import platformdirs
    except ModuleNotFoundError:
        # A source tree on a bare machine: what platformdirs answers on Linux.
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(base).expanduser() / "attention_autotuner"
    return platformdirs.user_cache_path("attention_autotuner")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is in force; what each field means is in the table of the variables.

    Raises:
        SettingsError: a field is outside what the table allows.
    """

    mode: Mode = "cached"
    effort: Effort = "quick"
    budget_seconds: float | None = None
    always_tune: bool = False
    strict_versions: bool = False
    log_level: LogLevel = "warning"
    print_tuning: bool = False
    cache_dir: Path = field(default_factory=default_cache_dir)
    jobs: int | None = None
    cutlass_dir: Path | None = None
    nvcc: Path | None = None
    bundle: Path | None = None

    def __post_init__(self) -> None:
        for setting in TABLE:
            value = getattr(self, setting.field)
            if not setting.allows(value):
                raise SettingsError(f"{setting.field}={value!r}: must be {setting.allowed}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table.

    Attributes:
        variable: the environment variable without its prefix.
        field: the field of :class:`Settings`.
        allowed: what values it takes, for documents and error messages.
        default: the default, for documents.
        meaning: one sentence.
        parse: text to value; raises ``ValueError`` for text it cannot read.
        allows: whether a value is in range.
    """

    variable: str
    field: str
    allowed: str
    default: str
    meaning: str
    parse: Callable[[str], Any]
    allows: Callable[[Any], bool]

    @property
    def name(self) -> str:
        """The full name of the environment variable."""
        return PREFIX + self.variable


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(text)


def _parse_path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _choice(
    variable: str, name: str, choices: tuple[str, ...], default: str, meaning: str
) -> Setting:
    return Setting(
        variable=variable,
        field=name,
        allowed=", ".join(choices[:-1]) + " or " + choices[-1],
        default=default,
        meaning=meaning,
        parse=str.lower,
        allows=lambda value: isinstance(value, str) and value in choices,
    )


def _switch(variable: str, name: str, meaning: str) -> Setting:
    return Setting(
        variable=variable,
        field=name,
        allowed="1, true, yes, on, 0, false, no or off",
        default="0",
        meaning=meaning,
        parse=_parse_bool,
        allows=lambda value: isinstance(value, bool),
    )


def _path(variable: str, name: str, allowed: str, default: str, meaning: str) -> Setting:
    return Setting(
        variable=variable,
        field=name,
        allowed=allowed,
        default=default,
        meaning=meaning,
        parse=_parse_path,
        allows=lambda value: isinstance(value, Path) or (value is None and name != "cache_dir"),
    )


def _is_positive_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value > 0


TABLE: tuple[Setting, ...] = (
    _choice(
        "MODE",
        "mode",
        ("off", "cached", "tune"),
        "cached",
        "What a call does about tuning: the default alone; recorded and shipped picks; or a search where "
        "nothing measured serves.",
    ),
    _choice(
        "EFFORT",
        "effort",
        ("none", "quick", "full"),
        "quick",
        "How much a search builds and measures: nothing, the best by the cost model, or every legal candidate.",
    ),
    Setting(
        variable="BUDGET_SECONDS",
        field="budget_seconds",
        allowed="a positive number of seconds",
        default="unlimited",
        meaning="Wall time after which a search stops and keeps the best so far.",
        parse=float,
        allows=lambda value: value is None or _is_positive_number(value),
    ),
    _switch("ALWAYS_TUNE", "always_tune", "A search ignores the record of an earlier one."),
    _switch(
        "STRICT_VERSIONS",
        "strict_versions",
        "A record made with another compiler or driver is a miss, not served with a mark.",
    ),
    _choice(
        "LOG_LEVEL",
        "log_level",
        ("debug", "info", "warning", "error", "critical"),
        "warning",
        "Level of the logger `attention_autotuner`.",
    ),
    _switch(
        "PRINT", "print_tuning", "A search prints its progress and its ranked table to stderr."
    ),
    _path(
        "CACHE_DIR",
        "cache_dir",
        "a folder that can be written",
        "the user's cache folder",
        "Where built kernels and tuning records are kept.",
    ),
    Setting(
        variable="JOBS",
        field="jobs",
        allowed="a positive integer",
        default="from free memory and cores",
        meaning="Compiler processes at a time.",
        parse=int,
        allows=lambda value: (
            value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
        ),
    ),
    _path(
        "CUTLASS_DIR",
        "cutlass_dir",
        "a folder that holds include/cutlass/version.h",
        "third_party/cutlass, else the installed nvidia-cutlass package",
        "The CUTLASS headers to compile with.",
    ),
    _path(
        "NVCC",
        "nvcc",
        "the path of an nvcc executable",
        "CUDA_HOME, PATH, then the toolchain wheels",
        "The CUDA compiler.",
    ),
    _path(
        "BUNDLE",
        "bundle",
        "a folder that `attention-autotuner export` wrote",
        "installed kernel packages alone",
        "Built kernels that serve before a compiler is looked for.",
    ),
)


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read settings from an environment; unset and empty variables keep their defaults.

    Args:
        environ: variable names and values, usually ``os.environ``.

    Raises:
        SettingsError: a value cannot be read or is outside its range, or a variable carries the prefix but is not in
            the table; the message names variable, value and what is allowed.
    """
    known = {setting.name for setting in TABLE}
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "known: " + ", ".join(sorted(known))
            raise SettingsError(f"{name}={environ[name]!r}: there is no such setting; {hint}")
    values: dict[str, Any] = {}
    for setting in TABLE:
        text = environ.get(setting.name, "").strip()
        if not text:
            continue
        try:
            value = setting.parse(text)
        except ValueError:
            valid = False
        else:
            valid = setting.allows(value)
        if not valid:
            raise SettingsError(f"{setting.name}={text!r}: must be {setting.allowed}")
        values[setting.field] = value
    return Settings(**values)


@functools.cache
def _from_process_environment() -> Settings:
    settings = from_environment(os.environ)
    configure_logging(settings.log_level)
    return settings


_overridden: contextvars.ContextVar[Settings | None] = contextvars.ContextVar(
    "attention_autotuner_settings", default=None
)


def current() -> Settings:
    """The settings in force here: those of the innermost :func:`override`, else the environment as first read.

    Raises:
        SettingsError: the environment holds a value that is not allowed.
    """
    return _overridden.get() or _from_process_environment()


def reload() -> Settings:
    """Read the environment again, for programs that change it after the first use."""
    _from_process_environment.cache_clear()
    return current()


@contextlib.contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Change settings inside a ``with`` block, for this thread or task only.

    Args:
        changes: fields of :class:`Settings` by name. Paths may be given as strings.

    Raises:
        SettingsError: a field does not exist or its value is outside its range.
    """
    names = {item.name for item in fields(Settings)}
    for name in changes:
        if name not in names:
            raise SettingsError(f"there is no setting {name!r}; known: {', '.join(sorted(names))}")
    for name in ("cache_dir", "cutlass_dir", "nvcc", "bundle"):
        if isinstance(changes.get(name), str):
            changes[name] = _parse_path(changes[name])
    settings = replace(current(), **changes)
    level_before = logging.getLogger(_LOGGER_NAME).level
    token = _overridden.set(settings)
    if "log_level" in changes:
        configure_logging(settings.log_level)
    try:
        yield settings
    finally:
        _overridden.reset(token)
        if "log_level" in changes:
            logging.getLogger(_LOGGER_NAME).setLevel(level_before)


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic in stubs only
    """Prints to stderr while the program has set up no logging of its own, and keeps silent once it has."""

    def handle(self, record: logging.LogRecord) -> bool:
        own = logging.getLogger(_LOGGER_NAME)
        if logging.getLogger().handlers or any(handler is not self for handler in own.handlers):
            return False
        return super().handle(record)


def configure_logging(level: LogLevel) -> logging.Logger:
    """Give the package's logger its level, without touching handlers that the program installed.

    Python's own last resort shows warnings only, so a fallback makes ``LOG_LEVEL=info`` visible in programs that
    never configure logging.

    Returns:
        The logger ``attention_autotuner``.
    """
    logger = logging.getLogger(_LOGGER_NAME)
    logger.setLevel(level.upper())
    if not any(isinstance(handler, _FallbackHandler) for handler in logger.handlers):
        handler = _FallbackHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    return logger


def markdown_table() -> str:
    """The table as documents show it."""
    lines = ["| Variable | Values | Default | Meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {row.allowed} | {row.default} | {row.meaning} |" for row in TABLE]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def adopted(found: Settings) -> Iterator[None]:
    """Put settings that were in force elsewhere in force here, for a thread that works on behalf of another.

    Args:
        found: what :func:`current` gave there; it is what it gives inside the ``with`` block, the very object.
    """
    token = _overridden.set(found)
    try:
        yield
    finally:
        _overridden.reset(token)
