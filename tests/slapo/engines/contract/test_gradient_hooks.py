"""On other projects' engines hooks of parameters have the effect that they have in one process, however state is sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from slapo_core import build
from slapo_testing import run_distributed
from tests import gradient_hooks as hooked
from tests.engines import zero
from tests.gradient_hooks import SGD, batches, differences, made, scheduled
from tests.slapo_torch.layouts import message_of

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("deepspeed"), pytest.mark.needs("megatron-core")]

Ways = list[tuple[dict[str, int], int]]
"""Layouts, each with the stage of ZeRO, or 1 for Megatron's distributed optimizer."""
CASES = [("masks", False), ("norms", False), ("weights", False), ("after", True)]
ADAM = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


def _differences(rank: int, target: str, ways: Ways) -> list[str]:
    found = []
    for layout, shares in ways:
        is_megatron = target == "megatron"
        cases = CASES if shares or is_megatron else [*CASES, ("steps", False)]
        options = {"distributed_optimizer": bool(shares)} if is_megatron else zero(shares)
        hooked.SGD = ADAM if is_megatron and shares else SGD  # type: ignore[assignment]
        found += [f"{layout}, {shares}: {wrong}" for wrong in differences(rank, target, layout, cases, **options)]
    hooked.SGD = SGD
    return found


@pytest.mark.parametrize(
    ("target", "ways"),
    [
        ("deepspeed", [({"dp": 2}, 1)]),
        ("megatron", [({"dp": 2}, 1)]),
        pytest.param("deepspeed", [({"tp": 2}, 0), ({"dp": 2}, 3), ({"pp": 2}, 1)], marks=pytest.mark.slow),
        pytest.param("megatron", [({"tp": 2}, 0), ({"dp": 2}, 0), ({"pp": 2}, 0)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_kind_of_hook_on_two_ranks(target: str, ways: Ways) -> None:
    assert run_distributed(_differences, 2, target, ways, timeout=110) == [[]] * 2


DP_TP, PP_TP, PP_DP = {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "ways"),
    [
        ("deepspeed", [(DP_TP, 1), (DP_TP, 2), ({"dp": 4}, 0), (PP_TP, 1), (PP_DP, 1)]),
        ("megatron", [(DP_TP, 1), (PP_TP, 0), (PP_DP, 1)]),
    ],
    ids=str,
)
def test_every_kind_of_hook_on_four_ranks(target: str, ways: Ways) -> None:
    assert run_distributed(_differences, 4, target, ways, timeout=110) == [[]] * 4


def _refusal(rank: int, target: str, options: dict[str, Any]) -> str:
    """Error message for a hook that steps an optimizer by itself."""
    engine = build(scheduled(made("steps"), {"dp": 2}, False), target, optimizer=SGD, **options)
    part: dict[str, Any] = {name: value.chunk(2)[rank] for name, value in batches(1)[0].items()}
    said = message_of(lambda: engine.train_batch(**part))
    engine.close()
    return said


@pytest.mark.parametrize(
    ("target", "options", "wrong"),
    [
        pytest.param(
            "deepspeed",
            zero(1),
            "changes the weights, which target 'deepspeed' keeps elsewhere with ZeRO or half precision; let it change the "
            "gradient, or use target='torch'",
            marks=pytest.mark.slow,
        ),
        (
            "megatron",
            {},
            "takes the gradient away, and this engine would step with zeros; let it change the gradient, or use target='torch'",
        ),
    ],
    ids=["deepspeed", "megatron"],
)
def test_a_hook_that_steps_by_itself_is_refused(target: str, options: dict[str, Any], wrong: str) -> None:
    assert run_distributed(_refusal, 2, target, options) == [f"BuildError: a hook of 'head.weight' {wrong}"] * 2


def _unused(rank: int) -> list[float]:
    """A hook that divides by the norm of what a step does not use."""
    model: Any = made("nothing")
    model.more = type(model.norm)(3)
    model.more.weight.register_hook(lambda gradient: gradient / gradient.norm())
    engine = build(scheduled(model, {"dp": 2}, False), "deepspeed", optimizer=SGD, **zero(1))
    engine.train_batch(**{name: value.chunk(2)[rank] for name, value in batches(1)[0].items()})
    engine.close()
    weight: list[float] = model.more.weight.tolist()
    return weight


@pytest.mark.slow
def test_no_hook_runs_on_what_is_not_used() -> None:
    assert run_distributed(_unused, 2) == [[1.0, 1.0, 1.0]] * 2
