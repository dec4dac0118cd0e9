"""The documentation site builds strictly: no broken link, anchor or reference, no page outside the contents."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXTRA = ("sphinx", "myst_parser", "furo")
PAGES = (
    "index.html",
    "report.html",
    "api.html",
    "cli.html",
    "settings.html",
    "troubleshooting.html",
)
MISSING = [name for name in EXTRA if importlib.util.find_spec(name) is None]

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs the extra docs: {', '.join(MISSING)} not installed"
)


def build(docs: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command += ["-d", str(folder / "doctrees"), str(docs), str(folder / "site")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(
    repository: Path, tmp_path: Path
) -> None:
    done = build(repository / "docs", tmp_path)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    for page in PAGES:
        assert (site / page).is_file(), page
    fetched = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    for path in site.glob("*.html"):
        assert not fetched.findall(path.read_text(encoding="utf-8")), path.name


def test_links_that_lead_nowhere_fail_it(repository: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "conf.py").write_bytes((repository / "docs" / "conf.py").read_bytes())
    (docs / "settings.md").write_text("---\norphan: true\n---\n# Settings\n", encoding="utf-8")
    links = "[gone](gone.md)\n\n[settings](settings.md#no-such-part)\n"
    (docs / "index.md").write_text(f"# A page\n\n{links}", encoding="utf-8")
    done = build(docs, tmp_path)
    assert done.returncode != 0
    complaints = done.stderr.splitlines()
    for target in ("gone.md", "no-such-part"):
        assert any(target in line and "WARNING" in line for line in complaints), target
