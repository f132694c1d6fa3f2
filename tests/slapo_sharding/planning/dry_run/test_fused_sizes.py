"""Sizes of the parts of a fused output, found in views of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slapo_sharding.planning.dry_run.split_specs import fused_sizes
from slapo_tracing import trace_module


class Viewed(nn.Module):
    """Projection with a view of its output."""

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
        ((2, 1, 40, 24), ()),  # no parts: the dimension at that index is the length
        ((2, 5, 8, 24), ()),
    ],
)
def test_parts_are_found_as_dimensions_of_a_view(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    graph = trace_module(Viewed(*shape), (torch.randn(2, 40, 8),)).graph
    assert fused_sizes([node for node in graph.nodes if node.name == "linear"]) == sizes
