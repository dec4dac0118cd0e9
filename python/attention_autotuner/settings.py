"""Every knob that the environment may turn, in one typed table, read in one place.

:data:`TABLE` is the whole list; :func:`from_environment` turns an environment into :class:`Settings`, :func:`current`
returns those in force, and :func:`override` changes them for a block of code. Nothing else in the package reads
environment variables that start with :data:`PREFIX`.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import functools
import logging
import os
import pwd
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from .core.user_cache import default_cache_dir
from .errors import SettingsError
from .logs import NAME, configure_logging

PREFIX = "ATTENTION_AUTOTUNER_"

Mode = Literal["off", "cached", "tune", "frozen"]
Effort = Literal["none", "quick", "full"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]

_SWITCH = {"1": True, "true": True, "yes": True, "on": True}
_SWITCH |= {"0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Kind:
    """A type of settings.

    Attributes:
        parse: text to value; raises ``ValueError`` or ``KeyError`` for text it cannot read.
        allows: whether a value is in range.
        typed: what a value that is no text must be, in messages.
    """

    parse: Callable[[str], Any]
    allows: Callable[[Any], bool]
    typed: str = ""


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
        field: the field of :class:`Settings`.
        kind: its :class:`Kind`.
        allowed: the values it takes, for documents and error messages.
        default: the default, for documents.
        meaning: one sentence.
        optional: None is a value, too.
    """

    field: str
    kind: Kind
    allowed: str
    default: str
    meaning: str
    optional: bool

    @property
    def variable(self) -> str:
        """The environment variable without its prefix."""
        return "PRINT" if self.field == "print_tuning" else self.field.upper()

    @property
    def name(self) -> str:
        """The full name of the environment variable."""
        return PREFIX + self.variable

    def allows(self, value: Any) -> bool:
        """Return whether a value is in range."""
        return (value is None and self.optional) or self.kind.allows(value)


def _is_positive(value: Any, kinds: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, kinds) and 0 < value < float("inf")


def _user_ids(text: str) -> tuple[int, ...]:
    names = re.split(r"[\s,]+", text)
    return tuple(int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid for name in names)


def _are_user_ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(uid) is int and uid >= 0 for uid in value)


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # there is no such user, or no home
        raise ValueError(text) from error


_USERS = Kind(_user_ids, _are_user_ids, "a tuple of numbers of users")
_PATH = Kind(_path, lambda value: isinstance(value, Path), "a Path")
_BOOL = Kind(
    lambda text: _SWITCH[text.lower()], lambda value: isinstance(value, bool), "True or False"
)
_SECONDS = Kind(float, lambda value: _is_positive(value, (int, float)), "an int or a float")
_COUNT = Kind(int, lambda value: _is_positive(value, int), "an int")


def _setting(kind: Kind, allowed: str, shown: str, meaning: str, **value: Any) -> Any:
    """A field of :class:`Settings` with its row of the table; by default it is None."""
    row = {"kind": kind, "allowed": allowed, "default": shown, "meaning": meaning}
    return field(**(value or {"default": None}), metadata=row)


def _choice(choices: Any, shown: str, meaning: str, **value: Any) -> Any:
    words = get_args(choices)
    kind = Kind(str.lower, lambda value: isinstance(value, str) and value in words)
    allowed = ", ".join(words[:-1]) + " or " + words[-1]
    return _setting(kind, allowed, shown, meaning, **(value or {"default": shown}))


def _switch(meaning: str, *, default: bool = False) -> Any:
    allowed = "1, true, yes, on, 0, false, no or off"
    return _setting(_BOOL, allowed, str(int(default)), meaning, default=default)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings in force; the table of the variables says what each field means.

    Raises:
        SettingsError: a field is outside what the table allows.
    """

    mode: Mode = _choice(
        Mode,
        "cached",
        "What a call does about tuning: the default alone; recorded and shipped picks; a search where nothing measured "
        "serves; or the picks that were recorded when the process first asked, and deterministic kernels alone.",
    )
    forward_mode: Mode | None = _choice(
        Mode, "as `MODE`", "The same of forward passes.", default=None
    )
    backward_mode: Mode | None = _choice(
        Mode, "as `MODE`", "The same of backward passes.", default=None
    )
    effort: Effort = _choice(
        Effort,
        "quick",
        "How much a search builds and measures: nothing, the best by the cost model, or every legal candidate.",
    )
    budget_seconds: float | None = _setting(
        _SECONDS,
        "a positive number of seconds",
        "unlimited",
        "Wall time after which a search stops and keeps the best so far.",
    )
    always_tune: bool = _switch(
        "A search ignores the record of an earlier one; where mode is tune, a call searches once a process, whatever "
        "serves."
    )
    strict_versions: bool = _switch(
        "A record made with another compiler or driver is a miss, not served with a mark."
    )
    strict_proof: bool = _switch(
        "A measured pick of whose verification no proof was kept is a miss, not served with a mark.",
        default=True,
    )
    strict_kernels: bool = _switch(
        "A call whose kernel can be neither built nor loaded is an error, not served by the PyTorch reference."
    )
    strict_picks: bool = _switch(
        "A call for which no measured pick is known is an error, not served by the default, unless its mode is off."
    )
    untuned_log: Path | None = _setting(
        _PATH,
        "a file that can be written",
        "none",
        "Where problems of calls that no measured pick serves are listed, each once, for `tune --problems`.",
    )
    log_level: LogLevel = _choice(
        LogLevel,
        "warning",
        "Level of the logger `attention_autotuner`: builds and results of searches are `info`, their steps and what "
        "serves a call `debug`.",
    )
    print_tuning: bool = _switch("A search prints its progress and its ranked table to stderr.")
    in_process: bool = _switch(
        "A search runs its candidates in the caller's process, which one that faults ends, not in one of their own."
    )
    allow_busy: bool = _switch("A search measures on a GPU that does other work at the same time.")
    memory_bytes: int | None = _setting(
        _COUNT,
        "a positive integer",
        "all that is free",
        "Device memory that the process of a search may take beside its CUDA context.",
    )
    cache_dir: Path = _setting(
        _PATH,
        "a folder that can be written",
        "the user's cache folder",
        "Where built kernels and tuning records are kept.",
        default_factory=default_cache_dir,
    )
    jobs: int | None = _setting(
        _COUNT, "a positive integer", "from free memory and cores", "Compiler processes at a time."
    )
    cutlass_dir: Path | None = _setting(
        _PATH,
        "a folder that holds include/cutlass/version.h",
        "third_party/cutlass, else the installed nvidia-cutlass package",
        "The CUTLASS headers to compile with.",
    )
    nvcc: Path | None = _setting(
        _PATH,
        "an nvcc executable or the folder of a CUDA toolkit",
        "PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, then the toolchain wheels",
        "The CUDA compiler.",
    )
    bundle: Path | None = _setting(
        _PATH,
        "a folder that `attention-autotuner export` wrote",
        "installed kernel packages alone",
        "Built kernels that serve before a compiler is looked for.",
    )
    trust_owners: tuple[int, ...] | None = _setting(
        _USERS,
        "names or numbers of users, with commas between them",
        "you, root and the owner of this package",
        "More users whose caches and bundles are loaded; nobody else may be able to write to them.",
    )

    def __post_init__(self) -> None:
        for setting in TABLE:
            value = getattr(self, setting.field)
            if not setting.allows(value):
                typed = setting.kind.typed and f"; as no text, {setting.kind.typed}"
                raise SettingsError(f"{setting.field}={value!r}: must be {setting.allowed}{typed}")

    def mode_of(self, direction: str) -> Mode:
        """The mode of calls of a direction."""
        of_it = self.forward_mode if direction == "forward" else self.backward_mode
        return of_it or self.mode


TABLE = tuple(
    Setting(item.name, **item.metadata, optional=item.default is None) for item in fields(Settings)
)
"""Every setting, in the order of the fields."""


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read settings from an environment; unset and empty variables keep their defaults.

    Args:
        environ: variable names and values, usually ``os.environ``.

    Raises:
        SettingsError: a value cannot be read or is outside its range, or a variable carries the prefix but is not in
            the table; the message names variable, value and what is allowed.
    """
    known = [setting.variable for setting in TABLE]
    for name in environ:
        variable = name.removeprefix(PREFIX)
        if variable != name and variable not in known:
            # Without the prefix, which would make any two names alike.
            close = difflib.get_close_matches(variable, known, n=1)
            hint = f"did you mean {PREFIX}{close[0]}?" if close else f"known: {', '.join(known)}"
            raise SettingsError(f"{name}={environ[name]!r}: there is no such setting; {hint}")
    values: dict[str, Any] = {}
    for setting in TABLE:
        text = environ.get(setting.name, "").strip()
        if not text:
            continue
        value = None
        with contextlib.suppress(ValueError, KeyError):
            value = setting.kind.parse(text)
        if value is None or not setting.allows(value):
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

    The logger is one for all threads, and ``log_level`` changes it for all while the block runs.

    Args:
        changes: fields of :class:`Settings` by name, also as the text that their variables take.

    Raises:
        SettingsError: a field does not exist or its value is outside its range.
    """
    rows = {setting.field: setting for setting in TABLE}
    for name, value in changes.items():
        if name not in rows:
            raise SettingsError(f"there is no setting {name!r}; known: {', '.join(sorted(rows))}")
        if isinstance(value, str):
            with contextlib.suppress(ValueError, KeyError):  # else Settings says what is wrong
                changes[name] = rows[name].kind.parse(value)
    settings = _shared(replace(current(), **changes))
    level_before = logging.getLogger(NAME).level
    if "log_level" in changes:
        configure_logging(settings.log_level)
    try:
        with adopted(settings):
            yield settings
    finally:
        if "log_level" in changes:
            logging.getLogger(NAME).setLevel(level_before)


@functools.lru_cache(maxsize=64)
def _shared(settings: Settings) -> Settings:
    """One object for equal settings, whose launch plans and picks a block then finds again when it is entered again."""
    return settings


@contextlib.contextmanager
def mode(
    mode: Mode | None = None, *, forward: Mode | None = None, backward: Mode | None = None
) -> Iterator[Settings]:
    """Say what calls inside a ``with`` block do about tuning, in this thread or task only.

    A backward pass follows the mode that its forward was called under, whatever thread it runs in. Under
    ``torch.compile`` the block goes around the call of the compiled function.

    Args:
        mode: ``off``, ``cached``, ``tune`` or ``frozen``; None leaves it as it is.
        forward: of forward passes, backward likewise; None is as ``mode``.
        backward: see forward.
    """
    now = current()
    inner = (None, None) if mode else (now.forward_mode, now.backward_mode)
    changes = {"forward_mode": forward or inner[0], "backward_mode": backward or inner[1]}
    with override(mode=mode or now.mode, **changes) as settings:
        yield settings


@contextlib.contextmanager
def adopted(settings: Settings) -> Iterator[None]:
    """Put settings that were in force elsewhere in force here, for a thread that works on behalf of another.

    Args:
        settings: as :func:`current` gave them there; it gives the very object inside the ``with`` block.
    """
    token = _overridden.set(settings)
    try:
        yield
    finally:
        _overridden.reset(token)
