"""Guards: the arguments of a call, and attributes that changed since."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slapo_tracing import trace
from slapo_tracing.graphs import argument_values, plain_signature
from tests.slapo_tracing.tracers.test_value_tracer import Box, Forward

FORWARDS: list[Callable[..., Any]] = [
    lambda self: None,
    lambda self, x: None,
    lambda self, x, y=1, z=None: None,
    lambda self, x, *, y, z=2: None,
    lambda self, x, y=1, **others: None,
    lambda self, x=0, /, y=1, **others: None,
    lambda self, *x, y=1, **others: None,
    lambda self, **others: None,
]


def bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what ``inspect`` binds, with ``**others`` unpacked; None for a wrong call."""
    try:
        arguments = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    arguments.apply_defaults()
    others = arguments.arguments.pop("others", {})
    return {**arguments.arguments, **others}


@pytest.mark.parametrize("forward", FORWARDS)
def test_arguments_are_bound_as_python_does(forward: Any) -> None:
    made = plain_signature(Forward(forward))
    for parameters in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301
        for count, named in itertools.product(range(4), range(16)):
            args = tuple(range(10, 10 + count))
            kwargs = {name: 20 + place for place, name in enumerate("xyzw") if named & 1 << place}
            expected = bound(parameters, args, kwargs)
            if expected is None:
                with pytest.raises(TypeError):
                    argument_values(parameters, args, kwargs)
            else:
                found = argument_values(parameters, args, kwargs)
                assert list(found.items()) == list(expected.items())


class Config:
    """Computes its attributes, as configs do."""

    def __init__(self) -> None:
        self.factor, self.nested = 2.0, Box([1.0, {"bias": 0.5}])

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, {"scale": "factor"}.get(name, name))


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config, "factor", 3.0),
        lambda config: config.nested.content.append(2.0),
        lambda config: config.nested.content[1].update(bias=4.0),
        lambda config: setattr(config, "nested", Box([7.0, {"bias": 0.5}])),
        lambda config: object.__setattr__(config, "__dict__", {**vars(config), "factor": 5.0}),
    ],
)
def test_a_change_anywhere_in_a_config_is_seen(change: Any) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        content = self.config.nested.content
        return self.fc(x) * self.config.scale * len(content) * content[0] + content[1]["bias"]

    model: Any = Forward(forward)
    model.config, x = Config(), torch.randn(2, 4)
    traced = trace(model, example_inputs=(x,))
    for _ in range(2):
        torch.testing.assert_close(traced(x), model(x))
    change(model.config)
    for _ in range(2):
        torch.testing.assert_close(traced(x), model(x))


def test_attributes_of_parts_that_are_replaced() -> None:
    model: Any = Forward(lambda self, x: self.inner(x) * self.inner.factor)
    model.inner = Forward(lambda self, x: x + self.factor)
    model.inner.factor = 2.0
    traced = trace(model, example_inputs=(torch.ones(2),), flatten=True)
    other = Forward(lambda self, x: x - 1)
    other.factor = 3.0  # type: ignore[assignment]
    traced.inner = other
    torch.testing.assert_close(traced(torch.ones(2)), torch.zeros(2) * 3)
    assert isinstance(traced.inner, nn.Module)
