"""Outputs as people's models return them, on Megatron."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_core.testing import run_distributed
from tests.output_cases import RETURNS, all_differences

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize(
    ("layout", "options", "names"),
    [
        ({"dp": 2}, {}, ["accuracy, loss", "by function"]),
        pytest.param({"dp": 2}, {}, [*RETURNS], marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {}, [*RETURNS], marks=pytest.mark.slow),
    ],
    ids=["two", "replicas", "pipeline"],
)
def test_the_loss_is_found_in_what_a_model_returns(layout: dict[str, int], options: dict[str, Any], names: list[str]) -> None:
    for found in run_distributed(all_differences, 2, "megatron", layout, names, [0, 3], True, options, timeout=150):
        for name, difference in found.items():
            assert not isinstance(difference, str), (name, difference)
            assert difference < 5e-6, name
