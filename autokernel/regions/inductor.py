"""What torch.compile's Inductor generates for a region, as text: nothing is compiled or run here.

Its wrapper allocates memory and calls kernels, line by line; the lines become those of a `kernel_fn`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule

from autokernel.usercode import first_line

_ALLOCATION = re.compile(r"(\w+) = empty_strided_(?:cpu|cuda)\((.*), (torch\.\w+)\)")
_REUSE = re.compile(r"(\w+) = (\w+); del \w+  # reuse")
_ALIAS = re.compile(r"(\w+) = reinterpret_tensor\((\w+), (\(.*?\)), (\(.*?\)), (\d+)\)  # alias")
_VIEW = re.compile(r"reinterpret_tensor\((\w+), (\(.*?\)), (\(.*?\)), (\d+)\)")
_RETURN = re.compile(r"return \((.*), \)")
_NOTHING = re.compile(
    r"del \w|assert_size_stride\(|args\.clear\(\)|#|with torch\.cuda\._DeviceGuard|torch\.cuda\.set_device"
    r"|(?:raw_)?stream\d+ = get_raw_stream|\w+ = copy_if_misaligned"
)

Launch = Callable[[str], "str | None"]
"""A line of the wrapper -> the line that calls the same kernel by the contract; None where it calls none."""


class NotGenerated(ValueError):
    """Inductor has no code of its own for the region, or code of a form that is not known here."""


def generated(gm: GraphModule, examples: Sequence[Tensor], settings: Mapping[str, Any]) -> str:
    """The wrapper's text with the kernels in it.

    Args:
        settings: Inductor's, beside the user's own.

    Raises: NotGenerated.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    found: list[str] = []

    def keep(self: GraphLowering) -> Any:
        wrapper, _ = self.codegen()
        found.append(wrapper.value)
        raise _Generated

    patched = mock.patch.object(GraphLowering, "compile_to_module", keep)
    try:
        with patched, config.patch({"fx_graph_cache": False, "cpp_wrapper": False, **settings}), torch.no_grad():
            compiled: Any = compile_fx(gm, list(examples))
            compiled(*examples)
    except _Generated:
        pass
    except Exception as error:
        raise NotGenerated(f"Inductor fails on it: {first_line(error)}") from None
    if not found:
        raise NotGenerated("Inductor generates nothing for it")
    return found[0]


class _Generated(BaseException):
    """Ends a compilation once the code is there; no error that Inductor would wrap."""


def body_of(wrapper: str, names: Sequence[str], launch: Launch, device: str) -> list[str]:
    """`kernel_fn`'s lines for arguments of these names: memory, calls, the result.

    Args:
        device: the expression for where memory is allocated; empty for the CPU.

    Raises: NotGenerated.
    """
    text = wrapper[wrapper.index("    def call(self, args):") :]
    lines = [line.strip() for line in text[: text.index("\nrunner = ")].splitlines()[1:] if line.strip()]
    given = [name.strip() for name in lines[0].removesuffix("= args").split(",") if name.strip()]
    if len(given) != len(names):
        raise NotGenerated("Inductor leaves out an input")
    body = [_line(line, launch, device) for line in lines[1:] if not _NOTHING.match(line)]
    renamed = dict(zip(given, names, strict=True))
    return [re.sub(r"\barg\d+_1\b", lambda found: renamed[found[0]], line) for line in body]


def _line(line: str, launch: Launch, device: str) -> str:
    if found := _ALLOCATION.fullmatch(line):
        where = f", device={device}" if device else ""
        return f"{found[1]} = torch.empty_strided({found[2]}, dtype={found[3]}{where})"
    if found := _REUSE.fullmatch(line):
        return f"{found[1]} = {found[2]}"
    if found := _ALIAS.fullmatch(line):
        return f"{found[1]} = {_viewed(*found.groups()[1:])}"
    if found := _RETURN.fullmatch(line):
        view = _VIEW.fullmatch(found[1])
        return f"return {_viewed(*view.groups()) if view else found[1]}"
    call = launch(_VIEW.sub(lambda view: _viewed(*view.groups()), line))
    if call is None:
        raise NotGenerated(f"Inductor calls PyTorch for it: {line[:100]}")
    return call


def _viewed(name: str, shape: str, stride: str, offset: str) -> str:
    return f"{name}.as_strided({shape}, {stride}, {offset})"
