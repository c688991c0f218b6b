"""The inputs of a model: what `get_inputs()` returned, read as a call, described in words, placed on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autokernel.errors import ConfigError
from autokernel.spec import DTYPE_NAMES, DTYPES


def as_call(given: Any, *, source: str = "get_inputs()") -> tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]:
    """(args, kwargs, notes) of a call, from a list of arguments, a dict of keywords, or [args, kwargs].

    Raises: ConfigError when `given` is none of these.
    """
    if isinstance(given, Mapping):
        return (), _keywords(given, source), ()
    if isinstance(given, list | tuple):
        pair = len(given) == 2 and isinstance(given[0], list | tuple) and isinstance(given[1], Mapping)
        if pair and all(isinstance(key, str) for key in given[1]):
            note = f"{source} returned a sequence and a dict: read as (args, kwargs)"
            return tuple(given[0]), dict(given[1]), (note,)
        return tuple(given), {}, ()
    if isinstance(given, Tensor):
        return (given,), {}, (f"{source} returned one tensor: read as the only argument",)
    raise ConfigError(
        f"{source} returned {kind_of(given)}", hint="return a list of arguments, a dict of keywords, or (args, kwargs)"
    )


def describe_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """One line: each leaf of the inputs with its name, shape, dtype and device."""
    leaves = [f"{name}: {_leaf(value)}" for name, value in named_leaves(args, kwargs)]
    return "; ".join(leaves) if leaves else "none"


def place_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.device, dtype: str | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs on `target`, floating ones in `dtype`; only CPU tensors are moved.

    Raises: ConfigError naming an argument that the model file itself put on another device, or that no forward leaves
    as it was.
    """
    for name, value in named_leaves(args, kwargs):
        if isinstance(value, Tensor) and value.device not in (torch.device("cpu"), target):
            raise ConfigError(
                f"{name} of get_inputs() is on {value.device}, the model is on {target}",
                hint="create inputs on the CPU and choose the device with --device",
            )
        if is_cache(value):
            raise ConfigError(
                f"{name} of get_inputs() is a {type(value).__name__}, which each forward would fill further",
                hint="let the model make its cache itself (transformers: use_cache=True)",
            )

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        floating = dtype is not None and value.is_floating_point()
        return value.detach().to(device=target, dtype=DTYPES[dtype] if dtype and floating else value.dtype)

    return pytree.tree_map(place, args), pytree.tree_map(place, kwargs)


def is_cache(value: Any) -> bool:
    """Whether this is a cache of keys and values as transformers has them, which a forward changes in place."""
    if not callable(getattr(value, "update", None)):
        return False
    return isinstance(getattr(value, "layers", None), list) or bool(cache_parts(value))


def cache_parts(cache: Any) -> dict[str, Any]:
    """The caches that one consists of, by name: an encoder-decoder's for its own tokens and for the encoder's."""
    return {name: part for name, part in getattr(cache, "__dict__", {}).items() if is_cache(part)}


def named_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each leaf of the pytree of inputs, called `argument 0['mask']` or `argument 'mask'[1]`."""
    for index, arg in enumerate(args):
        for path, leaf in pytree.tree_flatten_with_path(arg)[0]:
            yield f"argument {index}{pytree.keystr(path)}", leaf
    for key, value in kwargs.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            yield f"argument {key!r}{pytree.keystr(path)}", leaf


def _keywords(given: Mapping[Any, Any], source: str) -> dict[str, Any]:
    wrong = next((key for key in given if not isinstance(key, str)), None)
    if wrong is not None:
        raise ConfigError(f"{source} returned a dict with the key {wrong!r}", hint="keys are forward's argument names")
    return dict(given)


def _leaf(value: Any) -> str:
    if not isinstance(value, Tensor):
        return kind_of(value) if len(repr(value)) > 40 else repr(value)
    name = DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f"{list(value.shape)} {name} {value.device}"


def kind_of(value: Any) -> str:
    """`None`, or the value's type in words."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def shown_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Arguments as they would stand in a call, tensors as shape and dtype."""
    shown = [_leaf(arg) for arg in args] + [f"{key}={_leaf(value)}" for key, value in kwargs.items()]
    return ", ".join(shown)
