"""C++ as the preprocessor reads it: tokens, without comments, layout and ``#include`` lines.

Two texts of equal tokens say the same to a compiler, but for what counts lines (``__LINE__``) and for the spaces inside
a macro's argument that is turned into a string. Nothing is expanded or evaluated.
"""

from __future__ import annotations

import re

END_OF_DIRECTIVE = "\n"
"""Stands where a preprocessor directive ends: a line break there is more than layout."""
GLUED = "\N{WORD JOINER}"
"""Stands between a macro's name and a parenthesis that follows at once: it takes arguments."""

_RAW = r'(?:(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)")'
_COMMENT = r"(?://(?:\\\r?\n|[^\n])*|/\*.*?\*/)"
_QUOTED = r"""(?:(?:u8|[uUL])?(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'))"""
_NUMBER = r"(?:\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*)"
_WORD = r"(?:[^\W\d]\w*)"
_SPLICE = re.compile(r"\\\r?\n")
_PIECES = re.compile(
    f"(?P<raw>{_RAW})|{_COMMENT}|{_QUOTED}|{_NUMBER}|{_WORD}|{_SPLICE.pattern}|.", re.DOTALL
)
# What goes before a token and does not count, and the token; a line's end is one with those that follow it at once, and
# the end of the text is empty. Those first that are many and can be nothing else: a word that is no string's prefix.
_TOKENS = re.compile(
    rf"((?:[^\S\n]+|//[^\n]*|/\*.*?\*/)*)([^\W\d]\w*(?![\w\"'])|[()\[\]{{}},;]|\n\s*"
    rf"|{_RAW}|{_QUOTED}|{_NUMBER}|{_WORD}"
    r"|<<<|>>>|<=>|\.\.\.|->\*|<<=|>>=|::|->|\.\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\|"
    r"|[-+*/%&|^]=|\#\#|.|\Z)",
    re.DOTALL,
)


def _spliced(text: str) -> str:
    """A text with its continued lines joined, but inside raw strings."""
    if 'R"' not in text:
        return _SPLICE.sub("", text)
    return "".join(
        piece[0] if piece["raw"] else _SPLICE.sub("", piece[0]) for piece in _PIECES.finditer(text)
    )


def tokens(text: str) -> list[str]:
    """The tokens of a C++ source or header, in order.

    ``#include`` and ``#pragma once`` lines are left out: they say where a text is, not what it is.

    Args:
        text: the source, before any phase of translation.

    Returns:
        Each token as it is spelled; :data:`END_OF_DIRECTIVE` and :data:`GLUED` where layout has a meaning.
    """
    spelled: list[str] = []
    add = spelled.append
    directive: list[str] = []  # that is being read
    fresh = True  # nothing but space and comments so far on this line
    for before, token, _ in _TOKENS.findall(_spliced(text)):
        if directive:
            if token[:1] in "\n":
                spelled += _counted(directive)
                directive, fresh = [], True
                continue
            if len(directive) == 3 and directive[1] == "define":
                directive.append(GLUED if token == "(" and not before else " ")
            directive.append(token)
        elif token[:1] in "\n":
            fresh = True
        elif fresh:
            if token == "#":
                directive = [token]
            else:
                add(token)
            fresh = False
        else:
            add(token)
    return spelled


def _counted(directive: list[str]) -> list[str]:
    """A directive's tokens and its end; nothing of one that does not count."""
    if directive[1:2] == ["include"] or directive[1:3] == ["pragma", "once"]:
        return []
    return [*directive, END_OF_DIRECTIVE]
