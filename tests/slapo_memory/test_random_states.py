"""The global generators of Python and NumPy: whoever draws is noticed, and a recompute draws what the forward drew."""

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

from slapo_core.schedule import create_schedule
from slapo_memory._random_private import WatchedGenerator, numpy_generator, python_generator

pytestmark = pytest.mark.usefixtures("only_memory")


@pytest.fixture(autouse=True)
def states_afterwards_as_before() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])


PYTHON: list[Callable[[], Any]] = [
    random.random,
    partial(random.gauss, 0, 1),
    partial(random.gauss, 0, 1),  # the second of a pair, which leaves the twister alone
    partial(random.getrandbits, 1),
    partial(random.seed, 3),
    lambda: [random.random() for _ in range(312)],  # all of the twister's numbers: the position is as before
]
NUMPY: list[Callable[[], Any]] = [
    numpy.random.rand,
    numpy.random.standard_normal,
    numpy.random.standard_normal,
    lambda: numpy.random.randint(0, 2, dtype=numpy.uint8),
    lambda: numpy.random.shuffle([1, 2]),
    partial(numpy.random.seed, 3),
    lambda: numpy.random.rand(312),
]


def plain(state: Any) -> Any:
    """A state of NumPy's can be compared without its array."""
    return [part.tolist() if isinstance(part, numpy.ndarray) else part for part in state]


@pytest.mark.parametrize(
    ("make", "read", "changes"),
    [(python_generator, random.getstate, PYTHON), (partial(numpy_generator, numpy.random), numpy.random.get_state, NUMPY)],
    ids=["python", "numpy"],
)
def test_the_state_is_read_again_after_each_draw_and_only_then(
    make: Callable[[], WatchedGenerator], read: Callable[[], Any], changes: list[Callable[[], Any]]
) -> None:
    generator = make()
    for change in changes:
        before = generator.state()
        assert generator.state() is before
        change()
        after = generator.state()
        assert after is not before
        assert plain(after) == plain(read())
        generator.put(before)
        assert plain(read()) == plain(before) != plain(after)
        generator.put(after)
        assert plain(read()) == plain(after)


def test_another_generator_of_numpys_is_noticed() -> None:
    generator = numpy_generator(numpy.random)
    before, bits = generator.state(), numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.MT19937(5))
    try:
        assert plain(generator.state()) == plain(numpy.random.get_state()) != plain(before)
        numpy.random.rand()
        assert plain(generator.state()) == plain(numpy.random.get_state())
    finally:
        numpy.random.set_bit_generator(bits)


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
