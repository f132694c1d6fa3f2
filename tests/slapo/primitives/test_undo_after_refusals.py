"""Undo of a step on a traced module, after another step was refused or undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import Schedule, SlapoError, create_schedule


class Block(nn.Module):
    """A block whose result is the node that the steps match."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Add(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


STEPS: dict[str, Callable[[Schedule, list[Any]], Any]] = {
    "checkpoint": lambda block, matches: block.checkpoint(matches[0]),
    "fuse": lambda block, matches: block.fuse(matches, compiler=None),
    "replace": lambda block, matches: block.replace(Add(), matches),
}


def _trace(sch: Schedule) -> None:
    sch["0"].trace(flatten=True, leaf_modules=["Linear"])


BETWEEN: dict[str, Callable[[Schedule], Any]] = {
    "refused on the model": lambda sch: sch.sync_batch_norm(),
    "refused on the block": lambda sch: sch["0"].shard("weight", axis=0),
    "traced again": lambda sch: (_trace(sch), sch.undo()),
    "decomposed": lambda sch: (sch["0.down"].decompose(), sch.undo()),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("step", STEPS)
def test_the_model_is_as_before(step: str, between: str) -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 8)
    expected = model(x)
    sch = create_schedule(model, example_inputs=(x,))
    _trace(sch)
    STEPS[step](sch["0"], sch["0"].find(lambda x, y: x + y))
    with suppress(SlapoError):
        BETWEEN[between](sch)
    assert len(sch.journal) == 2
    sch.undo()
    torch.testing.assert_close(sch.mod(x), expected)
    STEPS[step](sch["0"], sch["0"].find(lambda x, y: x + y))
    torch.testing.assert_close(sch.mod(x), expected)
