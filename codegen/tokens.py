"""C++ as the preprocessor reads it: tokens, without comments, layout and ``#include`` lines.

Two texts of equal tokens say the same to a compiler, but for what counts lines (``__LINE__``) and for the spaces inside
a macro's argument that is turned into a string. Nothing is expanded or evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

END_OF_DIRECTIVE = "\n"
"""Stands where a preprocessor directive ends: a line break there is more than layout."""
GLUED = "\N{WORD JOINER}"
"""Stands between a macro's name and a parenthesis that follows at once: it takes arguments."""

_RAW = r'(?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)")'
_COMMENT = r"(?P<comment>//(?:\\\r?\n|[^\n])*|/\*.*?\*/)"
_QUOTED = r"""(?P<quoted>(?:u8|[uUL])?(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'))"""
_NUMBER = r"(?P<number>\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*)"
_WORD = r"(?P<word>[^\W\d]\w*)"
_SPLICE = re.compile(r"\\\r?\n")
_PIECES = re.compile(
    f"{_RAW}|{_COMMENT}|{_QUOTED}|{_NUMBER}|{_WORD}|{_SPLICE.pattern}|.", re.DOTALL
)
_TOKENS = re.compile(
    rf"{_RAW}|{_COMMENT}|{_QUOTED}|{_NUMBER}|{_WORD}|(?P<line>\n)|(?P<space>\s+?)"
    r"|(?P<sign><<<|>>>|<=>|\.\.\.|->\*|<<=|>>=|::|->|\.\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\|"
    r"|[-+*/%&|^]=|\#\#|.)",
    re.DOTALL,
)


def _spliced(text: str) -> str:
    """A text with its continued lines joined, but inside raw strings."""
    if "\\\n" not in text and "\\\r\n" not in text:
        return text
    return "".join(
        piece[0] if piece.lastgroup == "raw" or piece["raw"] else _SPLICE.sub("", piece[0])
        for piece in _PIECES.finditer(text)
    )


def tokens(text: str) -> Iterator[str]:
    """The tokens of a C++ source or header, in order.

    ``#include`` and ``#pragma once`` lines are left out: they say where a text is, not what it is.

    Args:
        text: the source, before any phase of translation.

    Yields:
        Each token as it is spelled; :data:`END_OF_DIRECTIVE` and :data:`GLUED` where layout has a meaning.
    """
    directive: list[str] = []  # of the directive that is being read
    fresh = True  # nothing but space and comments so far on this line
    end = -1  # of the token before
    for match in _TOKENS.finditer(_spliced(text)):
        kind, token = match.lastgroup, match[0]
        if kind in ("space", "comment"):
            continue
        if kind == "line":
            if directive:
                yield from _directive(directive)
                directive = []
            fresh = True
            continue
        if directive:
            if len(directive) == 3 and directive[1] == "define":
                directive.append(GLUED if token == "(" and match.start() == end else " ")
            directive.append(token)
        elif fresh and token == "#":
            directive = [token]
        else:
            yield token
        fresh, end = False, match.end()
    if directive:
        yield from _directive(directive)


def _directive(directive: list[str]) -> Iterator[str]:
    """A directive's tokens and its end; nothing of one that does not count."""
    if directive[1:2] != ["include"] and directive[1:3] != ["pragma", "once"]:
        yield from directive
        yield END_OF_DIRECTIVE
