"""The corpus of GPU candidates: a base is a plain, right kernel; a fragment is appended to one and changes one thing.

A fragment in `wrong` says what is wrong with it in its docstring, what must catch it in CAUGHT_BY and what the verdict
must be in VERDICT. Literals that a fragment may set beside its BASE:

- JUDGED_IN: the dtypes (a wrong one: bf16 unless it says otherwise; a right one: all).
- SHAPES: of the user's call, where the base's usual one will not do.
- OR_NO_GAIN: its trick may also just not work; then it must not be kept.
- NEEDS_GPU: it cannot be called on CPU tensors, so only the GPU's tests can look at it.
"""

import ast
from dataclasses import dataclass, field
from pathlib import Path

from autokernel.records import TimedCase
from autokernel.spec import build_case, retype

FOLDER = Path(__file__).parent
BASES = {path.stem: path for path in sorted((FOLDER / "bases").glob("*_*.py")) if path.stem != "cuda_access"}
USER_SHAPES = {
    "rmsnorm": {"x": (4, 512, 1024), "weight": (1024,)},
    "softmax": {"x": (4, 512, 1000)},
    "matmul": {"a": (512, 512), "b": (512, 512)},
    "layernorm": {"x": (4, 256, 1024), "weight": (1024,), "bias": (1024,)},
    "reduce": {"x": (2048, 1000)},
    "cross_entropy": {"logits": (256, 4000), "targets": (256,)},
    "rotary_embedding": {"x": (2, 8, 512, 64), "cos": (512, 32), "sin": (512, 32)},
    "flash_attention": {"q": (1, 8, 256, 64), "k": (1, 2, 256, 64), "v": (1, 2, 256, 64)},
}
TWICE = """

def kernel_fn(*arguments, **named):
    right(*arguments, **named)
    return right(*arguments, **named)
"""
"""Makes a base slow: an incumbent that a fragment with a fault of no cost surely beats."""


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """One candidate of the corpus; `text` is the whole kernel file."""

    path: Path
    base: str
    op: str
    backend: str
    kind: str
    own: str
    caught_by: str = ""
    verdict: str = "PASS"
    dtypes: tuple[str, ...] = ()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    or_no_gain: bool = False
    needs_gpu: bool = False

    @property
    def text(self) -> str:
        return base_text(self.base) + "\n\n" + self.own

    @property
    def user_case(self) -> TimedCase:
        return user_case(self.op, self.dtypes[0], self.shapes)

    @property
    def incumbent(self) -> str | None:
        """What it is timed against: needed where only timing, or a check of winners, catches it."""
        if self.caught_by == "sanitizer":
            return base_text(self.base) + TWICE
        return base_text(self.base) if self.caught_by == "timing" or self.verdict == "DELEGATES" else None


def base_text(name: str) -> str:
    access = (FOLDER / "bases" / "cuda_access.py").read_text() + "\n\n" if name.endswith("_cuda") else ""
    return access + BASES[name].read_text()


def op_and_backend(base: str) -> tuple[str, str]:
    """The op and the backend that a base declares."""
    found = literals(BASES[base].read_text())
    return found["KERNEL_TYPE"], found["BACKEND"]


def user_case(op: str, dtype: str, shapes: dict[str, tuple[int, ...]] | None = None) -> TimedCase:
    """One call as a model would make it."""
    case = build_case(op, "model", dtype=dtype, **(shapes or USER_SHAPES[op]))
    return TimedCase(case=retype(case, targets="int64") if op == "cross_entropy" else case, calls=3)


def literals(text: str) -> dict[str, object]:
    """Names in capitals and the literals assigned to them at the top level."""
    found = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign):
            continue
        try:
            value = ast.literal_eval(node.value)
        except (ValueError, TypeError):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Tuple):
            found |= {name.id: part for name, part in zip(target.elts, value, strict=True)}
        elif isinstance(target, ast.Name):
            found[target.id] = value
    return found


def fragments(folder: str) -> list[Fragment]:
    """All fragments in `wrong` or in `right`, by name."""
    return [
        _read(path, ("bf16",) if folder == "wrong" else ("fp32", "bf16", "fp16"))
        for path in sorted((FOLDER / folder).glob("*.py"))
    ]


def _read(path: Path, dtypes: tuple[str, ...]) -> Fragment:
    own = path.read_text()
    found = literals(own)
    op, backend = op_and_backend(found["BASE"])
    return Fragment(
        path=path,
        base=found["BASE"],
        op=op,
        backend=backend,
        kind=ast.get_docstring(ast.parse(own)) or "",
        own=own,
        caught_by=found.get("CAUGHT_BY", ""),
        verdict=found.get("VERDICT", "PASS"),
        dtypes=found.get("JUDGED_IN", dtypes),
        shapes=found.get("SHAPES", {}),
        or_no_gain=found.get("OR_NO_GAIN", False),
        needs_gpu=found.get("NEEDS_GPU", False),
    )
