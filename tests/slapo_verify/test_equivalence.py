"""``assert_equivalent`` accepts equal models and names the first thing that differs."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import ShardSpec, get_cuda_rng_tracker, parameter_facts, set_random_seed, successor
from slapo_testing import DistributedError, run_distributed
from slapo_verify.comparison import assert_equivalent


class Answer(nn.Module):
    """Answers with whatever ``answer(module, x)`` says."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.answer = answer

    def forward(self, x: torch.Tensor) -> Any:
        return self.answer(self, x)


def pair(change: Any) -> tuple[nn.Module, nn.Module]:
    before = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))
    after = copy.deepcopy(before)
    change(after)
    return before, after


def fails(before: nn.Module, after: nn.Module, *inputs: Any, match: str, **kwargs: Any) -> None:
    with pytest.raises(AssertionError, match=re.escape(match)):
        assert_equivalent(before, after, *inputs, **kwargs)


def test_a_copy_is_equivalent_with_the_same_dropout() -> None:
    assert_equivalent(*pair(lambda model: None), torch.randn(5, 3))


def test_grads_are_left_alone() -> None:
    before, after = pair(lambda model: None)
    mark = before[0].weight.grad = torch.full_like(before[0].weight, 7.0)
    assert_equivalent(before, after, torch.randn(5, 3))
    assert before[0].weight.grad is mark
    assert after[0].weight.grad is None


def test_another_weight_is_found_in_the_output() -> None:
    def change(model: nn.Sequential) -> None:
        model[2].bias.data[1] += 0.5

    fails(*pair(change), torch.randn(1, 3), match="output: 1 of 2 elements differ; largest absolute error 0.5 at (0, 1)")


def test_a_gradient_is_compared_under_its_original_name() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    def change(model: nn.Sequential) -> None:
        for name, parameter in model.named_parameters():
            parameter_facts(parameter).names = (name,)
        model.insert(0, nn.Identity())
        model[1].register_forward_hook(lambda module, args, out: Doubled.apply(out))

    fails(*pair(change), torch.randn(5, 3), match="gradient of '0.weight': 12 of 12 elements differ")


def test_the_gradient_of_an_input_is_compared() -> None:
    before, after = Answer(lambda m, x: x * 2), Answer(lambda m, x: x.detach() * 2 + m.weight * 0)
    before.answer = lambda m, x: x * 2 + m.weight * 0
    fails(before, after, torch.ones(3, requires_grad=True), match="gradient of input[0]: expected a float32 tensor")


def test_a_missing_gradient_is_not_zero() -> None:
    before, after = Answer(lambda m, x: x + m.weight * 0), Answer(lambda m, x: x + m.weight.detach() * 0)
    fails(
        before, after, torch.ones(3, requires_grad=True), match="gradient of 'weight': expected a float32 tensor of shape (3,)"
    )


def test_a_missing_parameter_is_named() -> None:
    before, after = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    after.weight = copy.deepcopy(before.weight)
    nn.init.zeros_(before.bias)
    fails(before, after, torch.ones(1, 2), match="gradient of 'bias': after has no parameter")


@pytest.mark.parametrize(
    ("one", "other", "match"),
    [
        (lambda m, x: (x,), lambda m, x: [x], "output: expected a tuple, found a list"),
        (lambda m, x: {"a": x, "b": x}, lambda m, x: {"a": x}, "missing [\"['b']\"]"),
        (lambda m, x: x, lambda m, x: x.double(), "expected a float32 tensor of shape (3,) on cpu, found a float64"),
        (lambda m, x: x, lambda m, x: x[None], "found a float32 tensor of shape (1, 3)"),
        (lambda m, x: (x, None), lambda m, x: (x, x), "output[1]: expected nothing"),
        (lambda m, x: (x + 1, x), lambda m, x: (x, x.double()), "output[1]: expected a float32"),
        (lambda m, x: (x, 1), lambda m, x: (x, 2), "output[1]: expected 1, found 2"),
        (lambda m, x: x / 0 - x / 0, lambda m, x: x / 0 - x / 0, "output: before has 3 NaN in 3 elements"),
        (lambda m, x: x, lambda m, x: x / 0 - x / 0, "output: after has 3 NaN"),
        (lambda m, x: x, lambda m, x: x / 0, "largest absolute error infinity"),
    ],
)
def test_what_differs_is_named(one: Any, other: Any, match: str) -> None:
    fails(Answer(one), Answer(other), torch.ones(3), match=match)


def test_equal_infinities_are_equal() -> None:
    assert_equivalent(Answer(lambda m, x: x / 0), Answer(lambda m, x: x / 0), torch.ones(3))


def test_a_wrong_softmax_gradient_is_seen() -> None:
    """The plain sum of a softmax has no gradient: comparing with it would pass anything."""
    one = Answer(lambda m, x: (m.weight * x).softmax(-1))
    other = Answer(lambda m, x: (m.weight * x).softmax(-1).detach() + 0 * m.weight)
    fails(one, other, torch.tensor([1.0, 2.0, 3.0]), match="gradient of 'weight'")


def test_the_users_loss_decides() -> None:
    one, other = Answer(lambda m, x: (x, m.weight * x)), Answer(lambda m, x: (x, m.weight * x))
    assert_equivalent(one, other, torch.ones(3), loss=lambda out: out[1].mean())
    other.answer = lambda m, x: (x, m.weight.detach() * x)
    fails(one, other, torch.ones(3), match="gradient of 'weight'", loss=lambda out: out[1].mean() + 0 * other.weight.sum())


def test_train_and_eval_do_not_compare() -> None:
    fails(*pair(lambda model: model.eval()), torch.ones(1, 3), match="before is in train mode; after is in eval mode")


def test_the_trackers_state_is_the_same_in_both_runs() -> None:
    set_random_seed(1)

    def forked(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            return x * torch.rand(3)

    assert_equivalent(Answer(forked), Answer(forked), torch.ones(3))


def sharded(rank: int, wrong: float) -> None:
    torch.manual_seed(0)
    before = nn.Linear(4, 6, bias=False)
    after = copy.deepcopy(before)
    parameter_facts(after.weight).names = ("weight",)
    spec = ShardSpec(dim=1, full_shape=(6, 4), rank=rank, num_shards=2, blocks=(4,))
    after.weight = successor(after.weight, spec.local(after.weight.data), spec=spec)
    after.forward = lambda x: _reduced(spec.local(x) @ after.weight.t() * (1 + wrong * rank))
    assert_equivalent(before, after, torch.randn(3, 4))


def _reduced(x: torch.Tensor) -> torch.Tensor:
    """All-reduce forward, identity backward."""
    total = x.detach().clone()
    torch.distributed.all_reduce(total)
    return x + (total - x.detach())


def test_a_sharded_gradient_is_gathered() -> None:
    run_distributed(sharded, 2, 0.0)


def test_a_wrong_sharded_gradient_is_found() -> None:
    with pytest.raises(DistributedError, match="output: 18 of 18 elements differ"):
        run_distributed(sharded, 2, 0.5)
