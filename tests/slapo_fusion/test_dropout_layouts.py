"""Compiled dropout draws the unmodified model's masks in whatever order of memory its values are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import build, create_schedule

pytestmark = pytest.mark.slow


class Dropped(nn.Module):
    def __init__(self, inside: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.bias, self.inside = nn.Parameter(torch.randn(7)), inside

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.inside(x + self.bias), 0.5, self.training) + self.inside(y)


class Model(nn.Module):
    def __init__(self, inside: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.part = Dropped(inside)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.part(x, y)


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": as_it_is,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch last": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:1].expand(2, 5, 7),
}


@pytest.mark.parametrize("inside", [as_it_is, transposed])
@pytest.mark.parametrize("order", ORDERS)
def test_masks_are_those_of_the_unmodified_model(order: str, inside: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Model(inside)
    plain = copy.deepcopy(model)
    x, y = ORDERS[order](torch.randn(2, 5, 7)), torch.randn(2, 5, 7)
    sch = create_schedule(model, example_inputs=(x, y))
    sch["part"].compile()
    build(sch)
    for _ in range(2):
        torch.manual_seed(1)
        expected = plain(x, y)
        torch.manual_seed(1)
        torch.testing.assert_close(model(x, y), expected)
