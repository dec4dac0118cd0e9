"""``python -m attention_autotuner``, the same as the command ``attention-autotuner``."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
