"""Means, slopes and intervals against scipy's."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from normkit.lab.claim import Row
from normkit.lab.setups import statistics as own

X = [1.0, 2.0, 4.0, 8.0, 16.0]
Y = [2.1, 3.9, 8.4, 15.0, 33.0]


def test_a_t_interval_is_scipys() -> None:
    found = own.t_interval(Y)
    low, high = stats.t.interval(0.95, len(Y) - 1, loc=sum(Y) / len(Y), scale=stats.sem(Y))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    assert found.half == pytest.approx((high - low) / 2)
    assert own.t_interval(Y, 0.5).half < found.half


def test_a_slope_is_scipys() -> None:
    found, wanted = own.slope(X, Y), stats.linregress(X, Y)
    assert found.mean == pytest.approx(wanted.slope, rel=1e-12)
    assert found.half == pytest.approx(stats.t.ppf(0.975, 3) * wanted.stderr, rel=1e-9)
    assert own.r_squared(X, Y) == pytest.approx(wanted.rvalue**2)
    assert own.log_slope(X, [3 * x**-0.5 for x in X]).mean == pytest.approx(-0.5)


def test_a_difference_is_paired() -> None:
    assert own.difference([10.0, 20.0, 30.0], [9.0, 19.0, 29.0]) == (1.0, 1.0, 1.0)


def test_too_few_values_have_no_ends_and_none_are_refused() -> None:
    assert own.t_interval([3.0]) == (3.0, -math.inf, math.inf)
    assert own.slope([1.0, 2.0], [1.0, 3.0]) == (2.0, -math.inf, math.inf)
    assert own.t_interval([1.0, math.inf]).mean == math.inf
    for call in (lambda: own.mean([]), lambda: own.slope([1.0], [1.0]), lambda: own.slope([1.0, 1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="must"):
            call()


def test_rows_are_found_by_their_settings_and_reduced_by_seed() -> None:
    rows = [Row("c", s, True, {"d": d}, {"v": float(d * (s + 1))}, 0.0, {}, "") for s in (1, 0) for d in (2, 4)]
    assert own.values(rows, "v", d=4) == [4.0, 8.0]
    assert own.settings(rows, "d") == [2, 4]
    ratio = own.over_seeds(rows, lambda found: found[1].result["v"] / found[0].result["v"])
    assert ratio == (2.0, 2.0, 2.0)
