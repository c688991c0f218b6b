"""Conditions on a configuration, written as expressions in a kernel.py and evaluated without running any of its code.

Only knob names, constants, arithmetic, comparisons, `and`, `or`, `not` and `in` are known: no call, no attribute, no
subscript and no power, so that an expression can neither do anything nor take long.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from autokernel.errors import ConfigError
from autokernel.kernelfile import Value

MOST_CHARACTERS = 500
"""Of one expression; a longer one is no rule a person would write, and deep ones exhaust the parser."""

Evaluate = Callable[[Mapping[str, Value]], Any]

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, group: value in group,
    ast.NotIn: lambda value, group: value not in group,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that configurations meet or do not."""

    text: str
    evaluate: Evaluate

    @classmethod
    def of(cls, text: str, names: Collection[str]) -> Rule:
        """The rule written as `text` over `names`.

        Raises: ConfigError for text that is no expression, names another name, or uses what is not allowed.
        """
        if len(text) > MOST_CHARACTERS:
            raise ConfigError(f"a rule of {len(text)} characters", hint=f"write at most {MOST_CHARACTERS}")
        try:
            tree = ast.parse(text, mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise ConfigError(f"the rule {text!r} is no expression: {error}", hint="write one, such as 'A * B <= 8'")
        return cls(text, _Reader(text, names).read(tree.body))

    def holds(self, config: Mapping[str, Value]) -> bool:
        """Whether `config` meets the rule. What cannot be evaluated (a division by zero, say) does not."""
        try:
            return bool(self.evaluate(config))
        except (ArithmeticError, TypeError):
            return False


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns the nodes of one expression into functions of a configuration."""

    text: str
    names: Collection[str]

    def read(self, node: ast.expr) -> Evaluate:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return lambda config: value
            case ast.Name(id=name) if name in self.names:
                return lambda config: config[name]
            case ast.Name(id=name):
                raise self._refused(f"{name} is no knob")
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                members = [self.read(part) for part in parts]
                return lambda config: tuple(member(config) for member in members)
            case ast.BoolOp(op=op, values=parts):
                terms = [self.read(part) for part in parts]
                meet = all if isinstance(op, ast.And) else any
                return lambda config: meet(term(config) for term in terms)
            case ast.UnaryOp() | ast.BinOp() | ast.Compare():
                return self._read_operator(node)
        raise self._refused(f"{type(node).__name__} is not allowed")

    def _read_operator(self, node: ast.UnaryOp | ast.BinOp | ast.Compare) -> Evaluate:
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=part):
                term = self.read(part)
                return lambda config: not term(config)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=part):
                number = self.read(part)
                factor = -1 if isinstance(sign, ast.USub) else 1
                return lambda config: factor * _number(number(config))
            case ast.BinOp(op=op, left=a, right=b) if type(op) in _ARITHMETIC:
                left, right, apply = self.read(a), self.read(b), _ARITHMETIC[type(op)]
                return lambda config: apply(_number(left(config)), _number(right(config)))
            case ast.Compare(left=first, ops=ops, comparators=rest) if all(type(op) in _COMPARISONS for op in ops):
                terms = [self.read(part) for part in (first, *rest)]
                tests = [_COMPARISONS[type(op)] for op in ops]
                return lambda config: _chain(tests, [term(config) for term in terms])
        raise self._refused(f"{type(getattr(node, 'op', node)).__name__} is not allowed")

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"the rule {self.text!r} cannot be used: {why}",
            hint="use knobs, numbers, text, arithmetic, comparisons, and, or, not, in",
        )


def _chain(tests: list[Callable[[Any, Any], Any]], terms: list[Any]) -> bool:
    return all(test(a, b) for test, a, b in zip(tests, terms[:-1], terms[1:], strict=True))


def _number(value: Any) -> Any:
    """`value`, of which text is refused: a product with it is a longer text."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    return value
