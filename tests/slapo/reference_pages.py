"""Pages of the reference as tables: each name with its arguments and a call that shows what the page says."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo

Shows = Callable[..., None]


@dataclass
class Page:
    """One page.

    Args:
        module: What its names are of.
        arguments: Name to the arguments that the page documents; ``...`` stands for a default that has no literal, and None
            for a name that is not called.
        calls: Name to what shows it.
    """

    module: ModuleType
    arguments: dict[str, str | None] = field(default_factory=dict)
    calls: dict[str, Shows] = field(default_factory=dict)

    def row(self, name: str, arguments: str | None = None) -> Callable[[Shows], Shows]:
        """Add a row; the decorated function fails where the name does not do what the page says."""

        def add(shows: Shows) -> Shows:
            assert name not in self.calls, f"{name} has a row already"
            self.arguments[name], self.calls[name] = arguments, shows
            return shows

        return add

    def check_arguments(self, name: str) -> None:
        """The documented arguments are taken, in their order and with their defaults; ours may have more behind them."""
        if self.arguments[name] is not None:
            self.check_signature(name, operator.attrgetter(name)(self.module))

    def check_signature(self, name: str, found: Any) -> None:
        """The same, of what takes the name's place."""
        documented = self.arguments[name]
        try:
            ours = _parameters(found)
        except ValueError:  # of a builtin, which has none to look at
            assert callable(found)
            return
        wanted = _parameters(eval(f"lambda {documented}: None"))  # noqa: S307  the table is ours
        positional = [each for each in wanted if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        assert [each.name for each in ours[: len(positional)]] == [each.name for each in positional]
        for own, each in zip(ours, positional, strict=False):
            free = each.default in (..., each.empty)
            assert free or own.default == each.default, f"{each.name} is {own.default!r} where nothing is given"
        by_name = {each.name: each for each in ours}
        for each in wanted[len(positional) :]:
            if each.kind is each.VAR_KEYWORD:  # documented as **kwargs; ours may say which
                assert any(own.kind in (own.KEYWORD_ONLY, own.VAR_KEYWORD) for own in ours) or len(ours) > len(positional)
            elif each.kind is each.VAR_POSITIONAL:
                assert any(own.kind is own.VAR_POSITIONAL for own in ours)
            else:
                own = by_name[each.name]
                assert each.default is ... or own.default == each.default

    def show(self, name: str, *given: Any) -> None:
        """Run the call of a row, with what its page's tests give to all."""
        self.calls[name](*given)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    found = [each for each in found if each.name != "self"]
    return sorted(found, key=lambda each: each.kind)


def each_name(page: Page) -> pytest.MarkDecorator:
    """Run a test for each row of a page."""
    return pytest.mark.parametrize("name", page.calls)


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class MLP(nn.Module):
    """Two layers, an activation of a module and one of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.fc2(self.act(self.fc1(x))) + 1)


class Stack(nn.Module):
    """MLPs in a list, the first and the last tied."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(depth))
        self.layers[-1].fc1.weight = self.layers[0].fc1.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def scheduled(model: nn.Module | None = None) -> slapo.Schedule:
    """A schedule with example inputs."""
    return slapo.create_schedule(Stack() if model is None else model, example_inputs=(X,))


def same(first: Callable[..., torch.Tensor], second: Callable[..., torch.Tensor]) -> None:
    """Outputs, and gradients of the input, are equal."""
    found = []
    for model in (first, second):
        x = X.clone().requires_grad_()
        out = model(x)
        out.square().sum().backward()
        found.append((out, x.grad))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)
