"""On Megatron-Core hooks of parameters have the effect that they have in one process, also with the distributed optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from slapo_core import build
from slapo_testing import run_distributed
from tests import gradient_hooks as hooked
from tests.gradient_hooks import SGD, batches, differences, made, scheduled
from tests.slapo_torch.layouts import message_of

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("megatron-core")]

CASES = [("masks", False), ("norms", False), ("weights", False), ("after", True)]
ADAM = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


def _differences(rank: int, ways: list[tuple[dict[str, int], bool]]) -> list[str]:
    found = []
    for layout, shares in ways:
        hooked.SGD = ADAM if shares else SGD  # type: ignore[assignment]
        wrong = differences(rank, "megatron", layout, CASES, distributed_optimizer=shares)
        found += [f"{layout}, {shares}: {each}" for each in wrong]
    hooked.SGD = SGD
    return found


@pytest.mark.parametrize(
    "ways",
    [
        [({"dp": 2}, True), ({"tp": 2}, False)],
        pytest.param([({"dp": 2}, False), ({"pp": 2}, False)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_kind_of_hook_on_two_ranks(ways: list[tuple[dict[str, int], bool]]) -> None:
    assert run_distributed(_differences, 2, ways, timeout=110) == [[]] * 2


@pytest.mark.slow
def test_every_kind_of_hook_on_four_ranks() -> None:
    ways = [({"dp": 2, "tp": 2}, True), ({"pp": 2, "tp": 2}, False), ({"pp": 2, "dp": 2}, True)]
    assert run_distributed(_differences, 4, ways, timeout=110) == [[]] * 4


def _steps(rank: int) -> str:
    engine = build(scheduled(made("steps"), {"dp": 2}, False), "megatron", optimizer=SGD)
    part: dict[str, Any] = {name: value.chunk(2)[rank] for name, value in batches(1)[0].items()}
    said = message_of(lambda: engine.train_batch(**part))
    engine.close()
    return said


def test_a_hook_that_takes_the_gradient_away_is_refused() -> None:
    said = (
        "BuildError: a hook of 'head.weight' takes the gradient away, and this engine would step with zeros; let it change the "
        "gradient, or use target='torch'"
    )
    assert run_distributed(_steps, 2) == [said] * 2
