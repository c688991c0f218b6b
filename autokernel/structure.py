"""Whether two kernel.py are the same kernel: equal but for comments, docstrings and white space, those of their native
source included. What was judged once is not judged again; what differs by a name or a number is another kernel.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from autokernel.history import KernelHistory
from autokernel.kerneltext import by_digest, text_digest
from autokernel.records import Experiment, Proposal

NATIVE = ("cpp", "cuda")
"""Backends whose multi-line strings are C++: there white space is free."""

_TOKEN = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
    | (?P<literal>(?:u8|[uUL])?R"(?P<mark>[^()\s\\]{0,16})\(.*?\)(?P=mark)"
        |(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"|(?:u8|[uUL])?'(?:\\.|[^'\\\n])*')
    | (?P<word>\.?\d(?:[eEpP][+-]|'?[\w.])*|[^\W\d]\w*)
    | (?P<space>(?:\\\n|[^\S\n])+)
    | (?P<line>\n)
    | (?P<sign><<<|>>>|<<=|>>=|\.\.\.|->\*|->|::|\+\+|--|&&|\|\||[-+*/%&|^<>=!]=|<<|>>|\#\#|.)""",
    re.DOTALL | re.VERBOSE,
)


_UNFINISHED = ("/*", '"', "'", "\\")
"""What begins a comment, a literal or the next line; met as a sign, it does not end, or not as it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """The kernel of a history that a text is the same as: the incumbent, an experiment, or (neither) the starter."""

    is_incumbent: bool = False
    experiment: Experiment | None = None

    @property
    def reason(self) -> str:
        """Why the text is not judged again, in words that an agent can act on."""
        if self.is_incumbent:
            return "this is the current kernel.py: nothing but comments, docstrings and white space differs"
        if self.experiment is None:
            return "this is the starter, which was the first incumbent: comments and white space do not count"
        told = f"{self.experiment.outcome.verdict}, {self.experiment.reason}"
        return f"experiment {self.experiment.number} tried exactly this: {told}"


def twin_of(history: KernelHistory, text: str) -> Twin | None:
    """What `text` is the same as of all that was judged for this op; None when it is new."""
    wanted = structure(text)
    if wanted == structure(history.incumbent):
        return Twin(is_incumbent=True)
    for experiment in history.experiments:
        if wanted == _structure_of(experiment.proposal):
            return Twin(experiment=experiment)
    return Twin() if history.starter is not None and wanted == structure(history.starter) else None


def _structure_of(proposal: Proposal) -> str:
    """A night has thousands, of which no file is read twice."""
    return structure.of(proposal.digest, lambda: proposal.kernel_py)


@by_digest(maxsize=8192)
def structure(text: str) -> str:
    """A digest that is equal for files that are the same kernel; that of the text itself for what is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return text_digest(text)
    return text_digest("\n".join(_spelled(tree, native=_is_native(tree))))


def _spelled(tree: ast.Module, *, native: bool) -> Iterator[str]:
    """The tree, node by node, without strings that are statements (`ast.dump` takes three times as long)."""
    stack: list[object] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.JoinedStr):  # no piece is whole source: a comment may begin in one, and end in the next
            yield ast.dump(node)
        elif isinstance(node, ast.AST):
            yield type(node).__name__
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, list):
                    children = [child for child in value if not _is_string(child)]
                    yield str(len(children))
                    stack.extend(children)
                else:
                    stack.append(value)
        elif native and isinstance(node, str) and "\n" in node:
            yield repr(bare_source(node))
        else:
            yield repr(node)


def _is_string(node: object) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_native(tree: ast.Module) -> bool:
    """Whether BACKEND is one of those whose source stands in strings."""
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value in NATIVE
        and any(isinstance(target, ast.Name) and target.id == "BACKEND" for target in node.targets)
        for node in tree.body
    )


def bare_source(source: str) -> str:
    """C++ source with one space between tokens, no comments, and a line of its own for each directive.

    What is no C++ (a comment or literal that does not end) stays as it is.
    """
    lines: list[str] = []
    line: list[str] = []
    directive = False
    for found in _TOKEN.finditer(source):
        kind, token = found.lastgroup, found[0]
        if source.startswith(_UNFINISHED, found.start()) and kind == "sign":
            return source
        if (
            token == "#"
            and not directive
            and not source[source.rfind("\n", 0, found.start()) + 1 : found.start()].strip()
        ):
            lines.append(" ".join(line))
            line, directive = ["#"], True
        elif kind == "line" and directive:
            lines.append("".join(line).strip())
            line, directive = [], False
        elif kind not in ("comment", "space", "line"):
            line.append(token)
        elif directive and line[-1] != " ":
            line.append(" ")  # F(x) and F (x) are different macros
    lines.append("".join(line).strip() if directive else " ".join(line))
    return "\n".join(filter(None, lines))
