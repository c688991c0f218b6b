"""The table of the corpus in docs/judge-corpus.md: `python -m tests.adversarial.table` writes it anew."""

from __future__ import annotations

from tests.adversarial.corpus import FOLDER, Entry, entries

DOC = FOLDER.parents[1] / "docs" / "judge-corpus.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def table() -> str:
    """All kernels of the corpus in Markdown."""
    wrong, right = entries("wrong"), entries("right")
    lines = [f"## Wrong: {len(wrong)}", "", "| kind | op | file | stage | verdict |", "|---|---|---|---|---|"]
    lines += [f"{_start(entry)} {entry.stage} | {entry.verdict} |" for entry in wrong]
    lines += ["", f"## Right: {len(right)}", "", "| kind | op | file |", "|---|---|---|"]
    lines += [_start(entry) for entry in right]
    return "\n".join(lines)


def with_table(text: str) -> str:
    """`text` with what stands between the marks replaced by the table."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _start(entry: Entry) -> str:
    return f"| {entry.kind} | {entry.base} | `{entry.path.stem}` |"


if __name__ == "__main__":
    DOC.write_text(with_table(DOC.read_text()))
