"""A forward that takes gradients itself: forces of a potential, gradient penalties."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from slapo_core import TraceError, build_program

from ..stage_comparison import assert_same_as_model, cut

Forward = Callable[["Model", torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Three layers and any forward."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.run = [forward]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run[0](self, x)


def _of_input(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    h = torch.tanh(model.b(torch.tanh(model.a(x))))
    (forces,) = torch.autograd.grad((model.c(h) * x).sum(), x, create_graph=True)
    return forces.square().sum()


def _of_hidden(model: Model, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(model.a(x))
    z = torch.tanh(model.b(h))
    (slope,) = torch.autograd.grad(outputs=[(model.c(z) * h).sum()], inputs=[h], create_graph=True)
    return slope.square().sum()


def _through_a_change(model: Model, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(model.a(x))
    kept = torch.zeros(2, *x.shape)
    kept[0] = h
    z = model.b(h.detach())
    (slope,) = torch.autograd.grad((kept.square() * model.c(z)).sum() + h.sum(), h, create_graph=True)
    return slope.square().sum()


def _of_weight(model: Model, x: torch.Tensor) -> torch.Tensor:
    z = model.b(torch.tanh(model.a(x)))
    (slope,) = torch.autograd.grad((model.c(z) * model.a.weight.sum()).sum(), model.a.weight, create_graph=True)
    return slope.square().sum()


def _penalty(model: Model, x: torch.Tensor) -> torch.Tensor:
    h = model.b(torch.tanh(model.a(x)))
    (slope,) = torch.autograd.grad(torch.tanh(model.c(h)).sum(), h, create_graph=True)
    return (slope.square() * h.detach()).sum()


def _first(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(model.a(x)).sum(), x, create_graph=True)
    return model.c(model.b(slope) + model.a(x)).sum()


@pytest.mark.parametrize(
    ("forward", "path"),
    [(_of_input, "a"), (_of_input, "b"), (_of_hidden, "b"), (_through_a_change, "b"), (_of_weight, "a"), (_of_weight, "b")],
)
def test_gradients_over_a_cut_are_refused(forward: Forward, path: str) -> None:
    schedule = cut(Model(forward), {"x": torch.randn(2, 4)}, path)
    with pytest.raises(
        TraceError, match=r"torch\.autograd\.grad runs in stage 1, .* comes from another stage.*test_autograd_calls"
    ):
        build_program(schedule)


@pytest.mark.parametrize(
    ("forward", "path"), [(_of_hidden, "a"), (_penalty, "a"), (_penalty, "b"), (_first, "a"), (_first, "b")]
)
def test_gradients_inside_a_stage_are_the_models(forward: Forward, path: str) -> None:
    torch.manual_seed(0)
    assert_same_as_model(Model(forward), {"x": torch.randn(2, 4)}, path)


def _backward(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    model.a(x).sum().backward()
    return model.c(model.b(x))


def _autograd_backward(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    torch.autograd.backward([model.a(x).sum()])
    return model.c(model.b(x))


@pytest.mark.parametrize("forward", [_backward, _autograd_backward])
def test_a_backward_in_the_forward_is_refused(forward: Forward) -> None:
    schedule = cut(Model(forward), {"x": torch.randn(2, 4)}, "b")
    with pytest.raises(TraceError, match="calls backward on a tensor, which a graph cannot repeat.*test_autograd_calls"):
        build_program(schedule)
