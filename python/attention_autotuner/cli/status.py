"""Exit statuses."""

from __future__ import annotations

OK = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130  # as a shell reports SIGINT
