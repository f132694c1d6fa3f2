"""On DeepSpeed hooks of parameters have the effect that they have in one process, with every stage of ZeRO."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_core import build
from slapo_testing import run_distributed
from tests.engines import zero
from tests.gradient_hooks import SGD, batches, differences, made, scheduled
from tests.slapo_torch.layouts import message_of

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("deepspeed")]

CASES = [("masks", False), ("norms", False), ("weights", False), ("after", True)]


def _differences(rank: int, ways: list[tuple[dict[str, int], int]]) -> list[str]:
    found = []
    for layout, stage in ways:
        cases = CASES if stage else [*CASES, ("steps", False)]
        found += [f"{layout}, {stage}: {wrong}" for wrong in differences(rank, "deepspeed", layout, cases, **zero(stage))]
    return found


@pytest.mark.parametrize(
    "ways",
    [
        [({"dp": 2}, 1), ({"tp": 2}, 0)],
        pytest.param([({"dp": 2}, 3), ({"pp": 2}, 1)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_kind_of_hook_on_two_ranks(ways: list[tuple[dict[str, int], int]]) -> None:
    assert run_distributed(_differences, 2, ways, timeout=110) == [[]] * 2


@pytest.mark.slow
def test_every_kind_of_hook_on_four_ranks() -> None:
    ways = [({"dp": 2, "tp": 2}, 1), ({"dp": 2, "tp": 2}, 2), ({"dp": 4}, 0), ({"pp": 2, "tp": 2}, 1), ({"pp": 2, "dp": 2}, 1)]
    assert run_distributed(_differences, 4, ways, timeout=110) == [[]] * 4


def _unused(rank: int) -> list[Any]:
    """A hook that divides by the norm of what a step does not use; then one that steps by itself."""
    model: Any = made("nothing")
    model.more = type(model.norm)(3)
    model.more.weight.register_hook(lambda gradient: gradient / gradient.norm())
    engine = build(scheduled(model, {"dp": 2}, False), "deepspeed", optimizer=SGD, **zero(1))
    engine.train_batch(**{name: value.chunk(2)[rank] for name, value in batches(1)[0].items()})
    engine.close()
    engine = build(scheduled(made("steps"), {"dp": 2}, False), "deepspeed", optimizer=SGD, **zero(1))
    part = {name: value.chunk(2)[rank] for name, value in batches(1)[0].items()}
    said = message_of(lambda: engine.train_batch(**part))
    engine.close()
    return [model.more.weight.tolist(), said]


@pytest.mark.slow
def test_no_hook_runs_on_what_is_not_used_and_none_changes_weights_that_are_kept_elsewhere() -> None:
    said = (
        "BuildError: a hook of 'head.weight' changes the weights, which target 'deepspeed' keeps elsewhere with ZeRO or half "
        "precision; let it change the gradient, or use target='torch'"
    )
    assert run_distributed(_unused, 2) == [[[1.0, 1.0, 1.0], said]] * 2
