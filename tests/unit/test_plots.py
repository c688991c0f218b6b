"""Axes and marks of the plots."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autokernel.plots import Level, Mark, Roof, Shape, axis, progress_plot, roofline_plot, time_text

LATENCIES = st.lists(st.floats(min_value=1e-3, max_value=1e9), min_size=1, max_size=6)


@given(LATENCIES, st.sampled_from([None, True]))
def test_an_axis_holds_its_values_and_has_ticks_within(values, log):
    found = axis(values, 220.0, 14.0, log=log)
    pixels = [found.at(value) for value in values]
    assert all(14.0 <= pixel <= 220.0 for pixel in pixels)
    by_value = [pixel for _, pixel in sorted(zip(values, pixels, strict=True))]
    assert by_value == sorted(pixels, reverse=True)
    assert all(found.low <= tick <= found.high * (1 + 1e-6) for tick in found.ticks())
    assert len(found.ticks()) <= 14


@pytest.mark.parametrize(
    ("values", "ticks"),
    [([370.0, 420.0], [380.0, 400.0, 420.0]), ([10.0, 1000.0], [10, 20, 50, 100, 200, 500, 1000]), ([5.0], [5.0])],
)
def test_ticks_are_round(values, ticks):
    found = axis(values, 0.0, 100.0).ticks()
    assert set(ticks) <= {round(tick, 6) for tick in found}


@given(st.lists(st.one_of(st.none(), st.floats(min_value=0.1, max_value=1e7)), max_size=5), st.floats(0.1, 1e7))
def test_a_progress_plot_stays_within_its_frame(latencies, start_us):
    shapes = [Shape.UNTIMED if us is None else Shape.KEPT for us in latencies]
    marks = [Mark(x=i, y=us, shape=s, label="") for i, (us, s) in enumerate(zip(latencies, shapes, strict=True), 1)]
    plot = progress_plot(marks, start_us, [Level(y=start_us * 2, label="PyTorch", class_="baseline")], "progress")
    assert "nan" not in plot
    for name, value in re.findall(r'\b(cx|cy|x1|x2|y1|y2)="([^"]+)"', plot):
        assert 0 <= float(value) <= (480 if "x" in name else 260)


def test_the_roof_is_the_lower_of_its_two_parts():
    roof = Roof(gbps=1000.0, tflops=100.0, dtype="bf16")
    assert roof.at(1.0) == 1.0
    assert roof.at(100.0) == 100.0
    assert roof.at(1e6) == 100.0
    plot = roofline_plot(roof, [Mark(x=2.0, y=1.5, shape=Shape.KEPT, label="best")], "roofline")
    points = [tuple(map(float, pair.split(","))) for pair in re.search(r'points="([^"]+)"', plot)[1].split(" ")]
    assert len(points) == 3
    assert points[0][1] > points[1][1] == points[2][1]
    mark = float(re.search(r'cy="([^"]+)"', plot)[1])
    assert mark > points[1][1]
    assert math.isfinite(mark)


@pytest.mark.parametrize(
    ("us", "text"), [(0.1234, "0.123 us"), (9.876, "9.88 us"), (389.46, "389.5 us"), (25362.4, "25,362 us")]
)
def test_latencies_have_some_four_digits(us, text):
    assert time_text(us) == text


@pytest.mark.parametrize("apart", [0.0, 1.0, 5.0, 200.0])
def test_labels_of_two_levels_do_not_overlap(apart):
    levels = [Level(y=500.0, label="one", class_="baseline"), Level(y=500.0 - apart, label="other", class_="floor")]
    plot = progress_plot([Mark(x=1, y=900.0, shape=Shape.KEPT, label="")], 1000.0, levels, "progress")
    ys = [float(re.search(rf'y="([\d.]+)"[^>]*>{name}<', plot)[1]) for name in ("one", "other")]
    assert ys[1] - ys[0] >= 12


def test_numbers_under_a_wide_axis_are_powers_of_ten():
    roof = Roof(gbps=4000.0, tflops=800.0, dtype="bf16")
    plot = roofline_plot(roof, [Mark(x=1.0, y=3.0, shape=Shape.KEPT, label="best")], "roofline")
    assert re.findall(r'y="208\.0"[^>]*>([\d.,]+)<', plot) == ["1", "10", "100", "1,000"]
