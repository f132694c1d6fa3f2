"""Enumeration of layouts."""

from __future__ import annotations

from typing import Any

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
