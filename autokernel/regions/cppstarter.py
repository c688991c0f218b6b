"""The first C++ kernel of a captured subgraph: what Inductor generates for it, rewritten into the kernel.py contract.

Inductor is asked for scalar loops, which need none of PyTorch's headers; g++ makes vectors of them, and the functions
that it cannot (exp, tanh, erf) are given as straight-line code. Nothing is compiled or run here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from autokernel.regions.cpppieces import PIECES, Piece
from autokernel.regions.inductor import NotGenerated, body_of, generated

LEAST_THREADS = 2
"""More than one, so that Inductor marks its parallel loops; how many there are is then left to OpenMP."""

_KERNEL = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(\[.*?\], r?'''\n(.*?)'''\)$", re.DOTALL | re.MULTILINE)
_CHECK = re.compile(r'TORCH_CHECK\((.*), "(?:[^"]*)"\);')
_CALL = re.compile(r"(\w+)\((.*)\)")


def starter_text(op: str, gm: GraphModule, examples: Sequence[Tensor], *, about: str, layouts: str) -> str:
    """A kernel.py for the region that `gm` computes from tensors like `examples` (fake ones do).

    Args:
        about: where the region is from; `layouts` of its inputs and its result, both for people.

    Raises: NotGenerated.
    """
    threads = max(LEAST_THREADS, torch.get_num_threads())
    wrapper = generated(gm, examples, {"cpp.simdlen": 1, "cpp.threads": threads})
    sources = {name: text for name, text in _KERNEL.findall(wrapper)}
    if not sources:
        raise NotGenerated("Inductor generates no C++ for it")
    names = [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]
    functions = {name: f"step_{number}" for number, name in enumerate(sources)}

    def launch(line: str) -> str | None:
        found = _CALL.fullmatch(line)
        return f"lib.{functions[found[1]]}({found[2]})" if found and found[1] in functions else None

    body = body_of(wrapper, names, launch, device="")
    code = "\n".join(_source(text, functions[name]) for name, text in sources.items())
    return _TEMPLATE.format(
        op=op,
        about=about,
        layouts=layouts,
        source=_prelude(code) + code,
        arguments=", ".join(names),
        body="\n".join(f"    {line}" for line in body),
    )


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
        code = re.sub(r"#pragma omp parallel num_threads\(\d+\)", "#pragma omp parallel if (PARALLEL)", code)
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
