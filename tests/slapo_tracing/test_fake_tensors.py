"""Fake tensors beside real values of the same run."""

from __future__ import annotations

import pytest
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


@pytest.mark.parametrize("shapes", [((12, 8), (3, 8, 16)), ((8, 12), (12, 16)), ((3, 4, 8), (3, 8, 16))])
def test_grouped_products_of_fp32_have_the_shape_of_real_ones(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    left, right = (torch.ones(shape) for shape in shapes)
    offsets = torch.tensor([4, 8, 12], dtype=torch.int32) if left.dim() == 2 else None
    real = torch._grouped_mm(left, right, offs=offsets)
    sandbox = Sandbox(nn.Linear(1, 1, device="meta"), {"x": left}, fake=True)
    with sandbox.open(grad=False):
        fakes = [None if each is None else sandbox.fake_of(each) for each in (left, right, offsets)]
        assert torch._grouped_mm(*fakes[:2], offs=fakes[2]).shape == real.shape
