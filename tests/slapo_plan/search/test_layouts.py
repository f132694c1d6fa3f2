"""Enumeration of layouts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_plan.search.layouts import LayoutSpace, check_constraints
from slapo_torch.dialect import TorchDialect

MODEL: Any = TorchDialect.classes["step_model"]
CHOICES = MODEL.pipeline_choices(), MODEL.replica_choices()


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 256), st.integers(1, 12))
def test_every_layout_uses_all_ranks_and_the_whole_batch(ranks: int, batch: int, blocks: int) -> None:
    space = LayoutSpace(ranks, batch, blocks, 8, {}, *CHOICES)
    for tp in space.degrees():
        for layout in space.layouts(tp):
            assert layout.tp * layout.pp * layout.dp == ranks
            assert layout.dp * layout.rows * layout.microbatches == batch
            assert layout.pp <= blocks


def test_constraints_hold() -> None:
    space = LayoutSpace(16, 64, 8, 8, check_constraints({"tp": [2, 4], "pp": 2, "data_parallel": "fsdp"}), *CHOICES)
    found = [layout for tp in space.degrees() for layout in space.layouts(tp)]
    assert {layout.tp for layout in found} == {2, 4}
    assert {layout.pp for layout in found} == {2}
    assert {layout.data_parallel for layout in found} == {"fsdp"}


@pytest.mark.parametrize(
    ("ranks", "constraints", "reason"),
    [
        (
            2,
            {"pp": 2, "pipeline_schedule": "interleaved"},
            "interleaved has 4 stages, and needs as many blocks and micro-batches",
        ),
        (1, {"data_parallel": "fsdp"}, "there is one replica, and fsdp needs 2 or more"),
    ],
)
def test_constraints_that_leave_nothing_say_why(ranks: int, constraints: dict[str, Any], reason: str) -> None:
    space = LayoutSpace(ranks, 8, 3, 8, check_constraints(constraints), *CHOICES)
    assert not [layout for tp in space.degrees() for layout in space.layouts(tp)]
    assert any(reason in each.reason for each in space.rejected)
