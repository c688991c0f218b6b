"""Reads a reply: a tool call, edits, or fenced code of all sorts becomes an idea, anything else a reason why not.

Pure: text in, `Idea` or `Rejected` out. Nothing is run; the file is read by `ast`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from autokernel.agents.talk import Reply, Stop
from autokernel.errors import ConfigError
from autokernel.history import KernelHistory
from autokernel.kernelfile import parse_kernel
from autokernel.structure import twin_of

HYPOTHESIS_LIMIT = 240
KERNEL_LIMIT = 256 * 1024
NO_HYPOTHESIS = "no hypothesis given"

FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})(?P<label>[^`]*)$")
EDIT = re.compile(
    r"^[ \t]*<{5,9} ?SEARCH[ \t]*\n(?P<search>.*?)^[ \t]*={5,9}[ \t]*\n(?P<replace>.*?)^[ \t]*>{5,9} ?REPLACE[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
EDIT_MARK = re.compile(r"^[ \t]*<{5,9} ?SEARCH", re.MULTILINE)
HYPOTHESIS = re.compile(r"^[\s*_#>-]*hypothesis[\s*_]*:[\s*_]*(?P<text>.+)$", re.IGNORECASE | re.MULTILINE)


class Fault(StrEnum):
    """Why a reply is no proposal."""

    EMPTY = "empty"
    REFUSED = "refused"
    TRUNCATED = "truncated"
    PROSE = "prose only"
    TOOL = "unreadable tool call"
    EDIT = "edit does not apply"
    SYNTAX = "syntax error"
    CONTRACT = "no kernel.py"
    UNCHANGED = "unchanged"
    REPEATED = "tried before"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idea:
    """What a reply proposes."""

    hypothesis: str
    kernel_py: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """What is wrong with a reply, in words that the model can act on; `text` is the file that it meant, if any."""

    fault: Fault
    reason: str
    text: str = ""


class _Unusable(Exception):
    def __init__(self, fault: Fault, reason: str, text: str = "") -> None:
        super().__init__(reason)
        self.rejected = Rejected(fault, reason, text)


def read_reply(reply: Reply, history: KernelHistory) -> Idea | Rejected:
    """The idea of a reply to the current state of an op, or why there is none."""
    try:
        _check_complete(reply)
        if reply.tool_input is not None:
            hypothesis, text = _from_tool(reply.tool_input, history.incumbent)
        else:
            hypothesis, text = _from_text(_plain(reply.text), history.incumbent)
        text = text.strip("\n") + "\n"
        _check_kernel(text, history)
    except _Unusable as unusable:
        return unusable.rejected
    return Idea(hypothesis=_one_line(hypothesis) or NO_HYPOTHESIS, kernel_py=text)


def fault_of(text: str, history: KernelHistory) -> Rejected | None:
    """Why a whole file is no proposal, known before anything is judged; None when it is one."""
    try:
        _check_kernel(text, history)
    except _Unusable as unusable:
        return unusable.rejected
    return None


def _check_complete(reply: Reply) -> None:
    if reply.stop is Stop.REFUSAL:
        raise _Unusable(Fault.REFUSED, f"the model refused: {_one_line(reply.text) or 'without a reason'}")
    if reply.stop is Stop.LENGTH:
        raise _Unusable(Fault.TRUNCATED, "the reply was cut off before its end: think less, or send edits only")
    if not reply.text.strip() and reply.tool_input is None:
        raise _Unusable(Fault.EMPTY, "the reply was empty")


# -- where the text comes from


def _from_tool(raw: str, incumbent: str) -> tuple[str, str]:
    try:
        given = json.loads(raw, strict=False)  # some servers leave newlines unescaped
    except (ValueError, RecursionError) as error:
        raise _Unusable(Fault.TOOL, f"the input of the tool call is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise _Unusable(Fault.TOOL, "the input of the tool call is no object")
    hypothesis, kernel_py, edits = (given.get(name) for name in ("hypothesis", "kernel_py", "edits"))
    if isinstance(kernel_py, str) and kernel_py.strip():
        return str(hypothesis or ""), _unfenced(_plain(kernel_py))
    if isinstance(edits, list) and edits:
        return str(hypothesis or ""), apply_edits(incumbent, [_edit(item) for item in edits])
    raise _Unusable(Fault.TOOL, "the tool call has neither kernel_py nor edits")


def _edit(item: object) -> tuple[str, str]:
    if isinstance(item, dict) and isinstance(item.get("search"), str) and isinstance(item.get("replace"), str):
        return _plain(item["search"]), _plain(item["replace"])
    raise _Unusable(Fault.TOOL, "an edit is not an object with the texts search and replace")


def _from_text(text: str, incumbent: str) -> tuple[str, str]:
    if EDIT_MARK.search(text):
        edits = [(found["search"], found["replace"]) for found in EDIT.finditer(text)]
        if len(edits) < len(EDIT_MARK.findall(text)):
            raise _Unusable(Fault.EDIT, "an edit is incomplete: it needs SEARCH, =======, and REPLACE lines")
        return _hypothesis(EDIT.sub("", text)), apply_edits(incumbent, edits)
    return _hypothesis(text), _code_in(text, incumbent)


def apply_edits(text: str, edits: Sequence[tuple[str, str]]) -> str:
    """`text` after (search, replace) pairs, one after the other; each must apply exactly once."""
    text = _plain(text)
    for number, (search, replace) in enumerate(edits, start=1):
        count = text.count(search) if search.strip() else 0
        if count != 1:
            found = f"occurs {count} times" if search.strip() else "is empty"
            raise _Unusable(Fault.EDIT, f"the search text of edit {number} {found} in kernel.py, not exactly once")
        text = text.replace(search, replace)
    return text


# -- fenced blocks


def _code_in(text: str, incumbent: str) -> str:
    """The block that is a kernel; the last one that differs from the incumbent where several are."""
    blocks = list(_blocks(text)) or [[text]]
    kernels = [kernel for extents in blocks if (kernel := _first_kernel(extents)) is not None]
    if kernels:
        new = [kernel for kernel in kernels if kernel.strip() != incumbent.strip()]
        return (new or kernels)[-1]
    meant = [extents[0] for extents in blocks if "def kernel_fn" in extents[0]]
    if meant:
        return meant[-1]  # broken; the message of the parser goes back to the model
    if blocks == [[text]]:
        raise _Unusable(Fault.PROSE, "the reply holds no code: send the whole kernel.py, or edits")
    raise _Unusable(Fault.CONTRACT, "no block of the reply defines kernel_fn: send the whole kernel.py, or edits")


def _blocks(text: str) -> Iterator[list[str]]:
    """For each fenced block the texts that it may stand for: up to the first line that closes it, the second, ...

    A fence inside a docstring looks like the end; which line ends the block is seen by what parses.
    """
    lines = text.split("\n")
    start = 0
    while start < len(lines):
        opening = FENCE.match(lines[start])
        if opening is None:
            start += 1
            continue
        closers = [at for at in range(start + 1, len(lines)) if _closes(lines[at], opening["fence"])]
        ends = closers or [len(lines)]
        extents = [_dedent(lines[start + 1 : end], opening["indent"]) for end in ends]
        yield extents
        kernel = _first_kernel(extents)
        start = (ends[extents.index(kernel)] if kernel is not None else ends[0]) + 1


def _closes(line: str, fence: str) -> bool:
    bare = line.strip()
    return len(bare) >= len(fence) and set(bare) == {fence[0]}


def _dedent(lines: Sequence[str], indent: str) -> str:
    return "\n".join(line.removeprefix(indent) for line in lines)


def _first_kernel(extents: Sequence[str]) -> str | None:
    return next((extent for extent in extents if "kernel_fn" in extent and _defines_kernel_fn(extent)), None)


def _defines_kernel_fn(text: str) -> bool:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return "kernel_fn" in names + [target.id for target in targets if isinstance(target, ast.Name)]


def _unfenced(text: str) -> str:
    """The code of a tool input that was fenced all the same."""
    first = text.lstrip("\n").split("\n", 1)[0]
    if FENCE.match(first):
        return next((kernel for extents in _blocks(text) if (kernel := _first_kernel(extents)) is not None), text)
    return text


# -- checks


def _check_kernel(text: str, history: KernelHistory) -> None:
    if len(text) > KERNEL_LIMIT:
        raise _Unusable(Fault.CONTRACT, f"kernel.py has {len(text)} characters; {KERNEL_LIMIT} are allowed")
    try:
        kernel = parse_kernel(text)
    except ConfigError as error:
        fault = Fault.SYNTAX if "not valid Python" in str(error) else Fault.CONTRACT
        raise _Unusable(fault, f"{error}; {error.hint}", text) from None
    if (kernel.kernel_type, kernel.backend) != (history.op, history.backend):
        raise _Unusable(
            Fault.CONTRACT,
            f"KERNEL_TYPE and BACKEND are {kernel.kernel_type!r} and {kernel.backend!r}, "
            f"not {history.op!r} and {history.backend!r}",
        )
    if (twin := twin_of(history, text)) is not None:
        raise _Unusable(Fault.UNCHANGED if twin.is_incumbent else Fault.REPEATED, twin.reason)


# -- words


def _hypothesis(text: str) -> str:
    """The line that says so, else the first line of prose."""
    if found := HYPOTHESIS.search(text):
        return found["text"]
    prose = (line.strip(" \t*_#>-") for line in text.split("\n") if not line.lstrip().startswith(("```", "~~~", "<<<")))
    first = next((line for line in prose if line), "")
    return first if " " in first and not first.startswith(("import ", "from ", '"""', "def ")) else ""


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= HYPOTHESIS_LIMIT else f"{line[: HYPOTHESIS_LIMIT - 1]}…"


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
