"""program.md as sections: which of them apply to an op, a backend and an architecture, and the snippets they hold.

A section is a heading with the text below it, up to the next heading. The line after the heading may restrict it:
`<!-- tags: op=rmsnorm,softmax backend=triton arch=sm_9*,sm_10* -->`. Values are shell patterns; a section without a key
applies whatever that key's value is, and what does not apply takes the sections under its heading with it. `part=core`
marks the chapters that no prompt can do without.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from autokernel.errors import ConfigError
from autokernel.loading import toplevel

PLAYBOOK = "program.md"
TAG_KEYS = ("op", "backend", "arch", "part")
CORE = "core"
CHAPTER_LEVEL = 2

_HEADING = re.compile(r"(#+) (.+)")
_TAGS = re.compile(r"<!-- tags: (.*) -->")
_FENCE = re.compile(r"(`{3,})(\w*)")


class Extent(Enum):
    """How much of the playbook is taken, from all to least."""

    WHOLE = "whole"
    PROSE = "prose"  # without the fenced blocks
    CORE = "core"  # prose of the chapters with the tag part=core: for models with a small context


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One heading with its own text. `tags` maps a key to patterns of which one must match; `line` counts from 1."""

    heading: str
    level: int
    body: str
    tags: Mapping[str, tuple[str, ...]]
    line: int

    def applies(self, **values: str | None) -> bool:
        """Whether the tag of each of these keys matches, if there is one; an unknown value (None) matches no tag."""
        return all(_matches(self.tags[key], value) for key, value in values.items() if key in self.tags)

    @property
    def text(self) -> str:
        """Heading and body as Markdown, without the tags."""
        return "\n".join([f"{'#' * self.level} {self.heading}", *([self.body] if self.body else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A fenced block: its language (`python`, `cuda`, `cpp`, or empty), its text, the section it stands in."""

    language: str
    code: str
    section: Section


@functools.cache
def sections() -> tuple[Section, ...]:
    """The sections of program.md, in order. Raises: ConfigError."""
    return parse(toplevel(PLAYBOOK).read_text(encoding="utf-8"))


def select(
    found: Iterable[Section], *, op: str, backend: str, arch: str | None, extent: Extent = Extent.WHOLE
) -> tuple[Section, ...]:
    """The sections that apply, in order; headings under which nothing is left are dropped."""
    kept: list[Section] = []
    dropped_below: int | None = None  # level of a heading that does not apply: all deeper ones go with it
    for section in found:
        if dropped_below is not None and section.level > dropped_below:
            continue
        applies = section.applies(op=op, backend=backend, arch=arch)
        if extent is Extent.CORE and section.level == CHAPTER_LEVEL:
            applies = applies and CORE in section.tags.get("part", ())
        dropped_below = None if applies else section.level
        if applies:
            kept.append(section if extent is Extent.WHOLE else _without_snippets(section))
    return tuple(s for at, s in enumerate(kept) if s.body or _has_children(kept, at))


def render(chosen: Iterable[Section]) -> str:
    """Sections as Markdown."""
    return "\n\n".join(section.text for section in chosen)


def snippets(found: Iterable[Section]) -> Iterator[Snippet]:
    """The fenced blocks of the sections, in order."""
    for section in found:
        for fence, lines in _blocks(section.body.splitlines()):
            if fence is not None:
                yield Snippet(language=fence, code="\n".join(lines[1:-1]) + "\n", section=section)


def parse(text: str) -> tuple[Section, ...]:
    """The sections of a Markdown text; what stands before its first heading is left out.

    Raises: ConfigError for a tag key that is not in TAG_KEYS, and for a fence that is never closed.
    """
    lines = text.splitlines()
    fenced = _fenced_lines(lines)
    starts = [at for at, line in enumerate(lines) if at not in fenced and _HEADING.fullmatch(line)]
    return tuple(_section(lines, at, end) for at, end in zip(starts, [*starts[1:], len(lines)], strict=True))


def _section(lines: Sequence[str], start: int, end: int) -> Section:
    heading = _HEADING.fullmatch(lines[start])
    assert heading is not None
    body = list(lines[start + 1 : end])
    tags: Mapping[str, tuple[str, ...]] = {}
    if body and (found := _TAGS.fullmatch(body[0])):
        tags = _read_tags(found[1], start + 2)
        del body[0]
    return Section(
        heading=heading[2], level=len(heading[1]), body="\n".join(body).strip("\n"), tags=tags, line=start + 1
    )


def _read_tags(text: str, line: int) -> Mapping[str, tuple[str, ...]]:
    tags = {}
    for item in text.split():
        key, _, values = item.partition("=")
        if key not in TAG_KEYS or not values:
            raise ConfigError(
                f"line {line} of the playbook: {item!r} is no tag", hint=f"keys are {', '.join(TAG_KEYS)}"
            )
        tags[key] = tuple(values.split(","))
    return tags


def _blocks(lines: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """The lines in runs: (None, prose) or (language, fenced block with both of its fences)."""
    run: list[str] = []
    closing: str | None = None
    language = ""
    for line in lines:
        opening = _FENCE.fullmatch(line)
        if closing is None and opening:
            yield None, run
            run, closing, language = [line], opening[1], opening[2]
        elif closing is not None and line == closing:
            yield language, [*run, line]
            run, closing = [], None
        else:
            run.append(line)
    if closing is not None:
        raise ConfigError(f"a {language or 'fenced'} block of the playbook is never closed", hint="close the fence")
    yield None, run


def _fenced_lines(lines: Sequence[str]) -> set[int]:
    """Numbers of the lines that are inside fenced blocks."""
    fenced: set[int] = set()
    at = 0
    for fence, run in _blocks(lines):
        if fence is not None:
            fenced.update(range(at, at + len(run)))
        at += len(run)
    return fenced


def _without_snippets(section: Section) -> Section:
    prose = [line for fence, run in _blocks(section.body.splitlines()) if fence is None for line in run]
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(prose)).strip("\n")
    return Section(heading=section.heading, level=section.level, body=body, tags=section.tags, line=section.line)


def _has_children(kept: Sequence[Section], at: int) -> bool:
    level = kept[at].level
    deeper = []
    for section in kept[at + 1 :]:
        if section.level <= level:
            break
        deeper.append(section)
    return any(section.body for section in deeper)


def _matches(patterns: Iterable[str], value: str | None) -> bool:
    return value is not None and any(fnmatchcase(value, pattern) for pattern in patterns)
