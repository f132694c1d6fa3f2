"""Axes hold their values, and their ticks are round."""

from __future__ import annotations

import math

import pytest

from slapo_report import axis_from_zero, integer_axis, linear_axis, log_axis, step_axis


@pytest.mark.parametrize("values", [[1.0, 2.0], [3.0], [0.0, 0.0], [math.nan], [], [1e-9, 1e9], [-5.0, 5.0]])
def test_linear_axis_holds_its_values_and_ticks(values: list[float]):
    axis = linear_axis(values)
    assert axis.low < axis.high
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
    assert all(0 < axis.at(value) < 100 for value in values if math.isfinite(value))


def test_log_axis_puts_zero_at_its_floor():
    axis = log_axis([0.0, 1e-4], floor=1e-9)
    assert axis.at(0.0) == 0
    assert axis.at(1e-4) == pytest.approx(100)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 30, 99, 1000])
def test_step_axis_labels_first_and_last(num_steps: int):
    ticks = step_axis(num_steps).ticks
    assert ticks[0] == 1
    assert ticks[-1] == num_steps
    assert len(ticks) <= 9


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 1), (3, 3), (0, 39), (17, 2000)])
def test_integer_axis_has_integer_ticks_within(first: int, last: int):
    axis = integer_axis(first, last)
    assert all(tick == int(tick) and first <= tick <= last for tick in axis.ticks)
    assert 0 < axis.at(first) <= axis.at(last) < 100
    assert len(axis.ticks) <= 8


@pytest.mark.parametrize("largest", [0.0, 1e-9, 0.3, 1.0, 84.0, 1e12])
def test_axis_from_zero_begins_at_zero_and_has_ticks_within(largest: float):
    axis = axis_from_zero(largest)
    assert axis.ticks[0] == 0
    assert 2 <= len(axis.ticks) <= 7
    assert axis.ticks[-1] <= axis.high * (1 + 1e-9)
