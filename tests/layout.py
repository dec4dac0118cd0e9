"""The layout of pages, as a headless browser sees it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

PROBE = Path(__file__).with_name("overflow.js")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def layout(page: str, width: int, folder: Path) -> list[str]:
    """The elements that overflow, are cut off or overlap at a width, by a headless browser."""
    probed = page.replace("</body>", f"<script>{PROBE.read_text()}</script></body>")
    # In a frame, because a window of a browser has a least width.
    frame = (
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{escape(probed)}"></iframe>'
    )
    read = "addEventListener('load', () => { document.title = document.querySelector('iframe').contentDocument.title })"
    outer = folder / f"{width}.html"
    outer.write_text(f"<!doctype html><meta charset=utf-8>{frame}<script>{read}</script>")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,1000"]
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stdout[:500]
    answer = json.loads(unescape(title[1]))
    assert width - 20 <= answer["width"] <= width
    return list(answer["found"])
