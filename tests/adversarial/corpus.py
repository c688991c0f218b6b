"""The corpus as data: which files there are, what each is, and its whole text.

A file in `wrong` or `right` is a fragment that deviates in one way: its docstring names the kind, `BASE` the op that it
starts from. It is appended to `bases/common.py` and `bases/<op>.py`; what it defines anew replaces theirs. A wrong one
says in `CAUGHT_BY, VERDICT` which stage must end it and how; `OR_NO_GAIN = True` marks tricks that may merely be slow:
those may be screened out, too.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One kernel of the corpus; a right one has neither stage nor verdict."""

    path: Path
    kind: str
    base: str
    stage: str
    verdict: str
    or_no_gain: bool

    @property
    def text(self) -> str:
        """What the judge is given."""
        return base_text(self.base) + self.path.read_text()


def base_text(op: str) -> str:
    """The right kernel of an op, to which fragments are appended."""
    return "".join((FOLDER / "bases" / f"{name}.py").read_text() for name in ("common", op))


def entries(folder: str) -> list[Entry]:
    """All kernels of `wrong` or `right`, by name."""
    return [_entry(path) for path in sorted((FOLDER / folder).glob("*.py"))]


def _entry(path: Path) -> Entry:
    tree = ast.parse(path.read_text())
    said: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = [n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)]
            if names in (["BASE"], ["OR_NO_GAIN"], ["CAUGHT_BY", "VERDICT"]):
                value = ast.literal_eval(node.value)
                said |= dict(zip(names, value if len(names) > 1 else [value], strict=True))
    return Entry(
        path=path,
        kind=(ast.get_docstring(tree) or "").replace("\n", " "),
        base=said["BASE"],
        stage=said.get("CAUGHT_BY", ""),
        verdict=said.get("VERDICT", ""),
        or_no_gain=said.get("OR_NO_GAIN", False),
    )
