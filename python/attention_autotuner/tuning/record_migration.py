"""Older forms of a tuning record, read as the present one.

Schema 2 held every record to the knobs of its whole operation and to the bytes of its kernel's source. These bytes are
still compared (``kernel_digest``): where they are the same nothing has changed, the knobs of that kernel included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RecordError
from ..kernels.configs import candidate_from_config, knob_schema, with_kernel

SCHEMA = 3  # of the JSON form
OLDEST = 2  # that is still read


def present_schema(config: object) -> str | None:
    """The present knob schema of a config's kernel; None for a config of no kernel there is."""
    if not isinstance(config, Mapping):
        return None
    try:
        return knob_schema(config["kernel"])
    except (KeyError, TypeError):
        return None


def migrated(document: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed record in its present form; of a schema that is not read, as it is.

    Raises:
        RecordError: it does not follow the schema that it names.
    """
    if document.get("schema") != 2:
        return dict(document)
    try:
        kept = {name: value for name, value in document.items() if name != "space_schema"}
        entries = [_entry(entry) for entry in document["entries"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"the record does not follow schema 2: {error}") from error
    return {**kept, "schema": SCHEMA, "entries": entries}


def _entry(data: Mapping[str, Any]) -> dict[str, Any]:
    config, timing = with_kernel(data["candidate"]), data["measurement"]
    if timing is not None:
        timing = {name: value for name, value in timing.items() if name != "candidate_name"}
    return {
        **data,
        "name": candidate_from_config(config).name,
        "candidate": config,
        "knob_schema": present_schema(config),
        "source_digest": "",
        "code_digest": None,
        "measurement": timing,
    }
