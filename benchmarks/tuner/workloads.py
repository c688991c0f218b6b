"""The kernels and shapes whose whole grids are recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from autokernel.kernelfile import parse_kernel
from autokernel.loading import toplevel
from autokernel.records import Case
from autokernel.spec import build_case, retype
from autokernel.tuner.space import Space

KERNELS = Path(__file__).resolve().parent / "kernels"

CPP_KNOBS = ("VEC", "UNROLL", "ROWS", "STREAM", "CACHE_ROW", "OPT")
"""Of the C++ starter, whose whole grid would have tens of thousands of points; the others stay as in its CONFIG."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One table: a kernel.py, one case, and the knobs that make the grid (all that it has, when `knobs` is empty)."""

    name: str
    path: Path
    case: Case
    device: str = "cuda"
    knobs: tuple[str, ...] = ()

    @property
    def binaries(self) -> tuple[object, ...]:
        """What decides how a grid compiles: one table may use the binaries of another with the same.

        Sizes do not, as far as they are multiples of 16 in both or in neither; a head_dim is part of the kernel.
        """
        ranks = tuple(len(meta.shape) for meta in self.case.tensors.values())
        head_dim = self.case.tensors["q"].shape[-1] if "q" in self.case.tensors else None
        return self.path, self.case.dtype, self.knobs, ranks, head_dim


def grid_of(workload: Workload) -> Space:
    """The space of a workload's grid, read from its kernel.py's literals."""
    parsed = parse_kernel(workload.path.read_text())
    chosen = {name: parsed.tunables[name] for name in workload.knobs or parsed.tunables}
    return Space.of(replace(parsed, tunables=chosen))


def _ours(name: str, kernel: str, case: Case) -> Workload:
    return Workload(name=name, path=KERNELS / f"{kernel}.py", case=case)


def _matmul(m: int, n: int, k: int) -> Case:
    return build_case("matmul", "", "bf16", a=(m, k), b=(k, n))


def _attention(*shape: int) -> Case:
    return build_case("flash_attention", "", "bf16", scalars={"causal": True}, q=shape, k=shape, v=shape)


def _cross_entropy(rows: int, classes: int) -> Case:
    scalars = {"reduction": "none"}
    case = build_case("cross_entropy", "", "bf16", scalars=scalars, logits=(rows, classes), targets=(rows,))
    return retype(case, targets="int64")


def _norm(op: str, rows: int, cols: int, **more: tuple[int, ...]) -> Case:
    return build_case(op, "", "bf16", x=(rows, cols), weight=(cols,), **more)


def _workloads() -> list[Workload]:
    x, angles, weight = (2, 32, 4096, 128), (4096, 64), (4096, 4096)
    mlp = build_case("fused_mlp", "", "bf16", x=(1024, 4096), w_gate=weight, w_up=weight, w_down=weight)
    return [
        _ours("rotary", "rotary_embedding", build_case("rotary_embedding", "", "bf16", x=x, cos=angles, sin=angles)),
        _ours("softmax", "softmax", build_case("softmax", "", "bf16", x=(8192, 8192))),
        _ours("matmul_4096", "matmul", _matmul(4096, 4096, 4096)),
        _ours("matmul_2048", "matmul", _matmul(2048, 2048, 2048)),
        _ours("matmul_skinny", "matmul_skinny", _matmul(16, 4096, 14336)),
        _ours("layernorm", "layernorm", _norm("layernorm", 8192, 4096, bias=(4096,))),
        _ours("cross_entropy", "cross_entropy", _cross_entropy(8192, 50257)),
        _ours("attention_64", "flash_attention", _attention(4, 16, 2048, 64)),
        _ours("spilling_mlp", "fused_mlp", mlp),
        _ours("rmsnorm_cuda", "rmsnorm_cuda", _norm("rmsnorm", 8192, 4096)),
        Workload(
            name="attention_128",
            path=KERNELS / "flash_attention.py",
            case=_attention(2, 16, 4096, 128),
            knobs=("BLOCK_M", "BLOCK_N", "DIAGONAL", "num_warps", "num_stages"),
        ),
        Workload(
            name="rmsnorm_cpp",
            path=toplevel("kernels") / "cpp" / "rmsnorm.py",
            case=_norm("rmsnorm", 512, 4096),
            device="cpu",
            knobs=CPP_KNOBS,
        ),
    ]


WORKLOADS = {workload.name: workload for workload in _workloads()}
