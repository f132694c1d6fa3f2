"""Every layout trains as the unmodified model does in one process."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_testing import run_distributed

from .layouts import train_beside_reference

pytestmark = pytest.mark.multiproc


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ({"pp": 2}, {"microbatches": 4}),
        ({"pp": 2}, {"microbatches": 1}),
        ({"pp": 2}, {"microbatches": 4, "pipeline_schedule": "gpipe", "clip": 0.1}),
        ({"pp": 4}, {"microbatches": 4, "clip": 0.1}),
        pytest.param({"pp": 4}, {"microbatches": 8, "pipeline_schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, {"microbatches": 2, "clip": 0.1}, marks=pytest.mark.slow),  # see gradients/test_ddp.py
        ({"pp": 2, "tp": 2}, {"microbatches": 2, "clip": 0.1}),
        ({"dp": 2}, {"microbatches": 2, "clip": 0.1}),
        ({"dp": 2, "tp": 2}, {"microbatches": 1}),
    ],
    ids=str,
)
def test_a_layout_trains_as_one_process_does(layout: dict[str, int], config: dict[str, Any]) -> None:
    size = layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1)
    for worst in run_distributed(train_beside_reference, size, layout, config):
        assert all(difference < 1e-5 for difference in worst.values()), worst
