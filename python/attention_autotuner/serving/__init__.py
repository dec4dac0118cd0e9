"""From a problem to a loaded kernel: dispatch, the layers of picks, the loader, and the runtime that owns all memos."""
