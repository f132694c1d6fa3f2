"""Outputs and labels as people's models return them, on other projects' engines."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_testing import run_distributed
from tests.engines import zero
from tests.output_cases import RETURNS, all_differences, masked_later, of_labels

pytestmark = pytest.mark.multiproc

TARGETS = ("deepspeed", "megatron")
LABELS = [
    ({"dp": 2}, [0, 3, 1, 2, 0], False),
    pytest.param({"dp": 2}, [1, 2, 0, 1], True, marks=pytest.mark.slow),
    pytest.param({"dp": 2}, [0, 1, 2], True, marks=pytest.mark.slow),
    pytest.param({"pp": 2}, [0, 3, 1, 2], False, marks=pytest.mark.slow),
    pytest.param({"pp": 2}, [1, 2, 0], True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("target", "layout", "options", "names"),
    [
        *((target, {"dp": 2}, {}, ["accuracy, loss", "by function"]) for target in TARGETS),
        *(
            pytest.param(target, {axis: 2}, {}, [*RETURNS], marks=pytest.mark.slow)
            for target in TARGETS
            for axis in ("dp", "pp")
        ),
        pytest.param("deepspeed", {"dp": 2}, zero(3), [*RETURNS], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_loss_is_found_in_what_a_model_returns(
    target: str, layout: dict[str, int], options: dict[str, Any], names: list[str]
) -> None:
    for found in run_distributed(all_differences, 2, target, layout, names, [0, 3], True, options, timeout=150):
        for name, difference in found.items():
            assert not isinstance(difference, str), (name, difference)
            assert difference < 5e-6, name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("layout", "steps", "evaluates"), LABELS, ids=str)
def test_labels_have_any_name_and_ignored_value(target: str, layout: dict[str, int], steps: list[int], evaluates: bool) -> None:
    for found in run_distributed(of_labels, 2, target, layout, steps, evaluates, timeout=150):
        for name, difference in found.items():
            assert not isinstance(difference, str), (name, difference)
            assert difference < 5e-6, name


@pytest.mark.parametrize("target", [pytest.param("deepspeed", marks=pytest.mark.slow), "megatron"])
def test_labels_that_a_model_leaves_out_later_are_not_taken_for_those_of_the_batch(target: str) -> None:
    (message,) = run_distributed(masked_later, 1, target)
    assert "the loss is a mean over other labels than in earlier steps" in message
