"""Writes what shows results: the table of both READMEs, or the pages that the documentation's build makes.

    python -m benchmarks.report                  # rewrites the READMEs between their markers
    python -m benchmarks.report --check          # changes nothing; status 1 when one of them is out of date
    python -m benchmarks.report --site FOLDER    # the page of all results, Markdown and curves; needs matplotlib

Everything comes from the committed result files and needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .reporting import readme, site
from .results import RESULTS, ROOT, write_text

LANGUAGES = {"README.md": "en", "README.zh-CN.md": "zh"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite, check, or make the site's files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("--results", type=Path, default=RESULTS, help="folder of <gpu>/<suite>.json")
    option("--root", type=Path, default=ROOT, help="folder of the READMEs")
    option("--site", type=Path, metavar="FOLDER", help="make the documentation's files there")
    option("--check", action="store_true", help="change nothing; 1 if a README is out of date")
    options = parser.parse_args(arguments)
    if options.site is not None:
        site.write(options.results, options.site)
        return 0
    gpus = site.load(options.results)
    late = {}
    for name, language in LANGUAGES.items():
        path = options.root / name
        text = path.read_text(encoding="utf-8")
        wanted = readme.replaced(text, readme.block(gpus, language))
        if wanted != text:
            late[path] = wanted
    for path, wanted in late.items():
        if options.check:
            print(f"{path} is out of date: run python -m benchmarks.report")
        else:
            write_text(path, wanted)
            print(f"rewrote {path}")
    return 1 if options.check and late else 0


if __name__ == "__main__":
    sys.exit(main())
