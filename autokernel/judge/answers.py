"""What a child may answer: fields of the right types and numbers, whatever it sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def names(answer: dict[str, Any], field: str) -> set[str]:
    """A list of strings. Raises: ValueError when it is something else, as all of this module do."""
    value = answer.get(field)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{field} is no list of names")
    return set(value)


def numbers(answer: dict[str, Any], field: str, counts: Sequence[int]) -> tuple[float, ...]:
    """A list of finite numbers that are not negative, as many as one of `counts`."""
    value = answer.get(field)
    if not isinstance(value, list) or len(value) not in counts:
        raise ValueError(f"{field} is no list of {' or '.join(map(str, counts))} numbers")
    return tuple(_number(item, field) for item in value)


def number(answer: dict[str, Any], field: str) -> float:
    """One finite number that is not negative."""
    return _number(answer.get(field), field)


def outputs(answer: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """`count` descriptions of outputs, each either of a plain tensor or the name of another type."""
    value = answer.get("outputs")
    if not isinstance(value, list) or len(value) != count or not all(map(_describes, value)):
        raise ValueError(f"outputs are no {count} descriptions")
    return value


def _describes(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("type"), str):
        return False
    if item["type"] != "Tensor":
        return True
    texts = all(isinstance(item.get(name), str) for name in ("dtype", "device"))
    sizes = all(isinstance(item.get(name), list) and all(map(_is_int, item[name])) for name in ("shape", "stride"))
    return texts and sizes and isinstance(item.get("grad"), bool) and _is_int(item.get("storage_bytes"))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any, field: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{field} holds {value!r}")
    return float(value)
