"""The first C++ kernel of a captured subgraph: what Inductor generates for it, rewritten into the kernel.py contract.

Inductor is asked for scalar loops, which need none of PyTorch's headers; g++ makes vectors of them, and the functions
that it cannot (exp, tanh, erf) are given as straight-line code. Nothing is compiled or run here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule

from autokernel.regions.cpppieces import PIECES, Piece

THREADS = 2
"""More than one, so that Inductor marks its parallel loops; how many there are is then left to OpenMP."""

CONFIG = {"cpp.simdlen": 1, "cpp.threads": THREADS, "fx_graph_cache": False, "cpp_wrapper": False}

_KERNEL = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(\[.*?\], r?'''\n(.*?)'''\)$", re.DOTALL | re.MULTILINE)
_CHECK = re.compile(r'TORCH_CHECK\((.*), "(?:[^"]*)"\);')
_ALLOCATION = re.compile(r"(\w+) = empty_strided_cpu\((.*), (torch\.\w+)\)")
_REUSE = re.compile(r"(\w+) = (\w+); del \w+  # reuse")
_ALIAS = re.compile(r"(\w+) = reinterpret_tensor\((\w+), (\(.*?\)), (\(.*?\)), (\d+)\)  # alias")
_VIEW = re.compile(r"reinterpret_tensor\((\w+), (\(.*?\)), (\(.*?\)), (\d+)\)")
_CALL = re.compile(r"(\w+)\((.*)\)")
_RETURN = re.compile(r"return \((.*), \)")
_NOTHING = ("del ", "assert_size_stride(", "args.clear()", "#")


class NotGenerated(ValueError):
    """Inductor has no code of its own for the region, or code of a form that is not known here."""


def starter_text(op: str, gm: GraphModule, examples: Sequence[Tensor], *, about: str, layouts: str) -> str:
    """A kernel.py for the region that `gm` computes from tensors like `examples` (fake ones do).

    Args:
        about: where the region is from; `layouts` of its inputs and its result, both for people.

    Raises: NotGenerated.
    """
    wrapper = _inductor_code(gm, examples)
    sources = {name: text for name, text in _KERNEL.findall(wrapper)}
    if not sources:
        raise NotGenerated("Inductor generates no C++ for it")
    names = [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]
    functions = {name: f"step_{number}" for number, name in enumerate(sources)}
    body = _body(wrapper, names, functions)
    code = "\n".join(_source(text, functions[name]) for name, text in sources.items())
    return _TEMPLATE.format(
        op=op,
        about=about,
        layouts=layouts,
        source=_prelude(code) + code,
        arguments=", ".join(names),
        body="\n".join(f"    {line}" for line in body),
    )


def _inductor_code(gm: GraphModule, examples: Sequence[Tensor]) -> str:
    """The wrapper's text with the kernels in it, as it is before anything is compiled."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    found: list[str] = []

    def keep(self: GraphLowering) -> Any:
        wrapper, _ = self.codegen()
        found.append(wrapper.value)
        raise _Generated

    try:
        with mock.patch.object(GraphLowering, "compile_to_module", keep), config.patch(CONFIG), torch.no_grad():
            compiled: Any = compile_fx(gm, list(examples))
            compiled(*examples)
    except _Generated:
        pass
    except Exception as error:
        raise NotGenerated(f"Inductor fails on it: {(str(error).splitlines() or [type(error).__name__])[0]}") from None
    if not found:
        raise NotGenerated("Inductor generates nothing for it")
    return found[0]


class _Generated(BaseException):
    """Ends a compilation once the code is there; no error that Inductor would wrap."""


# --- the C++ ---------------------------------------------------------------------------------------------------------


def _source(text: str, name: str) -> str:
    """One of Inductor's kernels as a function of the contract's ABI."""
    lines = [line for line in text.splitlines() if "#include" not in line and "integer_div_error" not in line]
    code = "\n".join(lines).replace('extern "C"  void  kernel(', f'extern "C" int {name}(')
    if f"int {name}(" not in code:
        raise NotGenerated("Inductor's kernel begins in another way than is known here")
    code = code.replace("static_cast<int64_t>", "int64_t").replace("at::BFloat16", "bf16")
    code = code.replace("c10::convert<", "convert<")
    code = _CHECK.sub(r"CHECK(\1);", code)
    code = re.sub(r"\bc10::(div_floor_integer)\(", r"\1(", code)
    code = re.sub(r"\bstd::(exp|log|log1p|tanh|erf)\(", r"fast_\1(", code)
    code = re.sub(r"\.(mean|m2|weight)\b", r".\1()", code)
    if "_arr[" not in code:  # partial results by thread, of which there is then a fixed number
        code = code.replace(f"#pragma omp parallel num_threads({THREADS})", "#pragma omp parallel if (PARALLEL)")
        code = re.sub(r" *int tid = omp_get_thread_num\(\);\n", "", code)
    end = code.rindex("}")
    if foreign := re.search(r"\b(?:at|c10|torch|aoti)::\w+", code):
        raise NotGenerated(f"its code needs {foreign[0]} of PyTorch")
    return f"{code[:end]}    return 0;\n}}\n"


def _prelude(code: str) -> str:
    """The helpers that `code` names, and those that they name."""
    wanted: list[Piece] = []
    for piece in reversed(PIECES):
        text = code + "".join(other.text for other in wanted)
        if any(re.search(rf"\b{name}\b", text) for name in piece.names):
            wanted.append(piece)
    headers = sorted(
        {header for piece in wanted for header in piece.headers} | {"cmath", "cstdint", "limits", "memory"}
    )
    headers += ["omp.h"] if "omp_get_thread_num" in code else []
    lines = [f"#include <{header}>" for header in headers]
    return "\n".join([*lines, "", *(piece.text.strip("\n") for piece in reversed(wanted)), ""])


# --- the Python ------------------------------------------------------------------------------------------------------


def _body(wrapper: str, names: Sequence[str], functions: Mapping[str, str]) -> list[str]:
    """`kernel_fn`'s lines: memory, calls, the result."""
    text = wrapper[wrapper.index("    def call(self, args):") :]
    lines = [line.strip() for line in text[: text.index("\nrunner = ")].splitlines()[1:] if line.strip()]
    given = [name.strip() for name in lines[0].removesuffix("= args").split(",") if name.strip()]
    if len(given) != len(names):
        raise NotGenerated("Inductor leaves out an input")
    body: list[str] = []
    for line in lines[1:]:
        if not line.startswith(_NOTHING):
            body.append(_line(line, functions))
    renamed = dict(zip(given, names, strict=True))
    return [re.sub(r"\barg\d+_1\b", lambda found: renamed[found[0]], line) for line in body]


def _line(line: str, functions: Mapping[str, str]) -> str:
    if found := _ALLOCATION.fullmatch(line):
        return f"{found[1]} = torch.empty_strided({found[2]}, dtype={found[3]})"
    if found := _REUSE.fullmatch(line):
        return f"{found[1]} = {found[2]}"
    if found := _ALIAS.fullmatch(line):
        return f"{found[1]} = {_viewed(*found.groups()[1:])}"
    if found := _RETURN.fullmatch(line):
        view = _VIEW.fullmatch(found[1])
        return f"return {_viewed(*view.groups()) if view else found[1]}"
    if (found := _CALL.fullmatch(line)) and found[1] in functions:
        return f"lib.{functions[found[1]]}({_VIEW.sub(lambda view: _viewed(*view.groups()), found[2])})"
    raise NotGenerated(f"Inductor calls PyTorch for it: {line[:100]}")


def _viewed(name: str, shape: str, stride: str, offset: str) -> str:
    return f"{name}.as_strided({shape}, {stride}, {offset})"


_TEMPLATE = '''"""A captured subgraph of {about}.

{layouts}

The loops are those that PyTorch's Inductor generates for it, for exactly these shapes; g++ makes vectors of them. So a
run starts about level with torch.compile.
"""

import platform

import torch

from autokernel.native import build

KERNEL_TYPE = "{op}"
BACKEND = "cpp"
TUNABLES = {{
    "OPT": ["-O2", "-O3"],  # compiler level
    "WIDTH": [128, 256, 512],  # bits of the vectors that the compiler prefers (x86)
    "REORDER": [0, 1],  # 1: sums may be taken in another order, in vectors; NaN and infinities stay
    "UNROLL": [0, 1],  # 1: unroll loops
    "PARALLEL": [0, 1],  # 0: all on the calling thread
}}
CONFIG = {{"OPT": "-O3", "WIDTH": 512, "REORDER": 1, "UNROLL": 0, "PARALLEL": 1}}

SOURCE = r"""
{source}"""


def _flags(config):
    flags = [config["OPT"], "-fno-math-errno", "-fno-trapping-math", f"-DPARALLEL={{config['PARALLEL']}}"]
    flags += ["-fassociative-math", "-fno-signed-zeros"] if config["REORDER"] else []
    flags += ["-funroll-loops"] if config["UNROLL"] else []
    wide = platform.machine() in ("x86_64", "AMD64")
    return [*flags, f"-mprefer-vector-width={{config['WIDTH']}}"] if wide else flags


lib = build(SOURCE, flags=_flags(CONFIG))


def kernel_fn({arguments}):
    """The subgraph's result; for inputs of the layouts above only."""
{body}
'''
