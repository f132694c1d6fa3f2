"""Example inputs and batches: one reading of tensors, tuples, dicts and calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import BuildError, call_arguments, named_inputs, split_inputs
from slapo_tracing import trace_module
from slapo_tracing.nodes import wrap_forward

X, Y = torch.randn(2, 3), torch.randn(2, 3)


class Everything(nn.Module):
    """Takes arguments of every kind."""

    def forward(self, a: Any, b: Any = 2, /, c: Any = 3, *xs: Any, d: Any = 4, **others: Any) -> Any:
        return a, b, c, xs, d, others


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, Y), (X, Y), {}),
        ([X, Y], (X, Y), {}),
        ({"x": X}, (), {"x": X}),
        (((X,), {"y": Y}), (X,), {"y": Y}),
        (([X], {}), (X,), {}),
        (((), {"x": X}), (), {"x": X}),
        (((X, Y), (X, Y)), ((X, Y), (X, Y)), {}),
        ((X, {"y": Y}), (X, {"y": Y}), {}),
        (((X,), {0: Y}), ((X,), {0: Y}), {}),
    ],
)
def test_every_way_to_give_a_call(given: Any, args: Any, kwargs: Any) -> None:
    assert repr(split_inputs(given)) == repr((args, kwargs))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1,), {}), ((1,), {"c": 5}), ((1, 5, 6), {"d": 7}), ((1, 5, 6, 7, 8), {"d": 9, "e": 10})],
)
def test_arguments_by_name_are_the_same_call(args: Any, kwargs: Any) -> None:
    model = Everything()
    named = named_inputs(model, args, kwargs)
    again = call_arguments(model, named)
    assert model(*again[0], **again[1]) == model(*args, **kwargs)
    assert split_inputs(named, model) == again


def test_a_wrapped_forward_keeps_its_names() -> None:
    model = Everything()
    wrap_forward(model, lambda call, *args, **kwargs: call(*args, **kwargs))
    assert named_inputs(model, (1, 5), {"c": 6}) == {"a": 1, "b": 5, "c": 6}


class Adds(nn.Module):
    """Takes one argument by position alone."""

    def forward(self, x: torch.Tensor, /, y: torch.Tensor) -> torch.Tensor:
        return x + 2 * y


@pytest.mark.parametrize("given", [(X, Y), {"x": X, "y": Y}, ((X,), {"y": Y})])
def test_tracing_takes_every_way(given: Any) -> None:
    model = Adds()
    traced = trace_module(model, given)
    assert torch.equal(traced(X, Y), model(X, Y))
    assert named_inputs(traced, (X,), {}).keys() == {"x"}


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(BuildError, match="3 positional arguments are given, but the forward of Adds takes x, y by position"):
        named_inputs(Adds(), (X, Y, X), {})
    with pytest.raises(BuildError, match="'y' is given by position and by keyword; give it once"):
        named_inputs(Adds(), (X, Y), {"y": Y})
