"""The package's logger, audible in programs that set up no logging of their own."""

from __future__ import annotations

import logging

NAME = "attention_autotuner"


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic in stubs only
    """Prints to stderr while the program has set up no logging of its own, and keeps silent once it has."""

    def handle(self, record: logging.LogRecord) -> bool:
        ours = logging.getLogger(NAME)
        if logging.getLogger().handlers or any(handler is not self for handler in ours.handlers):
            return False
        return super().handle(record)


def configure_logging(level: str) -> logging.Logger:
    """Give the package's logger its level, without touching handlers that the program installed.

    Python's own last resort shows warnings only, so a fallback makes ``LOG_LEVEL=info`` visible in programs that
    never configure logging.

    Returns:
        The logger ``attention_autotuner``.
    """
    logger = logging.getLogger(NAME)
    logger.setLevel(level.upper())
    if not any(isinstance(handler, _FallbackHandler) for handler in logger.handlers):
        handler = _FallbackHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    return logger
