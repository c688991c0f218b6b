"""HTML and SVG elements as text in which every string is escaped unless it is an element already; no torch.

Hypotheses, reasons and kernel texts are written by agents: what is shown of them can neither close an element nor
hide its direction or length from the reader.
"""

from __future__ import annotations

import html

_VOID = frozenset({"meta"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def visible(text: str, keep: str = "\n\t") -> str:
    """The text with what cannot be seen (control characters, changes of direction, lone surrogates) made visible."""
    return "".join(char if char.isprintable() or char in keep else "\N{REPLACEMENT CHARACTER}" for char in text)


def one_line(text: str) -> str:
    """The text on one line, with nothing invisible in it: fit for a terminal, whoever wrote it."""
    return visible(" ".join(text.split()), keep="")


def counted(number: int, noun: str) -> str:
    """`1 experiment`, `2 experiments`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def escaped(text: str) -> Markup:
    """The text as markup; markup stays as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(visible(text)))


def joined(*parts: str) -> Markup:
    """The parts one after another, each escaped unless it is markup."""
    return Markup("".join(escaped(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """An element. `class_` is the attribute class, `aria_sort` is aria-sort; an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{joined(*children)}</{name}>")
