"""The first Triton kernel of a captured subgraph: what Inductor generates, rewritten into the kernel.py contract.

The kernels' own text stays; what Inductor's autotuner would choose (blocks, warps) become knobs of TUNABLES.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from autokernel.regions.inductor import NotGenerated, body_of, generated

SETTINGS = {"triton.autotune_at_compile_time": False, "triton.multi_kernel": 0, "triton.cooperative_reductions": False}

MOST_IN_BLOCK = {"XBLOCK": 1024, "YBLOCK": 128, "R0_BLOCK": 4096}
"""Inductor leaves masks out where a size is a multiple of its largest blocks (4096, 1024, 65536): not beyond those."""

_KERNEL = re.compile(
    r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)''', device_str='\w+'\)$", re.DOTALL | re.MULTILINE
)
_RUN = re.compile(r"(\w+)\.run\((.*), stream=\w+\)")
_DEF = re.compile(r"^def (\w+)\((.*)\):$", re.MULTILINE)
_GRID = re.compile(r"'grid_type': '(\w+)'")
_NUMEL = re.compile(r"^    (\w)(?:0_)?numel = (\d+)$", re.MULTILINE)
_KIND = re.compile(r"^@triton_heuristics\.(\w+)\(", re.MULTILINE)

HELPERS = {
    "triton_helpers": "from torch._inductor.runtime import triton_helpers",
    "libdevice": "from torch._inductor.runtime.triton_helpers import libdevice",
    "tl_math": "from torch._inductor.runtime.triton_helpers import math as tl_math",
}
"""What the kernels may name, and where that comes from."""

BLOCK_OF = {"x": "XBLOCK", "y": "YBLOCK", "r": "R0_BLOCK"}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One of Inductor's kernels: its text without decorators of Inductor's, its sizes by dimension, its blocks."""

    name: str
    text: str
    sizes: dict[str, int]
    blocks: tuple[str, ...]

    @property
    def grid(self) -> str:
        """The launch grid as an expression of CONFIG."""
        cuts = [
            f"triton.cdiv({self.sizes[dim]}, {self.knob(BLOCK_OF[dim])})" if BLOCK_OF[dim] in self.blocks else "1"
            for dim in "xy"
            if dim in self.sizes
        ]
        if "XBLOCK" not in self.blocks:  # one row of a reduction each
            cuts[0] = str(self.sizes["x"])
        return f"({', '.join(cuts)},)"

    @property
    def suffix(self) -> str:
        """What tells the knobs of this step from those of others."""
        return f"_{self.name.rsplit('_', 1)[1]}"

    def knob(self, name: str) -> str:
        """CONFIG's value for a block or the warps of this step."""
        return f'CONFIG["{name}{self.suffix}"]'

    def tunables(self) -> dict[str, tuple[list[int], int]]:
        """Knobs of this step: their values, and the one to begin with."""
        found = {f"{block}{self.suffix}": self._values(block) for block in self.blocks}
        elements = 8 if "r" in self.sizes else 4
        return {**found, f"num_warps{self.suffix}": ([1, 2, 4, 8, 16], elements)}

    def _values(self, block: str) -> tuple[list[int], int]:
        flat = "y" not in self.sizes and "r" not in self.sizes
        first = {"XBLOCK": 512 if flat else 1 if "r" in self.sizes else 32, "YBLOCK": 32, "R0_BLOCK": 2048}[block]
        values = [2**power for power in range(13) if 2**power <= MOST_IN_BLOCK[block]]
        least = 64 if flat or block == "R0_BLOCK" else 1 if "r" in self.sizes else 8
        most = MOST_IN_BLOCK[block] if flat or block == "R0_BLOCK" else 16 if "r" in self.sizes else 128
        return [value for value in values if least <= value <= most], first


def starter_text(op: str, gm: GraphModule, examples: Sequence[Tensor], *, about: str, layouts: str) -> str:
    """A kernel.py for the region that `gm` computes from tensors like `examples`, on a GPU (or fakes of such).

    Args:
        about: where the region is from; `layouts` of its inputs and its result, both for people.

    Raises: NotGenerated.
    """
    wrapper = generated(gm, examples, SETTINGS)
    steps = {name: _step(f"step_{i}", text) for i, (name, text) in enumerate(_KERNEL.findall(wrapper))}
    if not steps:
        raise NotGenerated("Inductor generates no Triton for it")
    names = [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]

    def launch(line: str) -> str | None:
        found = _RUN.fullmatch(line)
        if not found or found[1] not in steps:
            return None
        step = steps[found[1]]
        knobs = ", ".join(f"{name}={step.knob(name)}" for name in (*step.blocks, "num_warps"))
        return f"{step.name}[{step.grid}]({found[2]}, {knobs})"

    lines = body_of(wrapper, names, launch, device=f"{names[0]}.device")
    kernels = "\n\n\n".join(step.text for step in steps.values())
    knobs = {name: value for step in steps.values() for name, value in step.tunables().items()}
    return _TEMPLATE.format(
        op=op,
        about=about,
        layouts=layouts,
        tunables="\n".join(f'    "{name}": {values},' for name, (values, _) in knobs.items()),
        config=", ".join(f'"{name}": {first}' for name, (_, first) in knobs.items()),
        imports="".join(f"{line}\n" for name, line in HELPERS.items() if f"{name}." in kernels),
        kernels=kernels,
        arguments=", ".join(names),
        first=names[0],
        body="\n".join(f"        {line}" for line in lines),
    )


def _step(name: str, text: str) -> Step:
    """Raises: NotGenerated for a kernel of a kind that is not known here."""
    kind, grid, head = _KIND.search(text), _GRID.search(text), _DEF.search(text)
    if not (kind and grid and head) or kind[1] not in ("pointwise", "reduction", "persistent_reduction"):
        raise NotGenerated(f"Inductor's kernel is of a kind that is not known here: {kind[1] if kind else 'none'}")
    if grid[1] not in ("Grid1D", "Grid2D"):
        raise NotGenerated(f"Inductor launches its kernel by a grid that is not known here: {grid[1]}")
    code = text[text.index("@triton.jit") :].rstrip().replace(f"def {head[1]}(", f"def {name}(")
    arguments = [part.split(":")[0].strip() for part in head[2].split(",")]
    blocks = tuple(argument for argument in arguments if argument.endswith("BLOCK"))
    if not set(blocks) <= set(MOST_IN_BLOCK):
        raise NotGenerated(f"Inductor's kernel has blocks that are not known here: {', '.join(blocks)}")
    return Step(name=name, text=code, sizes={dim: int(n) for dim, n in _NUMEL.findall(text)}, blocks=blocks)


_TEMPLATE = '''"""A captured subgraph of {about}.

{layouts}

The kernels are those that PyTorch's Inductor generates for it, for exactly these shapes; the knobs are what its
autotuner chooses. So a run starts about level with torch.compile.
"""

import torch
import triton
import triton.language as tl
{imports}
from autokernel.target import on_device

KERNEL_TYPE = "{op}"
BACKEND = "triton"
TUNABLES = {{
{tunables}
}}
CONFIG = {{{config}}}


{kernels}


def kernel_fn({arguments}):
    """The subgraph's result; for inputs of the layouts above only."""
    with on_device({first}):
{body}
'''
