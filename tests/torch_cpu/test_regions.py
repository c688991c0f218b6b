"""Captured subgraphs: how graphs are cut, how regions become ops with a first kernel, and how these go back."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from models import HIDDEN, Norm, loaded
from torch import nn

from autokernel import loading
from autokernel.applied import Applied, load_kernel
from autokernel.capture import capture
from autokernel.errors import ConfigError
from autokernel.judge.compare import mismatch
from autokernel.judge.engine import Judge
from autokernel.judge.forkserver import ForkServer
from autokernel.judge.trial import truth_of
from autokernel.loading import REFERENCE, STARTER, get_spec, look_in, starter_path
from autokernel.match import Matcher
from autokernel.outputs import disagreement, expect, output_leaves
from autokernel.plan import Plan, make_plan, true_matches
from autokernel.profiler import ModelProfile
from autokernel.records import Verdict
from autokernel.regions import choose
from autokernel.regions.partition import is_view, partition, region_inputs
from autokernel.regions.spec import ADVERSARIES, Recorded, draw, region_spec
from autokernel.regions.values import recorded
from autokernel.sites import Replacement
from autokernel.spec import describe

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten


class Gated(nn.Module):
    """Two layers of a feed-forward with a gate that no op of ours has, each with a bias and a scale."""

    def __init__(self, width=32, layers=2):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.scale = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(layers))

    def forward(self, x):
        for up, down, scale in zip(self.up, self.down, self.scale, strict=True):
            gate, value = up(x).chunk(2, -1)
            x = x + scale * down(F.gelu(gate, approximate="tanh") * value * torch.sigmoid(value))
        return x


class Calls(nn.Module):
    """A model of one function."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *inputs):
        return self.fn(*inputs)


def graph_of(fn, *inputs):
    (graph,) = capture(loaded(Calls(fn), *inputs))
    return graph.gm


def targets(region):
    return Counter(str(node.target) for node in region.nodes if not is_view(node))


def gated(seed=0):
    torch.manual_seed(seed)
    return loaded(Gated(), torch.randn(4, 24, 32))


def plan_of(item, ops=("graph",)):
    profile = ModelProfile(
        model=item.name,
        device="cpu",
        wall_us=1e5,
        wall_iqr_us=0.0,
        wall_samples=5,
        profiled_us=0.0,
        unattributed_us=0.0,
        ops=(),
    )
    return make_plan(item, profile=profile, ceilings=None, ops=ops)


def write(plan, folder):
    for op, files in plan.files.items():
        (folder / op).mkdir(parents=True)
        for name, text in files.items():
            (folder / op / name).write_text(text)
    look_in(folder)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The plan of `gated()`, and the folder of its regions' files."""
    folder = tmp_path_factory.mktemp("run") / "regions"
    plan = plan_of(gated())
    write(plan, folder)
    return plan, folder


@pytest.fixture
def replacements(planned):
    """The first kernels, with counters at zero; they are built once."""
    plan, folder = planned
    builds = folder.parent / "builds"
    return [
        load_kernel(folder / op.op / STARTER, op=op.op, cases=[c.case for c in op.cases], builds=builds)
        for op in plan.ops
    ]


# --- partition -------------------------------------------------------------------------------------------------------


def test_a_region_ends_at_products_and_has_one_result():
    regions = partition(capture(gated())[0].gm)
    assert [targets(region)["aten.gelu.default"] for region in regions] == [1, 0, 1, 0]
    for region in regions:
        inside = set(region.nodes)
        assert all(user in inside for node in region.nodes[:-1] for user in node.users)
        assert not any("mm" in name for name in targets(region))
        assert region.inputs == region_inputs(region.output, inside)


def test_no_path_leaves_a_region_and_comes_back():
    w = torch.randn(16, 16)
    regions = partition(graph_of(lambda x: (y := torch.sin(x * 2)) + (y @ w).relu(), torch.randn(4, 16)))
    assert [targets(region) for region in regions] == [
        {"aten.mul.Tensor": 1, "aten.sin.default": 1},
        {"aten.relu.default": 1, "aten.add.Tensor": 1},
    ]


def test_random_numbers_and_writes_stay_outside():
    def fn(x, y):
        y.add_(1)
        return torch.sin(F.dropout(x * 2, 0.5, training=True) * 3 + 1) + y

    for region in partition(graph_of(fn, torch.randn(8, 8), torch.randn(8, 8))):
        assert not any(
            torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable
            for node in region.nodes
            if isinstance(node.target, torch._ops.OpOverload)
        )


def test_what_an_op_takes_is_in_no_region():
    (graph,) = capture(loaded(nn.Sequential(Norm(), nn.GELU(), Norm()), torch.randn(4, HIDDEN)))
    taken = {node for match in Matcher(ops=["rmsnorm"]).find(graph.gm) for node in match.nodes if not is_view(node)}
    assert len(taken) > 8
    assert len(partition(graph.gm)) == 1
    assert partition(graph.gm, taken) == []  # what is left is one step


def test_integer_results_single_steps_and_constants_are_no_regions():
    def fn(x):
        mask = torch.arange(8)[:, None] >= torch.arange(8)[None, :]
        return (x > 0).sum(-1) + 1, torch.sin(x), mask.float() * 2

    assert partition(graph_of(fn, torch.randn(8, 8))) == []


def test_the_steps_of_a_scan_are_equal_regions():
    def fn(a, b):
        h = b[:, 0]
        for t in range(1, 6):
            h = torch.sin(a[:, t] * h + b[:, t])
        return h

    regions = choose.Regions(model="scan")
    (graph,) = capture(loaded(Calls(fn), torch.randn(4, 8, 16), torch.randn(4, 8, 16)))
    times = {node.name: 1.0 for node in graph.gm.graph.nodes}
    parts = [[node] for node in graph.gm.graph.nodes if node.target is aten.sin.default]
    regions.add(graph, {part[0] for part in parts}, times)
    counts = {op: found.calls for op, found in regions.found.items()}
    assert list(counts.values()) == [1, 4]  # the first step takes both of its numbers from the inputs


# --- a region as an op -----------------------------------------------------------------------------------------------


def test_equal_layers_are_one_op_with_several_calls(planned):
    plan, _ = planned
    assert sorted(op.op.rsplit("_", 1)[0] for op in plan.ops) == ["graph_add_mul", "graph_gelu_sigmoid"]
    assert [[timed.calls for timed in op.cases] for op in plan.ops] == [[2], [2]]
    assert all(op.share > 0 for op in plan.ops)


def test_a_region_can_be_asked_for_by_its_name(planned):
    plan, _ = planned
    last = plan.ops[-1].op
    assert [op.op for op in plan_of(gated(), ops=(last,)).ops] == [last]
    with pytest.raises(ConfigError, match="none of graph_none occurs"):
        plan_of(gated(), ops=("graph_none",))


def test_the_name_depends_on_shapes_and_literals():
    def name(fn, *inputs):
        (region,) = partition(graph_of(fn, *inputs))
        return choose.Written(region).op

    x = torch.randn(4, 8)
    first = name(lambda x: torch.sin(x * 2) + 1, x)
    assert first == name(lambda x: torch.sin(x * 2) + 1, torch.randn(4, 8))
    others = [(lambda x: torch.sin(x * 3) + 1, x), (lambda x: torch.sin(x * 2) + 1, torch.randn(8, 4))]
    others += [(lambda x: torch.sin(x * 2) + 1, x.double().float().t().contiguous().t())]
    assert len({first, *(name(*other) for other in others)}) == 4


def test_the_oracle_is_what_the_model_computes_and_runs_in_fp64(planned):
    plan, _ = planned
    item = gated()
    (graph,) = capture(item)
    name = next(op.op for op in plan.ops if "gelu" in op.op)
    spec = get_spec(name)
    region = next(r for r in partition(graph.gm) if choose.Written(r).op == name)
    values = choose.values_of(graph.gm, graph.inputs, {*region.inputs, region.output})
    given = [values[node] for node in region.inputs]
    assert torch.equal(spec.oracle(*given), values[region.output])
    wide = spec.oracle(*(value.double() for value in given))
    assert wide.dtype is torch.float64
    torch.testing.assert_close(wide.float(), values[region.output])


def test_casts_inside_the_oracle_do_not_round_in_fp64():
    def captured(x0):
        wide = aten._to_copy.default(x0, dtype=torch.float32)
        return aten._to_copy.default(aten.sin.default(wide), dtype=torch.bfloat16)

    item = Recorded(shape=(64,), dtype="bf16", quantiles=(-2.0, 2.0))
    meta = replace(item.meta, stride=None)
    spec = region_spec("graph_sin", captured, {"x0": item}, result=meta, flops=64)
    x = torch.randn(64).bfloat16()
    assert spec.oracle(x).dtype is torch.bfloat16
    assert torch.equal(spec.oracle(x.double()), torch.sin(x.double()))


def test_another_process_finds_the_op_in_the_run(planned):
    plan, folder = planned
    code = (
        "import sys, json; from pathlib import Path; from autokernel.loading import *\n"
        "look_in(Path(sys.argv[1])); spec = get_spec(sys.argv[2])\n"
        "x = spec.oracle(**spec.make_inputs(spec.cases[0], 1))\n"
        "print(json.dumps([spec.op, list(x.shape), starter_path(spec.op, 'cpp') is not None]))"
    )
    op = plan.ops[0]
    done = subprocess.run([sys.executable, "-c", code, str(folder), op.op], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [op.op, [4, 24, 64 if "gelu" in op.op else 32], True]


def test_an_unknown_subgraph_is_named():
    with pytest.raises(ConfigError, match="unknown op 'graph_none_00000000'"):
        get_spec("graph_none_00000000")
    assert starter_path("graph_none_00000000", "cpp") is None


def test_a_plan_with_regions_survives_the_journal(planned):
    plan, _ = planned
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_other_backends_are_told_why_there_is_no_region():
    item = gated()
    regions = choose.Regions(model="gated")
    (graph,) = capture(item)
    regions.add(graph, (), {node.name: 1.0 for node in graph.gm.graph.nodes})
    assert regions.chosen(10.0, "cuda") == []
    assert all("no first kernel is generated for backend cuda" in note for note in regions.notes)


# --- inputs ----------------------------------------------------------------------------------------------------------


def values_like(tensor, **options):
    item = recorded(tensor, describe(tensor))
    return draw(item, torch.Generator().manual_seed(1), **options).to(tensor.dtype)


def test_inputs_are_drawn_as_they_were_recorded():
    indices = values_like(torch.randint(3, 11, (400,)))
    assert set(indices.tolist()) == set(range(3, 11))
    assert set(values_like(torch.randint(3, 11, (400,)), extreme=True).tolist()) == {3, 10}
    assert set(values_like(torch.tensor([-100, 5, 9] * 50)).tolist()) == {-100, 5, 9}
    skewed = torch.rand(4000).pow(4) + 0.5
    drawn = values_like(skewed)
    assert drawn.min() >= 0.5
    assert abs(drawn.median() - skewed.median()) < 0.05
    ones = values_like(torch.ones(100))
    assert len(set(ones.tolist())) > 50
    assert 0.7 < ones.min() < ones.max() < 1.3
    mask = torch.where(torch.rand(1000) < 0.25, -torch.inf, 0.0)
    assert 150 < values_like(mask).isinf().sum() < 350
    scores = torch.where(torch.rand(1000) < 0.25, -torch.inf, torch.randn(1000))
    assert 150 < values_like(scores).isinf().sum() < 350
    assert set(values_like(torch.ones(400, dtype=torch.bool)).tolist()) == {True, False}


def test_hard_inputs_that_pytorch_gets_wrong_are_left_out():
    regions = choose.Regions(model="exponential")
    (graph,) = capture(loaded(Calls(lambda x: torch.exp(x) / (torch.exp(x) + 1)), torch.randn(64, 64)))
    regions.add(graph, (), {node.name: 1.0 for node in graph.gm.graph.nodes})
    (made,) = regions.chosen(4.0, "cpp")
    assert "large" not in made.spec.adversarial  # infinity over infinity, where fp64 has numbers
    assert {"small", "negated"} < set(made.spec.adversarial) < set(ADVERSARIES)


# --- the first kernel ------------------------------------------------------------------------------------------------


def functions(x, i, m):
    """Operations whose C++ needs something of PyTorch's headers, or of ours."""
    y = torch.log1p(torch.exp(x)) + F.gelu(x) + torch.tanh(x) + F.silu(x) + torch.log(x.abs() + 1)
    y = y.clamp(-3, 3) + (i // 3 + i % 5).float()[..., None] + torch.where(m, x, 0.0)
    return (y - y.amax(-1, keepdim=True)) / (y.var(-1, keepdim=True) + 1e-3).sqrt()


def faults(spec, text, folder):
    """What is wrong with a kernel, by kind of input."""
    (folder / STARTER).write_text(text)
    kernel = load_kernel(folder / STARTER, op=spec.op, cases=spec.cases, builds=folder).kernel_fn
    found = {}
    for name in ("recorded", "extremes", *spec.adversarial):
        inputs = spec.make_inputs(replace(spec.cases[0], name=name), 7)
        if name in spec.adversarial:
            inputs = spec.adversarial[name](inputs, torch.Generator().manual_seed(8))
        truth, meta = truth_of(spec, inputs)
        if reason := mismatch(kernel(*inputs.values()), truth, meta.dtype, spec.tolerances[meta.dtype]):
            found[name] = reason
    return found


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (functions, lambda: (torch.randn(6, 16, 40), torch.randint(0, 99, (6, 16)), torch.rand(6, 16, 40) > 0.4)),
        (lambda x, w: F.silu(F.group_norm(x, 4, w, w)), lambda: (torch.randn(2, 16, 24, 24), torch.randn(16))),
        (lambda x: torch.cat([x[..., 1:] * 2, -x[..., :1]], -1).mT.contiguous(), lambda: (torch.randn(2, 6, 9),)),
        (lambda t, i: F.embedding(i, t) * 3 + 1, lambda: (torch.randn(50, 16), torch.randint(0, 50, (4, 7)))),
        (lambda x: F.gelu(x + 1) * 0.5, lambda: (torch.randn(16, 128).bfloat16(),)),
    ],
    ids=["functions", "group_norm", "cat", "embedding", "bf16"],
)  # fmt: skip
def test_the_first_kernel_is_right_also_on_hard_inputs(fn, inputs, tmp_path):
    torch.manual_seed(0)
    regions = choose.Regions(model="functions")
    (graph,) = capture(loaded(Calls(fn), *inputs(), dtype=torch.float32))
    regions.add(graph, (), {node.name: 1.0 for node in graph.gm.graph.nodes})
    chosen = regions.chosen(1.0, "cpp")
    assert not regions.notes
    (made,) = chosen
    assert faults(made.spec, made.starter, tmp_path) == {}


@pytest.mark.alone
def test_the_first_kernel_passes_the_judge_and_a_wrong_one_does_not(planned, tmp_path):
    plan, _ = planned
    op = next(op for op in plan.ops if "gelu" in op.op)
    spec, text = get_spec(op.op), starter_path(op.op, "cpp").read_text()
    with ForkServer("cpu", builds=tmp_path) as server:
        judge = Judge(server=server, spec=spec, dtypes=spec.dtypes, cases=op.cases, builds=tmp_path / op.op)
        outcome = judge.evaluate(text)
        assert outcome.verdict is Verdict.PASS, outcome.reason
        checked = {stage.stage: stage.cases for stage in outcome.stages}
        assert checked["stability"] == len(spec.adversarial) > 3
        assert checked["edges"] == 2
        wrong = judge.evaluate(text.replace("0.044715", "0.034715"))
        assert (wrong.verdict, wrong.stage) == (Verdict.FAIL, "smoke")
        delegating = text[: text.index("lib = build")] + "def kernel_fn(x0, x1):\n    return x0 * x1\n"
        assert judge.evaluate(delegating).verdict in (Verdict.DELEGATES, Verdict.FAIL)
        baseline, latency_us = judge.baseline(text, compiled=False)  # a child of its own loads the op
        assert baseline.latencies_us["eager"] > 0
        assert latency_us > 0


# --- back into the model ---------------------------------------------------------------------------------------------


def test_the_model_with_first_kernels_agrees_and_counts_calls(replacements):
    item = gated()
    expected = expect(item)
    with Applied(item.model, replacements) as applied:
        assert disagreement(output_leaves(item.model, item), expected) is None
        assert set(applied.calls.values()) == {2}
        assert set(applied.fallbacks.values()) == {0}
        applied.check()
        with torch.no_grad():  # another shape is another graph, of which no kernel knows
            item.model(torch.randn(2, 24, 32))
        assert set(applied.calls.values()) == {2}


def test_a_place_that_is_switched_off_runs_the_fused_bias_as_before(replacements):
    item = gated()
    with torch.no_grad():
        eager = item.model(*item.args)
        with Applied(item.model, replacements):
            for replacement in replacements:
                replacement.enabled = False
            assert torch.equal(item.model(*item.args), eager)  # addmm again, bit by bit
            for replacement in replacements:
                replacement.enabled = True


def with_starters(item, folder):
    """Kernels for all captured subgraphs of a model of one graph."""
    plan = plan_of(item)
    write(plan, folder / "regions")
    cases = {op.op: [timed.case for timed in op.cases] for op in plan.ops}
    return [
        load_kernel(folder / "regions" / op / STARTER, op=op, cases=cases[op], builds=folder / "builds") for op in cases
    ]


def test_a_region_that_ends_in_a_bias_is_not_taken_for_the_product_with_it(tmp_path):
    w, b = torch.randn(16, 16), torch.randn(16)
    item = loaded(Calls(lambda x: F.linear(x, w, b * 2 + 1)), torch.randn(32, 16))
    expected = expect(item)
    kernels = with_starters(item, tmp_path)
    assert len(kernels) == 1
    for enabled in (True, False):
        with Applied(item.model, kernels) as applied:
            kernels[0].enabled = enabled
            assert disagreement(output_leaves(item.model, item), expected) is None
            assert applied.calls == {kernels[0].op: 1}


def test_places_that_take_pieces_of_a_tensor_are_found(tmp_path):
    def fn(x):
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    item = loaded(Calls(fn), torch.randn(32, 64))
    kernels = with_starters(item, tmp_path)
    with Applied(item.model, kernels) as applied:
        output_leaves(item.model, item)
        assert list(applied.calls.values()) == [1]


def test_a_region_that_is_a_part_of_another_leaves_it_whole(tmp_path):
    def fn(x):
        return (torch.sin(x * 2) + 1).exp() * 3, torch.sin(x.t().contiguous() * 2) + 1

    item = loaded(Calls(fn), torch.randn(64, 64))
    kernels = with_starters(item, tmp_path)
    for order in (kernels, kernels[::-1]):
        for kernel in kernels:
            kernel.calls = 0
        with Applied(item.model, order) as applied:
            output_leaves(item.model, item)
            assert set(applied.calls.values()) == {1}


def test_regions_work_inside_inductor(replacements):
    item = gated()
    expected = expect(item)
    with Applied(item.model, replacements, compiler="inductor") as applied:
        assert disagreement(output_leaves(item.model, item), expected) is None
        assert set(applied.calls.values()) == {2}


def test_a_kernel_for_a_region_replaces_beside_other_ops(replacements):
    item = gated()
    (graph,) = capture(item)
    cases = {match.case.key: match.case for match in true_matches(Matcher(ops=["matmul"]), graph)[0]}
    product = Replacement(op="matmul", kernel_fn=torch.matmul, cases=list(cases.values()))
    expected = expect(item)
    with Applied(item.model, [product, *replacements]) as applied:
        assert disagreement(output_leaves(item.model, item), expected) is None
        assert applied.calls == {"matmul": 4} | {each.op: 2 for each in replacements}


def test_places_of_a_region_with_constants_are_found(tmp_path):
    item = loaded(Calls(lambda m, x: torch.where(m, x, 0.5).sin() * 2), torch.rand(8, 8) > 0.5, torch.randn(8, 8))
    plan = plan_of(item)
    write(plan, tmp_path / "regions")
    assert len(plan.ops) == 1
    (graph,) = capture(item)
    assert [match.op for match in Matcher(ops=list(plan.files)).find(graph.gm)] == list(plan.files)


def test_a_place_with_another_literal_is_no_place_of_the_region(replacements):
    class Other(Gated):
        def forward(self, x):
            gate, value = self.up[0](x).chunk(2, -1)
            return x + self.scale[0] * self.down[0](F.gelu(gate) * value * torch.sigmoid(value))  # not by tanh

    item = loaded(Other(), torch.randn(4, 24, 32))
    gelu = next(each for each in replacements if "gelu" in each.op)
    with Applied(item.model, [gelu]) as applied, torch.no_grad():
        item.model(*item.args)
        assert applied.calls == {gelu.op: 0}
        with pytest.raises(ConfigError, match="never called"):
            applied.check()


def test_regions_of_other_runs_are_found_by_their_folder(tmp_path):
    plan = plan_of(loaded(Calls(lambda x: torch.sin(x * 2) + 1), torch.randn(64, 64)))
    (op,) = plan.files
    write(plan, tmp_path / "regions")
    assert get_spec(op).source == plan.files[op][REFERENCE]
    assert loading.specs().keys().isdisjoint(plan.files)


def test_mismatch_is_asked_for_the_result_of_a_region():
    spec = region_spec(
        "graph_sin",
        lambda x0: aten.sin.default(x0),
        {"x0": Recorded(shape=(8, 8), dtype="fp32", quantiles=(-1.0, 1.0))},
        result=Recorded(shape=(8, 8), dtype="fp32").meta,
        flops=64,
        hard=("special",),
    )
    inputs = spec.adversarial["special"](spec.make_inputs(spec.cases[0], 1), torch.Generator().manual_seed(2))
    truth, _ = truth_of(spec, inputs)
    assert inputs["x0"].isnan().any()
    assert mismatch(torch.sin(inputs["x0"]), truth, "fp32", spec.tolerances["fp32"]) is None
    assert "NaN" in mismatch(torch.sin(inputs["x0"]).nan_to_num(), truth, "fp32", spec.tolerances["fp32"])
