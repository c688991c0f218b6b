"""What the heuristics know of one kernel: its space, its case, the GPU, and the work of each choice of tiles.

Triton kernels are studied through their IR: once for each combination of the knobs that change it, in the children that
also compile. Warps and stages do not change the IR, so that a few dozen studies cover thousands of configurations.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autokernel import gpus
from autokernel.errors import ConfigError
from autokernel.gpus import Gpu
from autokernel.kernelfile import parse_kernel, with_config
from autokernel.records import Case
from autokernel.tuner.costmodel import Device
from autokernel.tuner.kinds import Kind, Launch
from autokernel.tuner.knobs import Knob
from autokernel.tuner.roles import Role, is_left_to_kernel, role_of
from autokernel.tuner.space import Point, Space

if TYPE_CHECKING:
    from autokernel.tuner.compiling import Compiler

MOST_STUDIES = 96
"""Combinations that are looked at: 50 ms each. Of larger spaces a sample is, which the search then goes beyond."""

ITEM_BYTES = {"fp64": 8, "fp32": 4, "int64": 8, "int32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "bool": 1}
WORD_BYTES = 4

SHAPING = (Role.TILE, Role.SPLIT, Role.UNROLL, Role.VECTOR, Role.THREADS, Role.FLAG)
"""Roles of knobs that change the IR."""

KIND_OF_OP: Mapping[str, Kind] = {
    "matmul": Kind.MATMUL,
    "fused_mlp": Kind.MATMUL,
    "flash_attention": Kind.MIXED,
    "masked_attention": Kind.MIXED,
    "softmax": Kind.REDUCTION,
    "layernorm": Kind.REDUCTION,
    "rmsnorm": Kind.REDUCTION,
    "cross_entropy": Kind.REDUCTION,
    "reduce": Kind.REDUCTION,
    "rotary_embedding": Kind.POINTWISE,
}
"""For kernels whose IR cannot be read: CUDA and C++."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`studies` maps the choice of the shaping knobs, by their numbers in `shaping`, to the launches that it makes.

    They were studied at `base`; `device` is None where the GPU is not known well enough, `kind` where nothing is.
    """

    space: Space
    backend: str
    case: Case
    device: Device | None
    kind: Kind | None
    base: Point
    shaping: tuple[int, ...]
    studies: Mapping[Point, tuple[Launch, ...]]
    failures: Mapping[Point, str]
    roles: tuple[Role, ...] = field(init=False)
    """Of the knobs of `space`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", tuple(map(role_of, self.space.knobs)))

    @property
    def input_bytes(self) -> float:
        """Bytes of the case's tensors."""
        return sum(meta.numel * ITEM_BYTES.get(meta.dtype, WORD_BYTES) for meta in self.case.tensors.values())

    def launches(self, point: Point) -> tuple[Launch, ...] | None:
        """The launches of a configuration; None where its tiles were not studied."""
        studied = self.studies.get(tuple(point[k] for k in self.shaping))
        if studied is None:
            return None
        return tuple(self._at(launch, point) for launch in studied)

    def _at(self, launch: Launch, point: Point) -> Launch:
        """`launch` with the warps and stages of `point`, if it took those of the knobs where it was studied."""
        chosen = {Role.WARPS: launch.warps, Role.STAGES: launch.stages}
        loop_stages = launch.work.loop_stages
        for k, role in enumerate(self.roles):
            if role not in chosen:
                continue
            values = self.space.knobs[k].values
            studied, value = values[self.base[k]], values[point[k]]
            assert isinstance(value, int)
            follows = launch.warps if role is Role.WARPS else launch.stages
            if role is Role.STAGES and loop_stages > 1 and loop_stages == studied:
                loop_stages = value
            if follows == studied or (role is Role.STAGES and loop_stages == value):
                chosen[role] = value
        work = replace(launch.work, loop_stages=loop_stages)
        return replace(launch, warps=chosen[Role.WARPS], stages=chosen[Role.STAGES], work=work)


def representative(arch: str) -> Gpu | None:
    """The first GPU of the table with an architecture: what a kernel is tuned for when only that is named."""
    return next((gpu for gpu in gpus.table() if gpu.arch == arch), None)


def gather(text: str, case: Case, compiler: Compiler, gpu: Gpu | None = None) -> Facts:
    """The facts of a kernel text for a case on `gpu`, or on a usual one of the compiler's target.

    Raises: ConfigError for a text without knobs to choose; WorkerError.
    """
    space = Space.read(text)
    base = space.locate(space.config)
    if not space.knobs or base is None:
        raise ConfigError("kernel.py has nothing to tune", hint="list two values of a knob in TUNABLES")
    gpu = gpu or representative(compiler.arch)
    device = Device.of(gpu) if gpu is not None else None
    kernel = parse_kernel(text)
    if kernel.backend != "triton":
        kind = KIND_OF_OP.get(kernel.kernel_type)
        return Facts(
            space=space,
            backend=kernel.backend,
            case=case,
            device=device,
            kind=kind,
            base=base,
            shaping=(),
            studies={},
            failures={},
        )
    base = _with_visible_stages(space, base)
    shaping = tuple(k for k, knob in enumerate(space.knobs) if role_of(knob) in SHAPING and _chosen(space, k, base))
    choices = list(_choices(space, base, shaping))
    texts = [with_config(text, space.config_at(_with(base, shaping, choice))) for choice in choices]
    found = dict(zip(choices, compiler.study(texts, case), strict=True))
    studies = {choice: tuple(study) for choice, study in found.items() if not isinstance(study, str) and study}
    kinds = [launch.work.kind for study in studies.values() for launch in study]
    return Facts(
        space=space,
        backend=kernel.backend,
        case=case,
        device=device,
        kind=_joined(kinds) or KIND_OF_OP.get(kernel.kernel_type),
        base=base,
        shaping=shaping,
        studies=studies,
        failures={choice: study for choice, study in found.items() if isinstance(study, str)},
    )


def _with_visible_stages(space: Space, base: Point) -> Point:
    """CONFIG's point with stages that show in the IR: a loop that names its own has nothing to tell when it is one."""
    for k, knob in enumerate(space.knobs):
        if role_of(knob) is Role.STAGES and knob.values[base[k]] == 1:
            several = [i for i, value in enumerate(knob.values) if isinstance(value, int) and value > 1]
            if several:
                return (*base[:k], several[0], *base[k + 1 :])
    return base


def _chosen(space: Space, k: int, base: Point) -> bool:
    """Whether CONFIG gives knob `k` an amount, or turns it on or off."""
    return role_of(space.knobs[k]) is Role.FLAG or not is_left_to_kernel(space.knobs[k].values[base[k]])


def amounts_of(knob: Knob) -> list[int]:
    """Indices of a knob's values that leave nothing to the kernel."""
    flag = role_of(knob) is Role.FLAG
    return [index for index, value in enumerate(knob.values) if flag or not is_left_to_kernel(value)]


def _with(base: Point, shaping: tuple[int, ...], choice: Point) -> Point:
    point = list(base)
    for k, index in zip(shaping, choice, strict=True):
        point[k] = index
    return tuple(point)


def _choices(space: Space, base: Point, shaping: tuple[int, ...]) -> Iterator[Point]:
    """Combinations of values of the shaping knobs that some allowed configuration has, CONFIG's first."""
    first = tuple(base[k] for k in shaping)
    amounts = [amounts_of(space.knobs[k]) for k in shaping]
    others = [choice for choice in itertools.islice(itertools.product(*amounts), 1 << 16) if choice != first]
    others = [choice for choice in others if _is_allowed(space, base, shaping, choice)]
    if len(others) >= MOST_STUDIES:
        others = random.Random(0).sample(others, MOST_STUDIES - 1)
    yield first
    yield from others


def _is_allowed(space: Space, base: Point, shaping: tuple[int, ...], choice: Point) -> bool:
    """Whether the choice is allowed with some number of warps and stages."""
    point = _with(base, shaping, choice)
    free = [k for k, knob in enumerate(space.knobs) if role_of(knob) in (Role.WARPS, Role.STAGES)]
    return any(
        space.allowed(_with(point, tuple(free), values))
        for values in itertools.product(*(range(len(space.knobs[k].values)) for k in free))
    )


def _joined(kinds: list[Kind]) -> Kind | None:
    """The kind of a kernel that launches several: what its hardest one is."""
    order = (Kind.MIXED, Kind.MATMUL, Kind.REDUCTION, Kind.POINTWISE)
    return next((kind for kind in order if kind in kinds), None)
