"""The Sphinx configuration of the site: `make docs` builds it from this folder, strictly, into build/site."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from attention_autotuner import __version__

project = "attention-autotuner"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py", "_results/*.md"]
nitpicky = True  # a reference that leads nowhere is a warning, and warnings are errors
nitpick_ignore_regex = [
    # What is not of this project would need its inventories, hence a network.
    (r"py:.*", r"(torch|typing|pathlib|collections|dataclasses|numpy)(\..*)?")
]
nitpick_ignore = [
    # What tests and the command line put in another's place, and names of types; no page tells of them.
    ("py:class", "attention_autotuner.arch.probe.Driver"),
    ("py:class", "attention_autotuner.codegen.render.RenderedKernel"),
    ("py:class", "attention_autotuner.core.outcome.Proof"),
    ("py:class", "attention_autotuner.tuning.functions.R"),
    ("py:class", "attention_autotuner.tuning.pipeline.Pipeline"),
    ("py:class", "attention_autotuner.tuning.records.RecordStore"),
    ("py:class", "Built"),
    ("py:class", "CausalAlignment"),
    ("py:class", "Mask"),
    ("py:class", "Score"),
    ("py:class", "tuple[int"),  # Sphinx cuts ``tuple[int, ...] | None`` at its comma
]

# A link's #anchor may be any heading down to this level, as on a forge.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"exclude-members": "__init__,__new__"}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # they stand in the signature
napoleon_use_rtype = False
napoleon_preprocess_types = False

html_theme = "furo"
html_title = f"attention-autotuner {version}"
html_static_path = ["_static"]
html_extra_path = ["_results/report.html"]  # the page of results, whole by itself
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False

DOCS = Path(__file__).resolve().parent

# Attributes that are described together, with the lines that go on further in.
GROUP = re.compile(r"^([ \t]+)(\w+(?:, \w+)+): (.*(?:\n\1 .*)*)$", re.MULTILINE)


def name_each(
    _app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Write attributes that a docstring describes together, ``a, b: text``, one by one: all that Napoleon reads."""

    def one_by_one(group: re.Match[str]) -> str:
        indent, names, text = group.groups()
        return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))

    lines[:] = GROUP.sub(one_by_one, "\n".join(lines)).split("\n")


def make_results(_app: Sphinx, _config: Any) -> None:
    """Make the tables, curves and page of results from the committed result files, where this is the project's tree."""
    if (DOCS.parent / "benchmarks" / "report.py").is_file():
        command = [sys.executable, "-m", "benchmarks.report", "--site", str(DOCS / "_results")]
        subprocess.run(command, cwd=DOCS.parent, check=True)


def setup(app: Sphinx) -> None:
    """Connect the above: results before pages are read, and attributes before Napoleon sees them."""
    app.connect("config-inited", make_results)
    app.connect("autodoc-process-docstring", name_each, priority=400)
