"""Fake tensors beside real values of the same run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from slapo_tracing.nodes import UnknownValueError
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


def _gather(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[mask]


def _add_last(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[mask] = 1.0
    return torch.cat([y.flatten(), y[..., mask[0]].flatten(), y.masked_select(mask[..., None])])


@pytest.mark.parametrize("index", [_gather, _add_last])
def test_masks_with_values_give_fake_tensors_of_known_shapes(index: Callable[..., torch.Tensor]) -> None:
    x, mask = torch.ones(4, 8, 8), torch.arange(32).view(4, 8) % 3 == 0
    real = index(x.requires_grad_(), mask)
    sandbox = Sandbox(nn.Linear(1, 1, device="meta"), {"mask": mask}, fake=True, keeps_values=True)
    with sandbox.open(grad=True):
        fake = index(sandbox.fake_of(x).requires_grad_(), mask)
        fake.sum().backward()
        assert fake.shape == real.shape


def test_values_without_numbers_do_not_go_into_tensors_with_numbers() -> None:
    sandbox = Sandbox(nn.Linear(1, 1, device="meta"), {}, fake=True, keeps_values=True)
    with sandbox.open(grad=False), pytest.raises(UnknownValueError, match="into a tensor of known values"):
        torch.zeros(4).copy_(sandbox.fake_of(torch.ones(4)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_copies_have_numbers_and_leave_the_model_alone(device: str) -> None:
    layer = nn.Linear(7, 61, device=device)
    sandbox = Sandbox(layer, {}, fake=False, copies=True)
    with sandbox.open(grad=True):
        assert isinstance(layer.weight, nn.Parameter)
        result = layer(sandbox.substitute_of(torch.ones(5, 7, device=device))).sum()
        result.backward()
        assert result.isfinite()
        assert layer.weight.grad is not None
    assert layer.weight.grad is None
    assert layer.weight.device.type == device
