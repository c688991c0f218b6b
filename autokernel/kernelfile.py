"""Read and rewrite a kernel.py as text: its type, backend, TUNABLES and CONFIG, without ever running it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from autokernel.errors import ConfigError
from autokernel.kerneltext import by_digest, text_digest

Value = int | float | str | bool
Config = dict[str, Value]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFile:
    """The literals of one kernel.py. `tunables` maps a knob to its values in order; `config` is the current choice.

    `constraints` are conditions on CONFIG as text; `unused` maps a knob to when its value makes no difference.
    """

    kernel_type: str
    backend: str
    tunables: Mapping[str, Sequence[Value]]
    config: Mapping[str, Value]
    constraints: Sequence[str] = ()
    unused: Mapping[str, str] = field(default_factory=dict)


def parse_kernel(text: str) -> KernelFile:
    """The literals of a kernel.py.

    Raises: ConfigError when the text is no Python, lacks `kernel_fn`, KERNEL_TYPE or BACKEND, or has a literal of
    another shape than the contract's.
    """
    tree = _parse(text)
    literals = _assignments(tree)
    if not any(isinstance(node, ast.FunctionDef) and node.name == "kernel_fn" for node in tree.body) and (
        "kernel_fn" not in literals
    ):
        raise ConfigError("kernel.py defines no kernel_fn", hint="define kernel_fn with the oracle's signature")
    kernel_type = _literal(literals, "KERNEL_TYPE", str)
    backend = _literal(literals, "BACKEND", str)
    tunables = _literal(literals, "TUNABLES", dict) if "TUNABLES" in literals else {}
    config = _literal(literals, "CONFIG", dict) if "CONFIG" in literals else {}
    for knob, values in tunables.items():
        if not isinstance(knob, str) or not isinstance(values, list) or not values:
            raise ConfigError(f"TUNABLES[{knob!r}] is not a non-empty list", hint="write literal lists")
    for knob, value in config.items():
        if knob in tunables and value not in tunables[knob]:
            raise ConfigError(
                f"CONFIG[{knob!r}] = {value!r} is not among TUNABLES[{knob!r}] = {tunables[knob]}",
                hint="choose a listed value or list it",
            )
    return KernelFile(
        kernel_type=kernel_type,
        backend=backend,
        tunables=tunables,
        config=config,
        constraints=_texts(literals, "CONSTRAINTS", list),
        unused=_texts(literals, "UNUSED", dict),
    )


def with_config(text: str, config: Mapping[str, Value]) -> str:
    """The same kernel.py with its CONFIG literal replaced; every other byte stays.

    Raises: ConfigError when the text has no CONFIG.
    """
    node = _assignments(_parse(text)).get("CONFIG")
    if node is None:
        raise ConfigError("kernel.py has no CONFIG to rewrite", hint="add CONFIG = {...}")
    encoded = text.encode().splitlines(keepends=True)  # ast counts columns in UTF-8 bytes
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    before = b"".join(encoded[: node.lineno - 1]) + encoded[node.lineno - 1][: node.col_offset]
    after = encoded[node.end_lineno - 1][node.end_col_offset :] + b"".join(encoded[node.end_lineno :])
    return (before + repr(dict(config)).encode() + after).decode()


def signature(text: str) -> str | None:
    """`kernel_fn(x, weight, eps=1e-06)` as a kernel.py defines it; None when it does so in another way than by def."""
    for node in _parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == "kernel_fn":
            return f"kernel_fn({ast.unparse(node.args)})"
    return None


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text, filename="kernel.py")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(f"kernel.py is not valid Python: {error}", hint="mend the syntax") from None


def _assignments(tree: ast.Module) -> dict[str, ast.expr]:
    """Value nodes of the module's plain assignments to one name; the last one counts, as when it runs."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def _texts(nodes: Mapping[str, ast.expr], name: str, kind: type[T]) -> T:
    """A literal list of texts, or mapping of text to text; empty when the kernel has none."""
    found = _literal(nodes, name, kind) if name in nodes else kind()
    members = [*found, *found.values()] if isinstance(found, dict) else found
    assert isinstance(members, list)
    if not all(isinstance(member, str) for member in members):
        raise ConfigError(f"{name} = {found!r} holds something else than text", hint="write conditions as text")
    return found


def _literal(nodes: Mapping[str, ast.expr], name: str, kind: type[T]) -> T:
    if name not in nodes:
        raise ConfigError(f"kernel.py has no {name}", hint=f"add {name} as a literal")
    try:
        value = ast.literal_eval(nodes[name])
    except (ValueError, TypeError, MemoryError, RecursionError):  # all that literal_eval says it may raise
        raise ConfigError(f"{name} is not a literal", hint="it is read without running the file") from None
    if not isinstance(value, kind):
        raise ConfigError(f"{name} = {value!r} is not a {kind.__name__}", hint="see the kernel.py contract")
    return value


@by_digest(maxsize=1024)
def without_config(text: str) -> tuple[KernelFile, str]:
    """The literals of a kernel.py, and a digest of it with CONFIG taken out: equal where only CONFIG differs.

    Raises: ConfigError as `parse_kernel` does.
    """
    kernel = parse_kernel(text)
    return kernel, text_digest(with_config(text, {}) if kernel.config else text)
