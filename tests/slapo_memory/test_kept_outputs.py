"""Outputs that a policy keeps equal the recomputed ones, whatever the forward does with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import create_schedule

pytestmark = pytest.mark.usefixtures("only_memory")

ADDMM = torch.ops.aten.addmm.default


class Body(nn.Module):
    """A linear layer and then what a test does with its output."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.out, self.after = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.after(self.fc(x)))).sin()


def added(y: torch.Tensor) -> torch.Tensor:
    y += 1
    return y


def added_to_a_view(y: torch.Tensor) -> torch.Tensor:
    y.view(-1)[:2].add_(1)
    return y


def multiplied(y: torch.Tensor) -> torch.Tensor:
    scores = y @ y.transpose(-1, -2)
    scores *= 0.5
    return scores.softmax(-1) @ y


CHANGES = {
    "added": added,
    "view": added_to_a_view,
    "multiplied": multiplied,
    "relu": nn.ReLU(inplace=True),
    "dropout": nn.Dropout(0.5, inplace=True),
}


def gradients(module: nn.Module, x: torch.Tensor, times: int = 1) -> list[torch.Tensor]:
    """Return the gradients of a step, or of several backwards through one forward."""
    module.zero_grad()
    torch.manual_seed(3)
    loss = module(x).square().sum()
    for left in reversed(range(times)):
        loss.backward(retain_graph=left > 0)
    return [parameter.grad.clone() for parameter in module.parameters()]


def assert_alike(module: nn.Module, policy: Any, x: torch.Tensor, times: int = 1) -> None:
    expected = gradients(copy.deepcopy(module), x, times)
    create_schedule(module).checkpoint(policy=policy)
    for one, other in zip(expected, gradients(module, x, times), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("after", CHANGES.values(), ids=[*CHANGES])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=str)
def test_an_output_that_is_written_to_is_computed_again(after: Any, shape: tuple[int, ...]) -> None:
    assert_alike(Body(after), "matmuls", torch.randn(shape))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=str)
def test_an_output_written_to_behind_the_module_is_computed_again(shape: tuple[int, ...]) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x @ weight
            return y, (y * 1).sin()

    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(shape)
    module = Two()
    create_schedule(module).checkpoint(policy="matmuls")
    y, z = module(x)
    y.detach().add_(1)
    z.sum().backward()
    flat = x.reshape(-1, 4)
    torch.testing.assert_close(weight.grad, flat.T @ (flat @ weight.detach()).cos())


def test_random_numbers_behind_a_kept_operator_that_draws() -> None:
    def noisy(y: torch.Tensor) -> torch.Tensor:
        y = y * torch.rand_like(y)  # kept: the recompute does not draw it
        return nn.functional.dropout(y, 0.5) + torch.randn_like(y)

    assert_alike(Body(noisy), [torch.ops.aten.rand_like.default], torch.randn(3, 4))


def test_a_view_in_the_list_of_operators_is_taken_again() -> None:
    assert_alike(Body(added), [torch.ops.aten.t.default, torch.ops.aten.view.default, ADDMM], torch.randn(2, 3, 4))


@pytest.mark.parametrize("policy", ["matmuls", [ADDMM]], ids=["matmuls", "operators"])
def test_a_second_backward_is_the_same(policy: Any) -> None:
    assert_alike(Body(nn.Dropout(0.5)), policy, torch.randn(3, 4), times=2)


def test_nested_checkpoints_keep_their_own() -> None:
    body = nn.Sequential(Body(added), nn.Dropout(0.5), Body(nn.Dropout(0.5)))
    create_schedule(body)["0"].checkpoint(policy=[ADDMM])
    create_schedule(body)["2"].checkpoint(policy="matmuls")
    assert_alike(body, "matmuls", torch.randn(3, 4))


def test_a_policy_function_sees_the_output() -> None:
    seen: list[Any] = []

    def large(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
        seen.append((operator, context.op_output, args, kwargs))
        return operator is ADDMM and context.op_output.shape[0] > 2

    assert_alike(Body(added), large, torch.randn(3, 4))
    assert any(operator is ADDMM and output.shape == (3, 4) and len(args) == 3 for operator, output, args, _ in seen)
