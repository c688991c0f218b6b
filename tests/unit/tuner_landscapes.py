"""Latencies of imagined kernels as functions of their configuration, in the shape that real ones have.

Products of tiles against a fixed amount of shared memory and registers, waves over multiprocessors, latency hidden by
stages and by blocks side by side. None is a configuration that does not run.
"""

import math
import random
from dataclasses import dataclass, field

from autokernel.tuner.knobs import knob_of
from autokernel.tuner.space import Space
from autokernel.tuner.trials import Provider, Status, Trial

SMS = 132
SHARED = 232448


@dataclass(frozen=True)
class Landscape:
    name: str
    tunables: dict
    latency: object
    space: Space = field(init=False)
    table: dict = field(init=False)

    def __post_init__(self):
        knobs = tuple(knob_of(name, values) for name, values in self.tunables.items())
        space = Space(knobs=knobs, config={name: values[0] for name, values in self.tunables.items()})
        object.__setattr__(self, "space", space)
        object.__setattr__(self, "table", {p: self.latency(**space.config_at(p)) for p in space.points()})

    @property
    def best(self):
        return min(latency for latency in self.table.values() if latency is not None)


def matmul(BLOCK_M, BLOCK_N, BLOCK_K, WARPS, STAGES):
    """4096 cubed, 16 bit: many configurations need more shared memory or registers than there are."""
    shared = max((BLOCK_M + BLOCK_N) * BLOCK_K * 2 * STAGES, BLOCK_M * BLOCK_N * 2) + 1024
    sums = BLOCK_M * BLOCK_N / (WARPS * 32)
    if shared > SHARED or sums > 512:
        return None
    registers = sums + (BLOCK_M + BLOCK_N) * BLOCK_K / (WARPS * 128) + 40
    blocks = max(1, min(SHARED // shared, int(65536 // (min(registers, 255) * 32 * WARPS)), 64 // WARPS))
    tiles = math.ceil(4096 / BLOCK_M) * math.ceil(4096 / BLOCK_N)
    waves = math.ceil(tiles / (SMS * blocks))
    rate = (
        min(1, BLOCK_M / 64) ** 0.5 * min(1, BLOCK_N / 128) ** 0.4 * (1 if BLOCK_M * BLOCK_N // WARPS >= 2048 else 0.8)
    )
    compute = BLOCK_M * BLOCK_N * BLOCK_K * 2 / 7.5e6 / rate
    memory = (BLOCK_M + BLOCK_N) * BLOCK_K * 2 / 95e3
    exposed = max(0.0, 1 - 0.33 * (STAGES - 1) - 0.12 * blocks)
    step = blocks * (max(compute, memory) + exposed * min(compute, memory)) + 0.02
    return waves * (step * 4096 / BLOCK_K + 1.5) * (1 + 0.02 * max(0.0, registers - 255) ** 0.7)


def rows(BLOCK, WARPS, ROWS, STAGES, PERSISTENT):
    """A reduction over 8192 rows of 4096: bytes in flight against blocks that fit, rows in one step or several."""
    each = BLOCK * ROWS / (WARPS * 32)
    if each > 1024 or (STAGES > 1 and BLOCK * ROWS * 2 * STAGES > SHARED):
        return None
    registers = 32 + 1.3 * each + (16 if PERSISTENT else 0)
    blocks = max(1, min(64 // WARPS, int(65536 // (min(registers, 255) * 32 * WARPS)), 32))
    flight = blocks * WARPS * 32 * min(each, 32) * 2 * (1 + 0.5 * (STAGES - 1) * PERSISTENT)
    bandwidth = 4e6 * min(1, flight / 44000) ** 0.8 * min(1, BLOCK / (WARPS * 256)) ** 0.5
    steps = math.ceil(4096 / BLOCK)
    waves = 8192 / ROWS / (SMS * blocks)
    full = 0.985 if PERSISTENT else waves / math.ceil(waves)
    passes = 2 if steps == 1 else 3
    moved = 8192 * 4096 * 2 * passes * max(1.0, BLOCK / 4096) ** 0.5
    return moved / bandwidth / full + waves * (0.1 if PERSISTENT else 0.35) + 2 + 0.5 * max(0.0, registers - 255) ** 0.6


def attention(BLOCK_M, BLOCK_N, WARPS, STAGES, ORDER):
    """Tiles of queries against keys: registers and warps interact, an order of tiles matters a little."""
    shared = (BLOCK_M * 128 + 2 * STAGES * BLOCK_N * 128) * 2
    registers = BLOCK_M * (128 + BLOCK_N) / (WARPS * 32) + 60
    if shared > SHARED or registers > 600:
        return None
    blocks = max(1, min(SHARED // shared, int(65536 // (min(registers, 255) * 32 * WARPS))))
    rate = min(1, BLOCK_M / 128) ** 0.45 * min(1, BLOCK_N / 64) ** 0.35
    rate *= {2: 0.6, 4: 0.9 if BLOCK_M >= 128 else 1.0, 8: 1.0 if BLOCK_M >= 128 else 0.65, 16: 0.6}[WARPS]
    hidden = 1 / (1 + 0.55 * (STAGES - 1) + 0.3 * (blocks - 1))
    order = {"plain": 1.0, "heavy": 0.93, "snake": 0.95}[ORDER]
    return 700 / rate * (1.25 + 0.5 * hidden) * order * (1 + 0.012 * max(0.0, registers - 255) ** 0.8)


def entropy(THREADS, PACKS, AHEAD, RESIDENT, LOAD):
    """A CUDA kernel whose compiler is told how many threads to make room for; nothing fails, much spills."""
    registers = 34 + 4 * PACKS * (2.6 if AHEAD else 1.3)
    room = 65536 / RESIDENT
    blocks = max(1, int(min(RESIDENT, 65536 // min(registers, room)) // THREADS))
    flight = blocks * THREADS * PACKS * 16 * (1.7 if AHEAD else 1)
    bandwidth = 4e6 * min(1, flight / 50000) ** 0.7 * (1, 1.03, 1.05, 0.97)[LOAD]
    size = 100514
    waste = math.ceil(size / (THREADS * PACKS * 16)) * THREADS * PACKS * 16 / size
    return 8192 * size / bandwidth * waste**0.6 * (1 + 0.03 * max(0.0, registers - room)) + 8 * math.log2(THREADS)


def interaction(A, B, C, D):
    """Two narrow valleys that cross the knobs' axes: no knob can be set by itself."""
    a, b, c, d = (math.log2(value) for value in (A, B, C, D))
    near = abs(a + b - 9) + 0.6 * abs(c - a / 2) + 0.3 * abs(d - 2)
    return 50 * (1 + 0.25 * near + 0.1 * (b > 6))


def plateau(UNROLL, TILE, WARPS, VECTOR, CACHE):
    """Bound by memory: whole regions are equally fast, only mistakes cost; noise is as large as most differences."""
    each = TILE / (WARPS * 32)
    lost = 1 + 0.35 * max(0, 3 - math.log2(each * UNROLL)) + 0.15 * max(0, math.log2(each * UNROLL) - 6)
    return 100 * max(0.88, lost + {1: 0.4, 2: 0.2, 4: 0.08, 8: 0.0}[VECTOR] - 0.12 * (CACHE == "stream"))


LANDSCAPES = [
    Landscape(
        "matmul",
        {
            "BLOCK_M": [16, 32, 64, 128, 256],
            "BLOCK_N": [16, 32, 64, 128, 256],
            "BLOCK_K": [32, 64, 128],
            "WARPS": [2, 4, 8],
            "STAGES": [1, 2, 3, 4, 5],
        },
        matmul,
    ),
    Landscape(
        "rows",
        {
            "BLOCK": [256, 512, 1024, 2048, 4096, 8192],
            "WARPS": [1, 2, 4, 8, 16, 32],
            "ROWS": [1, 2, 4, 8],
            "STAGES": [1, 2, 3, 4],
            "PERSISTENT": [False, True],
        },
        rows,
    ),
    Landscape(
        "attention",
        {
            "BLOCK_M": [16, 32, 64, 128, 256],
            "BLOCK_N": [16, 32, 64, 128, 256],
            "WARPS": [2, 4, 8, 16],
            "STAGES": [1, 2, 3, 4],
            "ORDER": ["plain", "heavy", "snake"],
        },
        attention,
    ),
    Landscape(
        "entropy",
        {
            "THREADS": [32, 64, 128, 256, 512, 1024],
            "PACKS": [1, 2, 4, 8],
            "AHEAD": [0, 1],
            "RESIDENT": [512, 1024, 1536, 2048],
            "LOAD": [0, 1, 2, 3],
        },
        entropy,
    ),
    Landscape(
        "interaction",
        {
            "A": [4, 8, 16, 32, 64, 128, 256],
            "B": [4, 8, 16, 32, 64, 128],
            "C": [1, 2, 4, 8, 16],
            "D": [1, 2, 4, 8],
        },
        interaction,
    ),
    Landscape(
        "plateau",
        {
            "UNROLL": [1, 2, 4],
            "TILE": [256, 512, 1024, 2048, 4096, 8192],
            "WARPS": [1, 2, 4, 8, 16],
            "VECTOR": [1, 2, 4, 8],
            "CACHE": ["plain", "keep", "stream"],
        },
        plateau,
    ),
]


class Table(Provider):
    """Reads a landscape with noise that depends on the point alone, so that a search that is resumed sees the same."""

    def __init__(self, landscape, *, seed=0, noise=0.01):
        self.landscape, self.seed, self.noise = landscape, seed, noise
        self.asked, self.batches = [], []

    def measure(self, points):
        self.batches.append(list(points))
        self.asked += points
        return [self._trial(point) for point in points]

    def reading(self, point, turn=0):
        return self.landscape.table[point] * math.exp(random.Random(f"{self.seed}/{point}/{turn}").gauss(0, self.noise))

    def _trial(self, point):
        if self.landscape.table[point] is None:
            return Trial(point=point, status=Status.LAUNCH_ERROR, error="out of resource: shared memory")
        return Trial(point=point, status=Status.OK, latency_us=self.reading(point), timing_s=0.1, compile_s=1.0)
