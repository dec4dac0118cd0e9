"""Pieces of a page that needs nothing beside itself: tables that sort, figures in line, colours for light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .drawing import DARK, LIGHT, rules

_LIGHT = {
    **LIGHT,
    "--soft": "#f4f6f8",
    "--line": "#d0d7de",
    "--link": "#0a58ca",
    "--loss": "#9a3b00",
}
_DARK = {**DARK, "--soft": "#161b22", "--line": "#30363d", "--link": "#79b8ff", "--loss": "#ffa657"}
LOSS = "▼"
STYLE = f"""
:root{{color-scheme:light dark;{rules(_LIGHT)}}}
@media (prefers-color-scheme: dark){{:root{{{rules(_DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,'DejaVu Sans',Verdana,sans-serif}}
main,header,nav{{max-width:1120px;margin:0 auto;padding:0 16px}}
h1{{font-size:1.7rem;margin:1.2em 0 .3em}}
h2{{font-size:1.35rem;margin:2em 0 .4em;padding-top:.6em;border-top:1px solid var(--line)}}
h3{{font-size:1.08rem;margin:1.4em 0 .3em}}
p,li,figcaption,summary{{overflow-wrap:anywhere}}
a{{color:var(--link)}}
nav ul{{display:flex;flex-wrap:wrap;gap:.2em 1.1em;list-style:none;margin:.6em 0;padding:0}}
figure{{margin:1em 0}}
figcaption,.note,.place{{color:var(--ink);opacity:.8;font-size:.85rem}}
.scroll{{overflow-x:auto;background:linear-gradient(to right,var(--paper) 30%,transparent) left/40px 100%,
linear-gradient(to left,var(--paper) 30%,transparent) right/40px 100%,
linear-gradient(to right,var(--faint),transparent) left/10px 100%,
linear-gradient(to left,var(--faint),transparent) right/10px 100%;
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}}
.scroll:focus-visible{{outline:2px solid var(--link)}}
.picture svg{{display:block;height:auto;width:100%}}
table{{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;margin:.5em 0}}
th,td{{padding:.25em .6em;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}}
th{{background:var(--soft);vertical-align:bottom;white-space:normal;min-width:4.5em}}
td.words,th.words{{text-align:left}}
td.words{{white-space:normal;min-width:8.5em}}
td.long{{white-space:normal;min-width:17em;text-align:left;overflow-wrap:anywhere}}
th.long{{text-align:left}}
th button{{all:unset;cursor:pointer;font:inherit;font-weight:600}}
th button:focus-visible{{outline:2px solid var(--link)}}
th button::after{{content:"\\a0\\2195";opacity:.45}}
th[aria-sort=ascending] button::after{{content:"\\a0\\2191";opacity:1}}
th[aria-sort=descending] button::after{{content:"\\a0\\2193";opacity:1}}
.loss{{color:var(--loss);font-weight:700}}
footer{{margin:3em 0 2em}}
"""
SORTING = """
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(each => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)], [m, n] = [parseFloat(x), parseFloat(y)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = isNaN(m) || isNaN(n) ? x.localeCompare(y) : m - n;
      return up ? order : -order;
    });
    table.tBodies[0].append(...rows);
  }));
}
"""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: shown.
        key: sorted by; the text where it is None. Empty ones come last.
        kind: ``words``, ``long`` (words in lines), ``loss`` or empty for a number.
    """

    text: str
    key: float | None = None
    kind: str = ""

    def html(self) -> str:
        """The element."""
        kind = f' class="{self.kind}"' if self.kind else ""
        key = "" if self.key is None else f' data-key="{self.key:.6g}"'
        return f"<td{kind}{key}>{escape(self.text)}</td>"


def words(text: str) -> Cell:
    """A cell of text."""
    return Cell(text=text, kind="words")


def long_words(text: str) -> Cell:
    """A cell of text that is broken anywhere: names of kernels, problems, sources."""
    return Cell(text=text, kind="long")


def number(value: float | None, digits: int = 0) -> Cell:
    """A cell of one number; empty where there is none."""
    if value is None:
        return Cell(text="")
    return Cell(text=f"{value:,.{digits}f}", key=value)


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table that sorts by any of its columns; columns of words are told by the first row."""
    lines = ['<div class="scroll" tabindex="0"><table class="sorts"><thead><tr>']
    for index, head in enumerate(heads):
        first = rows[0][index].kind if rows else ""
        kind = ' class="words"' if first in ("words", "long") else ""
        lines.append(f'<th scope="col"{kind}><button type="button">{escape(head)}</button></th>')
    lines.append("</tr></thead><tbody>")
    lines += ["<tr>" + "".join(cell.html() for cell in row) + "</tr>" for row in rows]
    lines.append("</tbody></table></div>")
    return "\n".join(lines)


def picture(svg: str, caption: str) -> str:
    """A figure in line, which scrolls by itself where the page is narrower than it can be read at."""
    width = float(svg.partition('viewBox="0 0 ')[2].split()[0]) * 4.0 / 3.0  # points to pixels
    least, most = min(width, 620.0), width
    style = f"min-width:{least:.0f}px;max-width:{most:.0f}px"
    return (
        f'<figure><div class="scroll" tabindex="0"><div class="picture" style="{style}">\n{svg}</div></div>\n'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(lines: Sequence[str]) -> str:
    """A list of plain text; empty without lines."""
    items = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>\n{items}\n</ul>" if lines else ""


def details(summary: str, inner: str) -> str:
    """What is shown on demand."""
    return f"<details><summary>{escape(summary)}</summary>\n{inner}\n</details>"


def page(title: str, lead: str, contents: Sequence[tuple[str, str]], body: Sequence[str]) -> str:
    """A whole page.

    Args:
        title: its name.
        lead: HTML under the title.
        contents: anchors and what they are called.
        body: HTML, part by part.
    """
    links = "\n".join(f'<li><a href="#{to}">{escape(name)}</a></li>' for to, name in contents)
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        "</head>",
        "<body>",
        f"<header>\n<h1>{escape(title)}</h1>\n{lead}\n</header>",
        f'<nav aria-label="Contents"><ul>\n{links}\n</ul></nav>',
        "<main>",
        *body,
        "</main>",
        f"<script>{SORTING}</script>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"
