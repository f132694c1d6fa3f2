"""Calls of equal modules in a trace: graphs are those of all calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import create_schedule


class Block(nn.Module):
    def __init__(self, number: int, kind: str = "") -> None:
        super().__init__()
        self.layer_idx, self.kind, self.inner = number, kind, nn.Linear(4, 4)
        self.seen: Any = None

    def forward(self, x: torch.Tensor, log: list[int] | None = None) -> torch.Tensor:
        if self.kind == "state":
            self.seen = x.shape
        if self.kind == "argument":
            x.add_(1)
        if self.kind == "same":
            return x
        if log is not None:
            log.append(self.layer_idx)
        return self.inner(x).relu()


class Net(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, kind) for number in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", ["", "argument", "same"])
def test_a_graph_calls_every_block(kind: str) -> None:
    model, x = Net(kind), torch.rand(2, 4)
    expected = model(x.clone())
    sch = create_schedule(model, example_inputs={"x": x})
    sch.trace(leaf_modules="Block")
    calls = [node for node in sch.mod.graph.nodes if node.op == "call_module"]
    assert [str(node.target) for node in calls] == [f"blocks.{number}" for number in range(5)]
    assert all(node.meta["val"].requires_grad == (kind != "same") for node in calls)
    torch.testing.assert_close(sch.mod(x.clone()), expected)


def test_a_dropout_in_every_block_is_random() -> None:
    class Dropping(Block):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.inner(x))

    model = Net()
    model.blocks = nn.ModuleList(Dropping(number) for number in range(5))
    sch = create_schedule(model, example_inputs={"x": torch.rand(2, 4)})
    sch.trace(leaf_modules="Dropping")
    calls = [node for node in sch.mod.graph.nodes if node.op == "call_module"]
    assert len({str(sorted(key for key in node.meta if key not in ("val", "source", "module"))) for node in calls}) == 1
