"""A module's own random numbers and state are as without a checkpoint, or its first backward raises."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from slapo_core import ScheduleError, create_schedule
from slapo_memory.forward_wrappers import checkpoint

pytestmark = pytest.mark.usefixtures("only_memory")

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def noise(generator: Any) -> torch.Tensor:
    """Six numbers of it."""
    if isinstance(generator, torch.Generator):
        return torch.empty(6).bernoulli_(0.5, generator=generator) + torch.rand(6, generator=generator)
    return torch.tensor([generator.random() for _ in range(6)])


class Noisy(nn.Module):
    """Draws from what it was given, wherever it holds it."""

    def __init__(self, held: Any, draw: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.held, self.draw = nn.Linear(6, 6), nn.Linear(6, 6), held, draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down((self.up(x) * self.draw(self.held)).tanh()).sin()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of two steps, with other draws between forward and backward."""
    for scale in (1, 2):
        torch.manual_seed(0)
        out = model(X * scale)
        torch.rand(3)
        out.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = {
    "torch": (lambda: torch.Generator().manual_seed(1), noise),
    "list": (lambda: [torch.Generator().manual_seed(1)], lambda held: noise(held[0])),
    "dict": (lambda: {"a": torch.Generator().manual_seed(1)}, lambda held: noise(held["a"])),
    "tuple": (lambda: (torch.Generator().manual_seed(1),), lambda held: noise(held[0])),
    "numpy": (lambda: numpy.random.default_rng(1), noise),
    "numpy's old": (lambda: numpy.random.RandomState(1), lambda held: torch.tensor(held.rand(6), dtype=torch.float32)),
    "python": (lambda: random.Random(1), noise),
}


@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}, {"budget": 0.5}], ids=["all", "matmuls", "budget"])
@pytest.mark.parametrize(("make", "draw"), HELD.values(), ids=[*HELD])
def test_a_generator_of_the_modules_own_draws_the_same(make: Any, draw: Any, options: dict[str, Any]) -> None:
    before, after = Noisy(make(), draw), Noisy(make(), draw)
    after.load_state_dict(before.state_dict())
    sch = create_schedule(nn.Sequential(after), example_inputs=(X,))
    sch["0"].checkpoint(**options)
    for one, other in zip(gradients(before), gradients(sch.mod), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(draw(before.held), draw(after.held)), "it is where it would be"


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("place", ["argument", "closure"])
def test_a_generator_that_a_function_gets_draws_the_same(place: str, use_reentrant: bool) -> None:
    def run(x: torch.Tensor, drawn: torch.Generator) -> torch.Tensor:
        return (x * noise(drawn)).sin()

    found = []
    for checkpointed in (False, True):
        generator, x = torch.Generator().manual_seed(2), X.clone().requires_grad_()
        function, args = (run, (x, generator)) if place == "argument" else (lambda y, g=generator: run(y, g), (x,))
        out = checkpoint(function, *args, use_reentrant=use_reentrant) if checkpointed else function(*args)
        out.sum().backward()
        found.append((x.grad, noise(generator)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return (self.fc(x) * noise(generator)).sin()


def test_a_generator_that_a_module_gets_draws_the_same() -> None:
    before = Given()
    after = copy.deepcopy(before)
    create_schedule(after).checkpoint()
    for model in (before, after):
        model(X, generator=torch.Generator().manual_seed(3)).sum().backward()
    assert torch.equal(before.fc.weight.grad, after.fc.weight.grad)


FOREIGN = torch.Generator(), numpy.random.default_rng(), random.Random()


@pytest.mark.parametrize("place", range(len(FOREIGN)), ids=["torch", "numpy", "python"])
def test_a_generator_that_nobody_can_find_is_told_in_the_first_backward(place: int) -> None:
    model = nn.Sequential(Noisy(None, lambda held: noise(FOREIGN[place])))
    create_schedule(model)["0"].checkpoint()
    with pytest.raises(ScheduleError, match=r"checkpoint\('0'\): the recomputation gives other numbers than the forward"):
        gradients(model)


def test_a_run_on_fake_tensors_is_no_comparison() -> None:
    model = nn.Sequential(Noisy(None, lambda held: noise(FOREIGN[2])))
    create_schedule(model)["0"].checkpoint()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(X)).sum().backward()
    model.zero_grad()
    with pytest.raises(ScheduleError, match="the recomputation gives other numbers than the forward"):
        model(X).sum().backward()


@pytest.mark.parametrize("policy", [None, [torch.ops.aten.clone, torch.ops.aten.slice, torch.ops.aten.detach]])
def test_a_policy_counts_no_operators_but_the_models(policy: Any) -> None:
    """The comparison and the copies of buffers call clone themselves; a policy must not count these calls."""

    class Cloning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.norm(x.sin().clone()).cos().clone()).clone().sin()

    before = nn.Sequential(nn.Linear(6, 6), Cloning())
    after = copy.deepcopy(before)
    sch = create_schedule(after)
    sch["1"].checkpoint(policy=policy)
    sch.checkpoint(policy=policy)
    for one, other in zip(gradients(before), gradients(after), strict=True):
        assert torch.equal(one, other)


def test_a_forward_that_writes_to_its_input_is_refused_by_its_path() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)))
    sch = create_schedule(model)
    sch["1"].checkpoint()
    with pytest.raises(ScheduleError, match=r"checkpoint\('1'\): the forward writes to an argument in place"):
        model(X)
    with torch.no_grad():
        model(X)
    model[1][0].inplace = False
    model(X).sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_function_that_writes_to_an_argument_is_refused(use_reentrant: bool) -> None:
    x = X.clone().requires_grad_() * 1
    with pytest.raises(ScheduleError, match="the forward writes to an argument in place"):
        checkpoint(lambda y: y.add_(1).sin(), x, use_reentrant=use_reentrant)


class Switching(nn.Module):
    """Leaves another mode behind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.dropout(self.fc(x), 0.5, self.training).sin()
        self.training = not self.training
        return out


def test_the_recompute_runs_in_the_mode_of_the_forward() -> None:
    before = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), Switching())
    after = copy.deepcopy(before)
    create_schedule(after)["2"].checkpoint()
    create_schedule(after).checkpoint()
    for model in (before, after):
        torch.manual_seed(0)
        out = model(X)
        model.eval()
        out.sum().backward()
        assert not model[1].training
        assert not model[2].training
    for one, other in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
