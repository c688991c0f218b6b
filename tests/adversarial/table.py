"""The table of the corpus in docs/judge-corpus.md: `python -m tests.adversarial.table` writes it anew."""

from __future__ import annotations

from autokernel.loading import load_file
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
    return "\n".join([*lines, *_on_a_gpu()])


def _on_a_gpu() -> list[str]:
    """The same for `tests/gpu`."""
    fragments = load_file(FOLDER.parent / "gpu" / "corpus.py", "gpu_corpus").fragments
    wrong, right = fragments("wrong"), fragments("right")
    lines = [
        "",
        f"## Wrong, on a GPU: {len(wrong)}",
        "",
        "| kind | base | file | stage | verdict |",
        "|---|---|---|---|---|",
    ]
    for item in wrong:
        verdict = f"{item.verdict}, or no gain" if item.or_no_gain else item.verdict
        lines.append(f"| {item.kind} | {item.base} | `{item.path.stem}` | {item.caught_by} | {verdict} |")
    lines += ["", f"## Right, on a GPU: {len(right)}", "", "| kind | base | file |", "|---|---|---|"]
    return lines + [f"| {item.kind} | {item.base} | `{item.path.stem}` |" for item in right]


def with_table(text: str) -> str:
    """`text` with what stands between the marks replaced by the table."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _start(entry: Entry) -> str:
    return f"| {entry.kind} | {entry.base} | `{entry.path.stem}` |"


if __name__ == "__main__":
    DOC.write_text(with_table(DOC.read_text()))
