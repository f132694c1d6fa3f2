"""Memory that two values share, and random numbers, on both sides of a cut."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import TraceError, build_program

from ..stage_comparison import cut

View = Callable[[torch.Tensor], torch.Tensor]
VIEWS: dict[str, View] = {
    "flatten": lambda h: h.flatten(),
    "nn.Flatten": nn.Flatten(),
    "nn.Unflatten": nn.Unflatten(1, (2, 4)),
    "nn.Sequential": nn.Sequential(nn.Identity(), nn.Flatten()),
    "nn.Identity": nn.Identity(),
    "nn.Dropout": nn.Dropout(0.5),
    "dropout": lambda h: F.dropout(h, training=False),
    "ravel": lambda h: h.ravel(),
    "swapdims": lambda h: h.swapdims(0, 1),
    "moveaxis": lambda h: h.moveaxis(0, 1),
    "unfold": lambda h: h.unfold(1, 4, 4),
    "tensor_split": lambda h: h.tensor_split(2)[1],
    "as_strided": lambda h: h.as_strided((4,), (1,)),
    "type_as": lambda h: h.type_as(h.new_zeros(1)),
    "real": lambda h: h.real,
    "data": lambda h: h.data,
    "broadcast_to": lambda h: h.broadcast_to(h.shape),
    "to": lambda h: h.to(h.dtype),
    "atleast_2d": lambda h: torch.atleast_2d(torch.positive(h)),
}


class Aliased(nn.Module):
    """Changes a value through another one that shares its memory, before or after its second part."""

    def __init__(self, view: View, late: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.view = view.eval() if isinstance(view, nn.Module) else [view]
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) * 1.0
        v = (self.view if isinstance(self.view, nn.Module) else self.view[0])(h)
        if not self.late:
            v.add_(1.0)
        g = self.b(h * 1.0)
        if self.late:
            v.add_(1.0)
        return self.c(g) + h


@pytest.mark.parametrize("name", VIEWS)
def test_a_change_behind_the_cut_reaches_every_view(name: str) -> None:
    model = Aliased(VIEWS[name], late=True).eval()
    with pytest.raises(TraceError, match="share memory that stage 1 changes in place; cut elsewhere"):
        build_program(cut(model, {"x": torch.randn(4, 8)}, "b"))


@pytest.mark.parametrize("name", VIEWS)
def test_a_change_before_the_cut_is_sent(name: str) -> None:
    model, x = Aliased(VIEWS[name], late=False).eval(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    program = build_program(cut(model, {"x": x}, "b"))
    torch.testing.assert_close(program(x=x), plain(x))


def on_own_batches(model: nn.Module, inputs: dict[str, torch.Tensor], *paths: str) -> torch.Tensor:
    """Return the last stage's result with a copy of the batch for each stage, as processes have."""
    values: tuple[torch.Tensor, ...] = ()
    for stage in build_program(cut(model, inputs, *paths)).stages:
        own = {name: inputs[name].clone() for name in stage.batch_inputs}
        values = stage.module(*values, **own)
    return values  # type: ignore[return-value]


class ChangesBatch(nn.Module):
    """Changes its input through a view and reads it before and after, or after alone."""

    def __init__(self, view: View, first: bool) -> None:
        super().__init__()
        self.a, self.b, self.view, self.first = nn.Linear(8, 8), nn.Linear(8, 8), [view], first

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.first:
            self.view[0](y).mul_(2)
        h = self.b(self.a(x + y if self.first else x))
        if not self.first:
            self.view[0](y).mul_(2)
        return h * y


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["ravel", "tensor_split", "data", "flatten"])
def test_an_argument_changed_through_a_view(name: str, first: bool) -> None:
    model = ChangesBatch(VIEWS[name], first)
    inputs = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    expected = model(**copy.deepcopy(inputs))
    torch.testing.assert_close(on_own_batches(model, inputs, "a"), expected)
    stages = build_program(cut(model, inputs, "a")).stages
    assert [stage.batch_inputs for stage in stages] == ([("x", "y"), ()] if first else [("x",), ("y",)])


class MaskFromHidden(nn.Module):
    """A mask made of nothing is filled from a hidden state, and a view of it made before is used behind the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x)
        row = mask[0]
        h = self.a(x)
        mask[:, 2:] = h[:, 2:].detach()
        return self.c(self.b(h)) * row


def test_a_mask_that_a_hidden_state_fills_is_made_once() -> None:
    model, x = MaskFromHidden(), torch.randn(4, 8)
    torch.testing.assert_close(on_own_batches(model, {"x": x}, "b"), model(x))


DRAWS: dict[str, View] = {
    "beta": lambda x: torch.distributions.Beta(torch.ones(4, 1), torch.ones(4, 1)).sample(),
    "gamma": lambda x: torch.distributions.Gamma(torch.ones(4, 1), torch.ones(4, 1)).sample(),
    "binomial": lambda x: torch.binomial(torch.full((4, 1), 9.0), torch.full((4, 1), 0.5)),
    "log_normal": lambda x: torch.empty(4, 1).log_normal_(),
    "cauchy": lambda x: torch.empty(4, 1).cauchy_(),
    "geometric": lambda x: torch.empty(4, 1).geometric_(0.3),
    "rand": lambda x: torch.rand(4, 1),
    "dropout": lambda x: F.dropout(x, 0.5),
}


class Mixes(nn.Module):
    """Uses one draw on both sides of a cut."""

    def __init__(self, draw: View) -> None:
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), [draw]
        nn.init.eye_(self.a.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = self.draw[0](x) + 0.0
        h = self.a(x * 0 + drawn)
        return (h - drawn).pow(2).mean() + 0 * self.b(h).sum()


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_drawn_once(name: str) -> None:
    model, x = Mixes(DRAWS[name]), torch.ones(4, 8)
    assert on_own_batches(model, {"x": x}, "a") == 0


def test_what_draws_nothing_is_made_again() -> None:
    program = build_program(cut(Mixes(lambda x: F.dropout(x.exp(), 0.5, training=False)), {"x": torch.ones(4, 8)}, "a"))
    assert [boundary.name for boundary in program.stages[1].inputs] == ["a"]
