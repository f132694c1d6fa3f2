"""Arguments of the model whose names are those that a graph gives to others."""

from __future__ import annotations

import torch
from torch import nn

from slapo_core import build_program

from ..stage_comparison import assert_same, cut


class Named(nn.Module):
    """A graph calls the value of ``input`` ``input_1``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, input: torch.Tensor, input_1: torch.Tensor, mul__received: torch.Tensor) -> torch.Tensor:
        input.mul_(2.0)
        h = self.a(input_1)
        return self.b(h) * input + input_1 - mul__received


def test_what_is_received_and_what_is_read_from_the_batch_stay_apart() -> None:
    torch.manual_seed(0)
    model = Named()
    batch = {"input": torch.randn(2, 4), "input_1": torch.randn(2, 4), "mul__received": torch.randn(2, 4)}
    given = {name: value.clone() for name, value in batch.items()}
    program = build_program(cut(model, {name: value.clone() for name, value in batch.items()}, "a"))
    assert_same(program(**batch), model(**given), "outputs")
