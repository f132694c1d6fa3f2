"""``slapo.checkpoint(function, ...)``: torch's, with tracked random states and keyword arguments."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import dropout

from slapo_core.random import get_cuda_rng_tracker, set_random_seed
from slapo_memory.recompute import checkpoint

modes = pytest.mark.parametrize("use_reentrant", [True, False])


def draws(x: torch.Tensor, *, weight: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    with get_cuda_rng_tracker().fork():
        x = dropout(x * weight, p)
    return torch.tanh(dropout(x, p)) * weight


def run(function: object, **options: object) -> list[torch.Tensor]:
    set_random_seed(7, tp_rank=0)
    x, weight = torch.linspace(1, 2, 64).requires_grad_(), torch.linspace(-1, 1, 64).requires_grad_()
    out = function(draws, x * 2, weight=weight * 2, **options) if options else draws(x * 2, weight=weight * 2)
    torch.rand(5)  # the backward does not start where the forward ended
    out.sum().backward()
    return [out.detach(), x.grad, weight.grad]


@modes
def test_correctness_13_gradients_are_equal_with_tracked_states_and_keywords(use_reentrant: bool) -> None:
    for expected, found in zip(run(None), run(checkpoint, use_reentrant=use_reentrant), strict=True):
        assert torch.equal(expected, found)


@modes
def test_it_recomputes_and_keeps_nothing_in_between(use_reentrant: bool) -> None:
    runs: list[bool] = []

    def square(x: torch.Tensor) -> torch.Tensor:
        runs.append(torch.is_grad_enabled())
        return (x * x).sin()

    checkpoint(square, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert len(runs) == 2


@modes
def test_without_gradients_the_function_is_called(use_reentrant: bool) -> None:
    with torch.no_grad():
        assert checkpoint(lambda x: x + 1, torch.ones(1), use_reentrant=use_reentrant).item() == 2


@modes
def test_correctness_13_a_second_backward_is_the_same(use_reentrant: bool) -> None:
    set_random_seed(7, tp_rank=0)
    x = torch.ones(64, requires_grad=True)
    out = checkpoint(draws, x, weight=torch.ones(64), use_reentrant=use_reentrant).sum()
    out.backward(retain_graph=True)
    first = x.grad.clone()
    out.backward()
    assert torch.equal(x.grad, 2 * first)


def test_torchs_options_are_passed_on() -> None:
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False, determinism_check="nonsense")
