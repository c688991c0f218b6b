"""One CONFIG for several shapes, or a few: against every subset of small random matrices."""

import itertools
import math
import random

import pytest

from autokernel.tuner.shapes import best_for_mix, dispatch_table, mixed_latency


def drawn(seed, points=7, shapes=5, failing=0.15):
    rng = random.Random(seed)
    rows = {
        (p,): [None if rng.random() < failing else rng.uniform(1, 2) * 10**s for s in range(shapes)]
        for p in range(points)
    }
    rows[(0,)] = [latency or 3 * 10**s for s, latency in enumerate(rows[(0,)])]
    return rows, [rng.uniform(0.1, 1) / 10**s for s in range(shapes)]


def cost(rows, chosen, weights):
    best = [min((rows[p][s] or math.inf) for p in chosen) for s in range(len(weights))]
    return sum(w * latency for w, latency in zip(weights, best, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_the_table_is_within_its_bound_with_nearly_as_few_configurations_as_any(seed):
    rows, weights = drawn(seed)
    within = 0.03
    table = dispatch_table(rows, weights, within=within)
    ideal = cost(rows, list(rows), weights)
    assert cost(rows, table.points, weights) == pytest.approx((1 + table.loss) * ideal)
    assert table.loss <= within + 1e-12
    for shape, point in enumerate(table.takes):
        assert rows[point][shape] == min(r for p in table.points if (r := rows[p][shape]) is not None)
    fewest = next(
        size
        for size in range(1, len(rows) + 1)
        if any(cost(rows, c, weights) <= (1 + within) * ideal for c in itertools.combinations(rows, size))
    )
    assert fewest <= len(table.points) <= fewest + 1


def test_no_configuration_of_the_table_is_needless():
    for seed in range(40):
        rows, weights = drawn(seed)
        points = dispatch_table(rows, weights).points
        ideal = cost(rows, list(rows), weights)
        for left_out in points:
            rest = [p for p in points if p != left_out]
            assert not rest or cost(rows, rest, weights) > 1.03 * ideal


def test_a_wide_bound_gives_the_one_configuration_that_suits_the_mix_best():
    for seed in range(20):
        rows, weights = drawn(seed)
        table = dispatch_table(rows, weights, within=10.0)
        assert table.points == (best_for_mix(rows, weights),)


def test_a_configuration_that_fails_on_one_shape_is_rejected():
    assert mixed_latency([1.0, None], [1.0, 0.0]) is None
    assert best_for_mix({(0,): [1.0, None], (1,): [5.0, 5.0]}, [1.0, 1.0]) == (1,)
    assert best_for_mix({(0,): [None]}, [1.0]) is None


def test_a_shape_that_nothing_runs_on_is_an_error():
    with pytest.raises(ValueError, match="shape 1"):
        dispatch_table({(0,): [1.0, None]}, [1.0, 1.0])
    with pytest.raises(ValueError, match="weights"):
        dispatch_table({(0,): [1.0]}, [1.0, 1.0])
