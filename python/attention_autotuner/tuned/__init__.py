"""Data: the picks shipped with the package, one JSON file per GPU."""
