"""Parts of a fused output, as views of it show them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slapo_sharding.planning.dry_run.fused_sizes import fused_sizes
from slapo_tracing import trace_module


class Viewed(nn.Module):
    """A projection, and a view of what it gives."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.fused, self.shape = nn.Linear(8, 24), shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fused(x).view(self.shape)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 40, 3, 8), (8, 8, 8)),
        ((80, 3, 4, 2), (8, 8, 8)),  # batch and sequence as one
        ((2, 5, 8, 3, 2, 4), (8, 8, 8)),  # windows of the sequence
        ((2, 1, 40, 24), ()),  # the output as one: what is at its place is a length, larger than it
        ((2, 5, 8, 24), ()),
    ],
)
def test_parts_are_found_where_a_view_has_them(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    graph = trace_module(Viewed(*shape), (torch.randn(2, 40, 8),)).graph
    assert fused_sizes([node for node in graph.nodes if node.name == "linear"]) == sizes
