"""Gives a kernel.py that has literal numbers in its launches the TUNABLES and CONFIG from which a search begins.

    kernel[grid](x, y, n, BLOCK=1024, num_warps=4)
->
    TUNABLES = {"BLOCK": [256, 512, 1024, 2048, 4096], "num_warps": [1, 2, 4, 8, 16]}
    CONFIG = {"BLOCK": 1024, "num_warps": 4}
    ...
    kernel[grid](x, y, n, BLOCK=CONFIG["BLOCK"], num_warps=CONFIG["num_warps"])

The text is read, never run. A knob is a `tl.constexpr` parameter of a @triton.jit function, or an option of the launch,
that a launch passes as a literal number by keyword. Two launches that pass the same name share the knob when they pass
the same number; otherwise the later ones stay as they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from autokernel.errors import ConfigError
from autokernel.kernelfile import Value, parse_kernel

LAUNCH_OPTIONS = {"num_warps": (1, 32), "num_stages": (1, 6)}
"""Options of a Triton launch with their least and greatest sensible value."""

STEPS = 2
"""How many powers of two a knob reaches below and above the number that is there."""

LEAST_BLOCK = 16
"""Of a block of 16 or more: below it the matrix unit takes none."""

HINT = 'write TUNABLES = {"BLOCK": [512, 1024]} and CONFIG = {"BLOCK": 1024}, and launch with BLOCK=CONFIG["BLOCK"]'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Literal:
    """A number that a launch passes: the knob's name, its value and where the value stands (lines from 0, bytes)."""

    name: str
    value: int
    line: int
    start: int
    end: int


def declare(text: str) -> str:
    """The same kernel.py with TUNABLES and CONFIG, as it is when it has them.

    Raises: ConfigError when the text is no kernel.py, or no launch shows a number that could be a knob.
    """
    kernel = parse_kernel(text)
    if kernel.tunables:
        return text
    if kernel.config:
        raise ConfigError("kernel.py has CONFIG but no TUNABLES", hint="list each value that a knob may take")
    tree = ast.parse(text)
    config: dict[str, Value] = {}
    literals = []
    for literal in _literals(tree):
        if config.setdefault(literal.name, literal.value) == literal.value:
            literals.append(literal)
    if not literals:
        raise ConfigError(
            "no launch of a @triton.jit function passes a literal constexpr, num_warps or num_stages", hint=HINT
        )
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    for literal in sorted(literals, key=lambda found: (found.line, found.start), reverse=True):
        line = lines[literal.line]
        lines[literal.line] = line[: literal.start] + f'CONFIG["{literal.name}"]'.encode() + line[literal.end :]
    tunables = {name: _values(name, value) for name, value in config.items() if isinstance(value, int)}
    lines.insert(_place(tree), f"TUNABLES = {tunables!r}\nCONFIG = {config!r}\n".encode())
    return b"".join(lines).decode()


def _literals(tree: ast.Module) -> Iterator[_Literal]:
    """The numbers in launches, in the order of the text."""
    constexprs = {f.name: _constexprs(f) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and _is_jit(f)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        match call.func:
            case ast.Subscript(value=ast.Name(id=name)) if name in constexprs:
                yield from _passed(call, constexprs[name])


def _passed(call: ast.Call, constexprs: set[str]) -> Iterator[_Literal]:
    for keyword in call.keywords:
        if keyword.arg not in constexprs and keyword.arg not in LAUNCH_OPTIONS:
            continue
        match keyword.value:
            # A bool is an int to Python; zero and one turn things off and on in kernels, and are no sizes.
            case ast.Constant(value=int(value)) as node if type(value) is int and (
                value > 1 or keyword.arg in LAUNCH_OPTIONS
            ):
                assert keyword.arg is not None
                assert node.end_col_offset is not None
                yield _Literal(
                    name=keyword.arg,
                    value=value,
                    line=node.lineno - 1,
                    start=node.col_offset,
                    end=node.end_col_offset,
                )


def _constexprs(function: ast.FunctionDef) -> set[str]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {a.arg for a in arguments if a.annotation is not None and ast.unparse(a.annotation).endswith("constexpr")}


def _is_jit(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).split("(")[0] in ("triton.jit", "jit") for decorator in function.decorator_list)


def _values(name: str, value: int) -> list[int]:
    """Values to try around the one that is there: numbers of stages one by one, others by powers of two."""
    if name == "num_stages":
        low, high = LAUNCH_OPTIONS[name]
        return sorted({*range(low, high + 1), value})
    low, high = LAUNCH_OPTIONS.get(name, (min(value, LEAST_BLOCK), value << STEPS))
    around = [value >> step for step in range(STEPS, 0, -1)] + [value << step for step in range(STEPS + 1)]
    return sorted({number for number in around if low <= number <= high} | {value})


def _place(tree: ast.Module) -> int:
    """Number of the line (from 0) before which the literals go: behind the imports and KERNEL_TYPE and BACKEND."""
    place = 0
    for node in tree.body:
        named = {t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)}
        if isinstance(node, (ast.Import, ast.ImportFrom)) or named & {"KERNEL_TYPE", "BACKEND"}:
            assert node.end_lineno is not None
            place = node.end_lineno
    return place
