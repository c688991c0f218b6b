"""Knobs, rules and the space they span; properties over drawn spaces."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autokernel.errors import ConfigError
from autokernel.kernelfile import parse_kernel
from autokernel.tuner.knobs import Choice, Flag, Pow2, Span, knob_of
from autokernel.tuner.rules import Rule
from autokernel.tuner.space import Space

VALUES = st.one_of(
    st.lists(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), min_size=1, max_size=5, unique=True),
    st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True),
    st.lists(st.sampled_from([0, -1]), min_size=1, max_size=2, unique=True).flatmap(
        lambda first: st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True).map(lambda rest: first + rest)
    ),
    st.lists(st.sampled_from(["auto", "64x64", "128x64", "tma"]), min_size=1, max_size=4, unique=True),
    st.sampled_from([[False, True], [0, 1], [1, True, 1.0]]),
)


def kernel(tunables, config, **literals):
    lines = ['KERNEL_TYPE = "softmax"', 'BACKEND = "triton"', f"TUNABLES = {tunables!r}", f"CONFIG = {config!r}"]
    lines += [f"{name} = {value!r}" for name, value in literals.items()]
    return "\n".join([*lines, "def kernel_fn(x, dim=-1):\n    return x\n"])


def space_of(tunables, **literals):
    return Space.read(kernel(tunables, {name: values[0] for name, values in tunables.items()}, **literals))


SPACES = st.lists(VALUES, min_size=1, max_size=4).map(
    lambda lists: space_of({f"K{number}": values for number, values in enumerate(lists)})
)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([16, 32, 64], Pow2),
        ([0, 16, 32], Pow2),
        ([0, -1, 1, 2, 4], Pow2),
        ([0, -1, 1, 2, 3], Span),
        ([64, 80, 96], Span),
        ([0.5, 1.0], Span),
        ([False, True], Flag),
        ([0, 1], Flag),
        ([1, True], Choice),
        (["auto", "tma"], Choice),
        ([1, "auto"], Choice),
        ([0, float("inf")], Choice),
    ],
)
def test_a_knob_is_of_the_kind_its_values_show(values, kind):
    assert type(knob_of("K", values)) is kind


def test_a_power_of_two_is_seen_as_its_logarithm_and_steps_by_listed_powers():
    knob = knob_of("K", [64, 16, 32, 256])
    assert [knob.encode(i) for i in range(4)] == [(6.0,), (4.0,), (5.0,), (8.0,)]
    assert set(knob.neighbours(0)) == {2, 3}
    assert set(knob.neighbours(1, radius=2)) == {0, 2}


def test_by_shape_is_next_to_every_amount_and_told_apart_from_each():
    knob = knob_of("K", [0, 4, 8, 16, 32])
    assert set(knob.neighbours(0)) == {1, 2, 3, 4}
    assert set(knob.neighbours(1)) == {0, 2}
    codes = [knob.encode(i) for i in range(5)]
    assert len(set(codes)) == 5
    assert [code[1] for code in codes] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_tiles_as_text_show_their_sides():
    knob = knob_of("TILE", ["auto", "64x64", "64x256"])
    assert knob.encode(2) == (0.0, 0.0, 1.0, 6.0, 8.0)
    assert knob.encode(0) == (1.0, 0.0, 0.0, 6.0, 7.0)


@given(values=VALUES, radius=st.integers(1, 3))
def test_neighbours_are_symmetric_and_never_the_value_itself(values, radius):
    knob = knob_of("K", values)
    near = {i: set(knob.neighbours(i, radius)) for i in range(len(knob.values))} if len(knob.values) > 1 else {}
    for i, others in near.items():
        assert i not in others
        assert all(i in near[other] for other in others)


@given(values=VALUES)
def test_codes_are_finite_equally_long_and_distinct(values):
    knob = knob_of("K", values)
    codes = [knob.encode(i) for i in range(len(knob.values))]
    assert len({len(code) for code in codes}) == 1
    assert all(math.isfinite(number) for code in codes for number in code)
    assert len(set(codes)) == len(codes)


@settings(max_examples=50)
@given(space=SPACES, data=st.data())
def test_a_point_is_found_again_by_its_config(space, data):
    points = list(space.points())
    assert len(points) == space.size == len(set(points))
    point = data.draw(st.sampled_from(points))
    assert space.locate(space.config_at(point)) == point
    for near in space.neighbours(point):
        assert point in space.neighbours(near)


@settings(max_examples=50)
@given(data=st.data(), sizes=st.lists(st.integers(2, 3), min_size=2, max_size=4))
def test_the_canonical_point_is_its_own_and_listed_once(data, sizes):
    names = [f"K{number}" for number in range(len(sizes))]
    condition = st.tuples(st.sampled_from(names), st.integers(1, 3)).map(lambda pair: f"{pair[0]} == {pair[1]}")
    unused = data.draw(st.dictionaries(st.sampled_from(names), condition, max_size=3))
    space = space_of({name: [1, 2, 3][:size] for name, size in zip(names, sizes, strict=True)}, UNUSED=unused)
    listed = set(space.points())
    for point in itertools.product(*(range(size) for size in sizes)):
        settled = space.canonical(point)
        assert space.canonical(settled) == settled
        assert settled in listed


def test_points_that_differ_only_in_what_is_unused_are_one():
    space = space_of({"PERSISTENT": [-1, 1, 2], "STAGES": [1, 2, 3]}, UNUSED={"STAGES": "PERSISTENT == -1"})
    assert space.canonical((0, 2)) == (0, 0)
    assert space.canonical((1, 2)) == (1, 2)
    assert len(list(space.points())) == 1 + 2 * 3


def test_constraints_leave_out_points_and_neighbours():
    space = space_of({"M": [16, 32, 64], "N": [16, 32, 64]}, CONSTRAINTS=["M * N <= 1024", "M >= N"])
    assert {tuple(space.config_at(p).values()) for p in space.points()} == {(16, 16), (32, 16), (32, 32), (64, 16)}
    assert set(space.neighbours((1, 0))) == {(0, 0), (1, 1), (2, 0)}


def test_a_constraint_may_name_what_is_in_config_without_a_choice():
    text = kernel({"M": [16, 32]}, {"M": 16, "LIMIT": 16}, CONSTRAINTS=["M <= LIMIT"])
    assert list(Space.read(text).points()) == [(0,)]


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("A * B <= 32", True),
        ("A + B - 2 < B // 2", False),
        ("1 < A <= 4 and not B == 4", True),
        ("A in (1, 2) or B in [8]", True),
        ("A not in (1, 2)", True),
        ("-A < 0 < B % 3", True),
        ("T == 'tma' and F", True),
        ("A / 0 > 1", False),
        ("T < 3", False),
        ("T * 3 == 'x'", False),
    ],
)
def test_rules_are_evaluated_as_python_would_and_what_fails_does_not_hold(text, holds):
    rule = Rule.of(text, {"A", "B", "T", "F"})
    assert rule.holds({"A": 4, "B": 8, "T": "tma", "F": True}) is holds


@pytest.mark.parametrize(
    "text",
    [
        "C < 3",
        "open('x')",
        "A.real > 0",
        "A[0] > 0",
        "A ** 9 ** 9 > 0",
        "A << 99 > 0",
        "[x for x in (1,)]",
        "lambda: 1",
        "(A := 3)",
        "A if B else 1",
        "f'{A}'",
        "A is B",
        "__import__",
        "A <",
        "A = 1",
        "",
        "A < 1 " * 200,
        "(" * 300,
    ],
)
def test_rules_refuse_other_names_calls_attributes_and_what_takes_long(text):
    with pytest.raises(ConfigError):
        Rule.of(text, {"A", "B"})


@pytest.mark.parametrize("literal", [{"CONSTRAINTS": "A < 1"}, {"CONSTRAINTS": [1]}, {"UNUSED": {"A": 1}}])
def test_rules_of_another_shape_are_refused_by_the_kernel_file(literal):
    with pytest.raises(ConfigError):
        parse_kernel(kernel({"A": [1, 2]}, {"A": 1}, **literal))
