"""Outputs as people's models return them: the loss is found, each step is that of one process, or one sentence says why not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from slapo_testing import run_distributed
from tests.output_cases import (
    FEW_BITS,
    GPT,
    REFUSED,
    RETURNS,
    Once,
    all_differences,
    batch_of,
    engine_of,
    of_labels,
    passed,
    refusals,
    size,
)

from ..layouts import message_of

pytestmark = pytest.mark.multiproc
SHARDED = {"data_parallel": "fsdp", "fsdp_units": []}
BY_UNIT = {"data_parallel": "fsdp", "fsdp_units": ["first"]}
SEVERAL = ["loss, accuracy", "accuracy, loss", "nested"]
"""Outputs of several numbers, of which one has a gradient."""


def check(found: dict[str, Any], allowed: float = 5e-6) -> None:
    for name, difference in found.items():
        assert not isinstance(difference, str), (name, difference)
        assert difference < allowed, name


@pytest.mark.parametrize(
    ("layout", "options", "evaluates"),
    [
        ({}, {}, True),
        pytest.param({}, {"microbatches": 1}, True, marks=pytest.mark.slow),
        pytest.param({}, {"precision": "bf16"}, True, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {}, True, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {}, False, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, {}, True, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, SHARDED, True, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, BY_UNIT, False, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, {}, True, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, {}, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_loss_is_found_in_what_a_model_returns(layout: dict[str, int], options: dict[str, Any], evaluates: bool) -> None:
    ranks, given = math.prod(layout.values()), (layout, [*RETURNS], [1, 2, 3], evaluates, options)
    for found in run_distributed(all_differences, ranks, "torch", *given, timeout=110):
        check(found, 2e-2 if "precision" in options else 5e-6)


def test_a_loss_of_fewer_bits_than_the_model_is_a_mean_up_to_its_rounding() -> None:
    for found in run_distributed(all_differences, 1, "torch", {}, [*FEW_BITS], [0, 1, 2], True, {}):
        check(found, 2 * torch.finfo(torch.bfloat16).eps)  # the losses are about 2


def test_the_last_stage_finds_the_loss() -> None:
    names = ["logits, loss", "accuracy, loss", "dataclass of another name", "by function"]
    for found in run_distributed(all_differences, 2, "torch", {"pp": 2}, names, [1, 2], True, {}):
        check(found)


@pytest.mark.parametrize("layout", [{}, pytest.param({"pp": 2}, marks=pytest.mark.slow)], ids=str)
def test_a_function_may_add_terms(layout: dict[str, int]) -> None:
    for found in run_distributed(all_differences, math.prod(layout.values()), "torch", layout, ["a sum"], [0, 3], True, {}):
        check(found)


@pytest.mark.parametrize(
    ("layout", "of_loss_fn"),
    [
        ({}, False),
        ({}, True),
        ({"pp": 2}, True),
        pytest.param({"pp": 2}, False, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, True, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_batch_is_passed_as_a_data_loader_gives_it(layout: dict[str, int], of_loss_fn: bool) -> None:
    for found in run_distributed(passed, math.prod(layout.values()), "torch", layout, [1, 2], of_loss_fn):
        check(found)


@pytest.mark.parametrize("layout", [{}, pytest.param({"pp": 2}, marks=pytest.mark.slow)], ids=str)
def test_an_output_that_does_not_show_its_loss_is_refused(layout: dict[str, int]) -> None:
    for found in run_distributed(refusals, math.prod(layout.values()), "torch", layout):
        for name, (_, _, text) in REFUSED.items():
            assert text in found[name], (name, found[name])


@pytest.mark.slow
def test_an_engine_that_runs_units_once_does_not_guess_in_an_evaluation_before_its_first_step() -> None:
    for found in run_distributed(all_differences, 2, "torch", {"dp": 2}, SEVERAL, [1], True, BY_UNIT):
        for name in SEVERAL:
            assert "the model returns several numbers, " in found[name], (name, found[name])


def test_a_second_number_in_a_later_step_is_refused_and_evaluation_keeps_to_the_first() -> None:
    idx, targets = batch_of(0)
    engine, _ = engine_of(Once(lambda logits, loss: (logits, loss)), None, "torch", 1, (idx, targets), check=False)
    engine.train_batch(idx, targets)
    before = engine.module.head.weight.detach().clone()
    assert "several differentiable numbers, '1', '2', and each" in message_of(lambda: engine.train_batch(idx, targets))
    torch.testing.assert_close(engine.module.head.weight, before)
    model = GPT(lambda logits, loss: loss)
    model.load_state_dict(engine.module.state_dict())
    torch.testing.assert_close(engine.eval_batch(idx, targets), model(idx, targets).detach())
    engine.close()


def test_the_look_for_a_loss_draws_no_random_numbers() -> None:
    idx, targets = batch_of(0)
    model = GPT(lambda logits, loss: (size(logits).detach() + torch.rand(()), loss))
    engine, _ = engine_of(model, None, "torch", 1, (idx, targets))
    torch.manual_seed(0)
    engine.eval_batch(idx, targets)
    found = torch.rand(())
    torch.manual_seed(0)
    torch.rand(())
    assert found == torch.rand(())
    engine.close()


@pytest.mark.parametrize("layout", [{}, *(pytest.param({axis: 2}, marks=pytest.mark.slow) for axis in ("pp", "dp"))], ids=str)
def test_labels_have_any_name_and_ignored_value(layout: dict[str, int]) -> None:
    for found in run_distributed(of_labels, math.prod(layout.values()), "torch", layout, [0, 1, 2], True):
        check(found)
