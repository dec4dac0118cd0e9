"""The Jinja environment that every template is rendered in: strict, and with C++ filters."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .. import templates
from ..core.cpp import cpp_enumerator, cpp_literal, cpp_members, cpp_name, cpp_type


def template_root() -> Path:
    """The folder of the installed ``templates`` package."""
    # __path__ and not a package loader: the latter looks beside the parent package, where an editable
    # install has nothing.
    return Path(next(iter(templates.__path__))).resolve()


def environment() -> Environment:
    """The environment: an undefined name is an error, output is C++ and never HTML-escaped."""
    return _environment_over(template_root())


@lru_cache(maxsize=2)
def _environment_over(root: Path) -> Environment:
    env = Environment(
        loader=FileSystemLoader(root),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = (cpp_enumerator, cpp_literal, cpp_members, cpp_name, cpp_type)
    env.filters.update({function.__name__: function for function in filters})
    return env
