"""Fake tensors beside real values of the same run."""

from __future__ import annotations

import torch
from torch import nn

from slapo_tracing.recording import Sandbox


def test_a_cast_under_autocast_gives_a_fake_tensor() -> None:
    """torch computes its fake by a decomposition that makes tensors of its own; a size that no other test has is not cached."""
    layer = nn.Linear(7, 61, bias=False, device="meta")
    sandbox = Sandbox(layer, {"x": torch.ones(53, 7)}, fake=True, keeps_values=True)
    with sandbox.open(grad=True), torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(sandbox.fake_of(torch.ones(53, 7)))
    assert type(result) is not torch.Tensor


def test_values_that_depend_on_the_inputs_alone_stay_real() -> None:
    layer = nn.Linear(7, 61, device="meta")
    inputs = torch.ones(53, 7)
    sandbox = Sandbox(layer, {"x": inputs}, fake=True, keeps_values=True)
    with sandbox.open(grad=True):
        assert (inputs + 1).sum().item() == 742
