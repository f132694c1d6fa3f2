"""Passes for any number of rows, from those of one row and of two."""

from __future__ import annotations

import torch

from slapo_plan.recording.segments import PassRecord
from slapo_plan.records import OperatorRecord
from slapo_plan.search.row_extrapolation import pass_at_rows


def product(rows: int) -> OperatorRecord:
    return OperatorRecord("aten.mm", "matmul", torch.float32, 100 * rows, 10 + 4 * rows, (1, rows, 5, 10))


def copy(rows: int) -> OperatorRecord:
    return OperatorRecord("aten.clone", "pointwise", torch.float32, 0, 8 * rows)


def test_work_of_two_rows_alone_is_scaled() -> None:
    one, two = PassRecord(10, 4, (product(1),)), PassRecord(16, 6, (copy(2), product(2), copy(2)))
    assert pass_at_rows(one, two, 1) == one
    assert pass_at_rows(one, two, 2) == two
    assert pass_at_rows(one, two, 4) == PassRecord(28, 10, (copy(4), product(4), copy(4)))


def test_work_of_one_row_alone_is_left_out() -> None:
    one, two = PassRecord(work=(copy(1), product(1))), PassRecord(work=(product(2),))
    assert pass_at_rows(one, two, 3).work == (product(3),)
