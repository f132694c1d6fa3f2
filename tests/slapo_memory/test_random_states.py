"""The global generators of Python, NumPy and torch: a recompute draws what the forward drew."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from slapo_core import create_schedule

pytestmark = pytest.mark.usefixtures("only_memory")


@pytest.fixture(autouse=True)
def states_afterwards_as_before() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])


def drawing_aside(read: Callable[[], Any], draw: Callable[[], float], write: Callable[[Any], Any]) -> float:
    """Draw, and leave the generator as it was."""
    state = read()
    drawn = [draw() for _ in range(3)]
    write(state)
    return sum(drawn)


ASIDE: dict[str, Callable[[], float]] = {
    "python": partial(drawing_aside, random.getstate, random.random, random.setstate),
    "numpy": partial(drawing_aside, numpy.random.get_state, numpy.random.standard_normal, numpy.random.set_state),
    "torch": partial(drawing_aside, torch.get_rng_state, lambda: torch.rand(()).item(), torch.set_rng_state),
}
ONWARDS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": numpy.random.standard_normal,
    "torch": lambda: torch.rand(()).item(),
}


class Scaled(nn.Module):
    """Scales by a number that it draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x * self.draw()).tanh()


@pytest.mark.parametrize("kind", [*ASIDE])
def test_a_forward_that_puts_the_state_back_draws_the_same_again(kind: str) -> None:
    """Between the forward and the backward somebody else draws."""
    before = nn.Sequential(Scaled(ASIDE[kind]), Scaled(ONWARDS[kind]), Scaled(ASIDE[kind]))
    after = nn.Sequential(*(Scaled(each.draw) for each in before))
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    sch = create_schedule(after)
    for name in "012":
        sch[name].checkpoint()
    last: list[float] = []
    for model in (before, after):
        random.seed(5)
        numpy.random.seed(5)
        torch.manual_seed(5)
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().sum()
            ONWARDS[kind]()
            loss.backward()
        last.append(ONWARDS[kind]())
    assert last[0] == last[1]
    for expected, found in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)
