"""What the heuristics read from IR, know of knobs by their names, and predict: no torch, no compiler."""

import dataclasses

import pytest

from autokernel import gpus
from autokernel.records import Case, TensorMeta
from autokernel.tuner import costmodel, preferences, ttir
from autokernel.tuner.architectures import ARCHITECTURES, Product
from autokernel.tuner.costmodel import Device, estimate
from autokernel.tuner.heuristics import FEATURES, Heuristics
from autokernel.tuner.kinds import Kind, Work, work_of
from autokernel.tuner.knobs import knob_of
from autokernel.tuner.roles import Role, role_of
from autokernel.tuner.space import Space
from autokernel.tuner.studies import Facts, representative

ATTENTION = """
module {
  tt.func public @walk(%q: !tt.ptr<bf16>, %k: !tt.ptr<bf16>, %out: !tt.ptr<bf16>, %N: i32) {
    %zero = arith.constant dense<0.000000e+00> : tensor<64x32xf32>
    %start = arith.constant dense<0.000000e+00> : tensor<64x128xf32>
    %c0 = arith.constant 0 : i32
    %c32 = arith.constant 32 : i32
    %c64_i32 = arith.constant 64 : i32
    %pid = tt.get_program_id x : i32
    %row = arith.addi %pid, %c0 : i32
    %rows = arith.muli %row, %c64_i32 : i32
    %more = arith.addi %rows, %c64_i32 : i32
    %last = arith.minsi %more, %N : i32
    %qp = tt.splat %q : !tt.ptr<bf16> -> tensor<64x128x!tt.ptr<bf16>>
    %held = tt.load %qp : tensor<64x128x!tt.ptr<bf16>>
    %kp = tt.splat %k : !tt.ptr<bf16> -> tensor<32x128x!tt.ptr<bf16>>
    %acc:2 = scf.for %i = %c0 to %last step %c32 iter_args(%sum = %start, %at = %kp) -> (SUMS, KEYS)  : i32 {
      %keys = tt.load %at : tensor<32x128x!tt.ptr<bf16>>
      %turned = tt.trans %keys {order = array<i32: 1, 0>} : tensor<32x128xbf16> -> tensor<128x32xbf16>
      %scores = tt.dot %held, %turned, %zero : tensor<64x128xbf16> * tensor<128x32xbf16> -> tensor<64x32xf32>
      %top = "tt.reduce"(%scores) <{axis = 1 : i32}> ({
      ^bb0(%a: f32, %b: f32):
        %m = arith.maxnumf %a, %b : f32
        tt.reduce.return %m : f32
      }) : (tensor<64x32xf32>) -> tensor<64xf32>
      %wide = tt.expand_dims %top {axis = 1 : i32} : tensor<64xf32> -> tensor<64x1xf32>
      %same = tt.broadcast %wide : tensor<64x1xf32> -> tensor<64x32xf32>
      %less = arith.subf %scores, %same : tensor<64x32xf32>
      %weights = math.exp2 %less : tensor<64x32xf32>
      %short = arith.truncf %weights : tensor<64x32xf32> to tensor<64x32xbf16>
      %next = tt.dot %short, %keys, %sum : tensor<64x32xbf16> * tensor<32x128xbf16> -> tensor<64x128xf32>
      %moved = tt.addptr %at, %at : tensor<32x128x!tt.ptr<bf16>>, tensor<32x128xi32>
      scf.yield %next, %moved : tensor<64x128xf32>, tensor<32x128x!tt.ptr<bf16>>
    } {tt.num_stages = 3 : i32}
    %y = arith.truncf %acc#0 : tensor<64x128xf32> to tensor<64x128xbf16>
    %op = tt.splat %out : !tt.ptr<bf16> -> tensor<64x128x!tt.ptr<bf16>>
    tt.store %op, %y : tensor<64x128x!tt.ptr<bf16>>
    tt.return
  }
}
""".replace("SUMS", "tensor<64x128xf32>").replace("KEYS", "tensor<32x128x!tt.ptr<bf16>>")


@pytest.fixture(scope="module")
def work():
    return work_of(ATTENTION, (16,), ("N=1024", "other=tensor"))


def test_ir_is_read_with_types_and_loops():
    program = ttir.read(ATTENTION)
    (loop,) = program.loops
    assert (loop.bounds, loop.stages, loop.outer) == (("%c0", "%last", "%c32"), 3, None)
    assert loop.carried == (("%sum", "%start"), ("%at", "%kp"))
    load = next(op for op in program.ops if op.results == ("%keys",))
    assert (load.loop, load.types[0].sides, load.types[0].nbytes) == (0, (32, 128), 8192)
    reduce = next(op for op in program.ops if op.name == "tt.reduce")
    assert (reduce.operand_types[0].sides, reduce.types[0].sides) == ((64, 32), (64,))
    assert not any(op.name == "arith.maxnumf" for op in program.ops), "what is in a reduction is no operation on tiles"
    assert program.ops[-2].name == "tt.store"
    assert program.ops[-2].loop is None


def test_work_of_a_program(work):
    assert work.kind is Kind.MIXED
    assert work.programs == 16
    assert 10 < work.iterations < 24, "under a causal mask programs have 2, 4 ... 32 iterations: 17 on average"
    assert work.flops == 2 * (64 * 32 * 128) * 2 * work.iterations
    assert work.special == 64 * 32 * work.iterations
    assert work.reductions == work.iterations
    assert work.ring_bytes == 32 * 128 * 2
    assert work.resident_bytes == 64 * 128 * 2
    assert work.left_bytes == 64 * 32 * 2
    assert work.store_bytes == 64 * 128 * 2
    assert work.dot == (64, 32, 128)
    assert work.load_bytes == work.resident_bytes + work.iterations * work.ring_bytes


def test_values_live_from_their_making_to_their_last_use(work):
    held, sums, scores = 64 * 128 * 2, 64 * 128 * 4, 64 * 32 * 4
    row_tops = 64 * 4
    assert work.live_bytes == held + sums + scores + row_tops


def test_work_survives_json(work):
    assert Work.from_json(dataclasses.asdict(work)) == work
    with pytest.raises((KeyError, ValueError, TypeError)):
        Work.from_json({**dataclasses.asdict(work), "kind": "nonsense"})
    with pytest.raises((KeyError, ValueError, TypeError)):
        Work.from_json({"kind": "matmul"})


@pytest.mark.parametrize(
    ("name", "values", "role"),
    [
        ("BLOCK_M", [32, 64], Role.TILE),
        ("BLOCK", [256, 512], Role.TILE),
        ("BQ", [16, 32], Role.TILE),
        ("BK", [16, 32], Role.TILE),
        ("ROWS", [1, 2], Role.TILE),
        ("TILE", [2048, 4096], Role.TILE),
        ("num_warps", [4, 8], Role.WARPS),
        ("WARPS", [0, 4, 8], Role.WARPS),
        ("num_stages", [1, 2], Role.STAGES),
        ("STAGES", [1, 2], Role.STAGES),
        ("GROUP_M", [1, 8], Role.GROUP),
        ("GROUP", [4, 8], Role.GROUP),
        ("SPLIT_K", [1, 2], Role.SPLIT),
        ("SPLITS", [1, 2], Role.SPLIT),
        ("THREADS", [128, 256], Role.THREADS),
        ("UNROLL", [1, 2], Role.UNROLL),
        ("VEC", [1, 2], Role.VECTOR),
        ("PERSISTENT", [0, 1], Role.FLAG),
        ("WRITE", ["", ".cs"], Role.OTHER),
        ("TILE", ["auto", "64x64"], Role.OTHER),
        ("FLATTEN", [False, True], Role.FLAG),
        ("NOVEL", [1, 2, 3], Role.OTHER),
    ],
)
def test_role_is_told_by_the_name(name, values, role):
    assert role_of(knob_of(name, values)) is role


@pytest.fixture(scope="module", params=["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
def device(request):
    return Device.of(representative(request.param))


def product(rows=128, columns=128, depth=64, size=4096):
    steps = size // depth
    ring = (rows + columns) * depth * 2.0
    return Work(
        kind=Kind.MATMUL, programs=(size // rows) * (size // columns), flops=2.0 * rows * columns * size, special=0.0,
        arithmetic=rows * columns, reductions=0.0, load_bytes=ring * steps, store_bytes=rows * columns * 2.0,
        iteration_bytes=ring, iterations=steps, ring_bytes=ring, streamed_bytes=0.0, loop_stages=1, resident_bytes=0.0,
        scratch_bytes=rows * columns * 2.0, loop_scratch_bytes=0.0, left_bytes=0.0, live_bytes=rows * columns * 4.0,
        accumulator_bytes=rows * columns * 4.0, elements=rows * columns, row_bytes=0.0, by_descriptor=False,
        dot=(rows, columns, depth),
    )  # fmt: skip


def test_every_architecture_of_the_table_has_limits():
    assert all(gpus.limits(arch) for arch in ARCHITECTURES)
    assert {gpu.arch for gpu in gpus.table()} <= set(ARCHITECTURES)


def test_more_stages_take_more_shared_memory_until_they_do_not_fit(device):
    sizes = [estimate(product(), 4, stages, device) for stages in range(1, 40)]
    taken = [each.shared_bytes for each in sizes]
    assert taken == sorted(taken)
    assert not sizes[-1].fits
    for each in sizes:
        assert each.fits == (each.shared_bytes <= device.limits.shared_bytes_per_block)


def test_bound_is_never_below_what_is_usual(device):
    for shape in [(32, 64, 32), (128, 128, 64), (64, 256, 32)]:
        for stages in (1, 2, 4):
            most = costmodel.shared_bytes(product(*shape), 4, stages, device.architecture.product)
            usual = costmodel.shared_bytes(product(*shape), 4, stages, device.architecture.product, bound=False)
            assert most >= usual


def test_more_warps_relieve_registers(device):
    pressures = [estimate(product(128, 256), warps, 2, device).pressure for warps in (2, 4, 8)]
    assert pressures == sorted(pressures, reverse=True)
    assert pressures[0] > 1
    assert "spilled registers" in estimate(product(128, 256), 2, 2, device).parts


def test_a_tile_for_tensor_cores_beats_a_naive_one(device):
    good = min(estimate(product(128, 128, 32), 4, stages, device).us for stages in (2, 3))
    naive = estimate(product(32, 32, 32), 4, 1, device)
    assert naive.us > 2 * good


def test_operands_are_read_from_shared_memory_by_four_warps_and_64_rows():
    assert costmodel.buffers(product(64), 4, 3, Product.WGMMA) == 3
    assert costmodel.buffers(product(32), 4, 3, Product.WGMMA) == 2
    assert costmodel.buffers(product(64), 2, 3, Product.WGMMA) == 2
    assert costmodel.buffers(product(64), 4, 3, Product.MMA) == 2
    assert costmodel.buffers(product(64), 4, 1, Product.MMA) == 1


def test_time_is_no_less_than_the_roofline(device):
    each = estimate(product(), 4, 2, device)
    flops_us = 2 * 4096**3 / (device.gpu.peak_tflops["bf16"] * 1e6)
    assert flops_us < each.us < 20 * flops_us
    assert 0 < each.wave_efficiency <= 1
    assert 0 < each.occupancy <= 1


CUDA = """
KERNEL_TYPE = "rmsnorm"
BACKEND = "cuda"
TUNABLES = {"THREADS": [32, 128, 256, 1024], "VEC": [1, 2, 4, 8], "UNROLL": [1, 2, 4], "ROWS": [1, 4], "STREAM": [0, 1]}
CONFIG = {"THREADS": 32, "VEC": 1, "UNROLL": 1, "ROWS": 4, "STREAM": 1}
CONSTRAINTS = ["THREADS * VEC <= 2048"]
def kernel_fn(x): ...
"""


@pytest.fixture
def unstudied():
    space = Space.read(CUDA)
    shapes = {"x": (8192, 4096), "weight": (4096,)}
    tensors = {name: TensorMeta(shape=shape, dtype="bf16") for name, shape in shapes.items()}
    case = Case(op="rmsnorm", name="rows", dtype="bf16", tensors=tensors)
    return Facts(
        space=space, case=case, device=Device.of(representative("sm_90")), kind=Kind.REDUCTION,
        base=space.locate(space.config), shaping=(), studies={}, failures={},
    )  # fmt: skip


def test_without_a_study_usual_amounts_by_role_are_the_default(unstudied):
    advice = Heuristics(unstudied)
    config = advice.space.config_at(advice.default())
    assert config == {"THREADS": 256, "VEC": 8, "UNROLL": 2, "ROWS": 1, "STREAM": 1}
    seeds = advice.seeds(10)
    assert len(seeds) == len(set(seeds)) == 10
    assert all(advice.space.allowed(point) for point in seeds)
    assert all(advice.space.config_at(point)["STREAM"] == 1 for point in seeds)
    assert advice.features(seeds[0]) == (0.0,) * len(FEATURES)
    assert any("THREADS" in line for line in advice.explain(seeds[0]))


def test_vector_width_follows_the_dtype(unstudied):
    wide = dataclasses.replace(unstudied, case=unstudied.case.with_dtype("fp32"))
    point = Heuristics(wide).default()
    assert unstudied.space.config_at(point)["VEC"] == 4
    assert preferences.distance(wide, point) == pytest.approx(min(preferences.distance(wide, p) for p in
                                                                  Heuristics(wide).ranked))  # fmt: skip
