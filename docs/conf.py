"""How Sphinx builds the site from this folder: `make docs`, strictly, into build/site."""

from __future__ import annotations

from attention_autotuner import __version__

project = "attention-autotuner"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
nitpicky = True  # a reference that leads nowhere is a warning, and warnings are errors
nitpick_ignore_regex = [
    # What is not of this project would need its inventories, hence a network.
    (r"py:.*", r"(torch|typing|pathlib|collections|dataclasses|numpy)(\..*)?"),
]
nitpick_ignore = [
    # What tests and the command line put in another's place; no page tells of them.
    ("py:class", "attention_autotuner.arch.probe.Driver"),
    ("py:class", "attention_autotuner.tuning.pipeline.Pipeline"),
    ("py:class", "attention_autotuner.tuning.pipeline.StepPipeline"),
    ("py:class", "attention_autotuner.tuning.records.RecordStore"),
]

# A link's #anchor may be any heading down to this level, as on a forge.
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"exclude-members": "__init__,__new__"}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = False

html_theme = "furo"
html_title = f"attention-autotuner {version}"
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
