"""Linear layers as stage 3 of ZeRO computes them, beside those of torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from slapo_deepspeed.estimation.gathered_linear import replaced_linear


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape), torch.randn(5, 4), *([torch.randn(5)] if has_bias else [])]
    expected = _values_and_gradients(tensors)
    with replaced_linear():
        found = _values_and_gradients(tensors)
    torch.testing.assert_close(found, expected)


def _values_and_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    given = [each.clone().requires_grad_() for each in tensors]
    output = functional.linear(*given)
    output.square().sum().backward()
    return [output.detach(), *(each.grad for each in given if each.grad is not None)]


def test_the_function_of_torch_comes_back_after_an_error() -> None:
    original = functional.linear
    with pytest.raises(RuntimeError, match="shapes"), replaced_linear():
        functional.linear(torch.ones(2), torch.ones(3, 3))
    assert functional.linear is original


def test_the_graph_does_not_hold_a_weight_that_was_freed() -> None:
    weight = torch.nn.Parameter(torch.randn(5, 4))
    gathered, freed = weight.data, torch.empty(5, 4)
    with replaced_linear():
        output = functional.linear(torch.randn(2, 4), weight)
    weight.data = freed
    assert output.grad_fn is not None
    assert output.grad_fn.saved_tensors[1].data_ptr() == freed.data_ptr() != gathered.data_ptr()  # type: ignore[attr-defined]
