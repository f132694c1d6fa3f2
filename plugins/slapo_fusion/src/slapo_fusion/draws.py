"""Dropout in compiled regions: masks that eager torch would draw, and the rest left to the compiler.

By itself the compiler calls torch's whole dropout for that, which is slower than eager on a CPU: it makes one tensor more.
"""

from __future__ import annotations

import copy

import torch
from torch import fx, nn
from torch.nn import functional as F


@torch.library.custom_op(
    "slapo::dropout_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)
)
def dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """What eager torch multiplies ``x`` by on a CPU, of the same random numbers."""
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


@dropout_mask.register_fake
def _(x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(x)


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """``F.dropout``, with a mask apart where the numbers are those of a CPU."""
    if not training or not 0 < p < 1 or inplace or type(input) is not torch.Tensor or input.device.type != "cpu":
        return F.dropout(input, p, training, inplace)
    mask: torch.Tensor = dropout_mask(input.detach(), p)
    return input * mask


class Dropout(nn.Module):
    """A dropout as above, with the settings of another at the time of the call."""

    def __init__(self, of: nn.Dropout) -> None:
        super().__init__()
        self.of = of

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Of its settings."""
        return dropout(input, self.of.p, self.of.training, self.of.inplace)


def with_masks_apart(region: fx.GraphModule) -> fx.GraphModule:
    """A region that draws its dropouts as above; its modules are the same ones."""
    graph = copy.deepcopy(region.graph)
    called = {str(node.target): region.get_submodule(str(node.target)) for node in graph.find_nodes(op="call_module")}
    parts = {path: Dropout(part) if type(part) is nn.Dropout else part for path, part in called.items()}
    for node in graph.find_nodes(op="call_function", target=F.dropout):
        node.target = dropout
    return fx.GraphModule(parts, graph, "Region")
