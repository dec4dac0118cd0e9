"""The version of this package; pyproject.toml reads it from here."""

import time

__version__ = "0.1.0"
IMPORTED_NS = time.time_ns()
"""When the import of this package began: its files are read after that, and one that changed since may be in use as it
was before."""
