"""Backwards that can be split in two: each parameter feeds one node on the path from the inputs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slapo_training.engines.split_backward import can_split_backward

Graph = Callable[[torch.Tensor, torch.Tensor, nn.Parameter, nn.Parameter], tuple[torch.Tensor, ...]]


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (lambda x, y, v, w: (x @ v @ w,), True),
        (lambda x, y, v, w: ((x @ v).tanh() + y @ w, x), True),
        (lambda x, y, v, w: (x @ (v @ w),), True),
        (lambda x, y, v, w: (x * 2, y), True),
        (lambda x, y, v, w: ((h := x @ v), h.tanh() @ w), False),
        (lambda x, y, v, w: (x @ v @ v,), False),
        (lambda x, y, v, w: (x @ v + y @ v,), False),
        (lambda x, y, v, w: (x + (v @ w).tanh() + y * v.sum(),), False),
        (lambda x, y, v, w: (x @ v, w.exp()), False),
        (lambda x, y, v, w: (x @ v, (h := w.exp()), x + h), False),
    ],
    ids=["chain", "two", "product", "none", "sent and used", "twice", "both", "side", "lost", "given"],
)
def test_what_can_be_split(graph: Graph, expected: bool) -> None:
    x, y = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    v, w = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    assert can_split_backward(graph(x, y, v, w), (x, y)) is expected


@pytest.mark.parametrize(("reentrant", "expected"), [(False, True), (True, False)])
def test_reentrant_checkpoints_cannot_be_split(reentrant: bool, expected: bool) -> None:
    x, layer = torch.randn(2, 4, requires_grad=True), nn.Linear(4, 4)
    assert can_split_backward((checkpoint(layer, x, use_reentrant=reentrant).tanh(),), (x,)) is expected


def test_a_hook_that_waits_for_an_accumulated_gradient_is_called_where_a_backward_runs_whole() -> None:
    x, layer = torch.randn(2, 4, requires_grad=True), nn.Linear(4, 4)
    assert can_split_backward((layer(x).tanh(),), (x,))
    handle = layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    assert not can_split_backward((layer(x).tanh(),), (x,))
    handle.remove()
    assert can_split_backward((layer(x).tanh(),), (x,))


def test_what_was_received_without_a_gradient_leads_nowhere() -> None:
    assert not can_split_backward((torch.ones(2, 2) @ nn.Parameter(torch.ones(2, 2)),), (torch.ones(2, 2),))
