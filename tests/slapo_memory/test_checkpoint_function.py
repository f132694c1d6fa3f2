"""``slapo.checkpoint(function, ...)``: torch's, with tracked random states and keyword arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import dropout

import slapo_memory.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import ScheduleError, create_schedule, get_cuda_rng_tracker, set_random_seed
from slapo_memory.forward_wrappers import checkpoint
from slapo_testing import isolated_plugins

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


@modes
def test_a_generator_is_refused(use_reentrant: bool) -> None:
    def parts(x: torch.Tensor) -> object:
        return (x * number for number in range(3))

    with pytest.raises(ScheduleError, match="the forward returns a generator, which runs when the checkpoint is over"):
        checkpoint(parts, torch.ones(1, requires_grad=True), use_reentrant=use_reentrant)


@modes
def test_an_iterator_is_refused_as_an_argument(use_reentrant: bool) -> None:
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(ScheduleError, match="an argument is a generator, of which nothing is left for the recompute"):
        checkpoint(sum, (x * number for number in range(3)), use_reentrant=use_reentrant)


class Output:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (lambda y: [y], "list"),
        (lambda y: {"y": y}, "dict"),
        (lambda y: (y, (y * 2, None)), "tuple"),
        (Output, "Output"),
    ],
    ids=["list", "dict", "tuple", "object"],
)
def test_tensors_that_get_no_gradients_are_refused(wrap: Callable[[torch.Tensor], object], kind: str) -> None:
    x = torch.ones(2, requires_grad=True)
    run = lambda value: wrap(value.sin())  # noqa: E731
    with pytest.raises(ScheduleError, match=f"returns tensors in a {kind}, which get no gradients with use_reentrant=True"):
        checkpoint(run, x)
    found = checkpoint(run, x, use_reentrant=False)
    inner = {
        "list": lambda: found[0],
        "dict": lambda: found["y"],
        "tuple": lambda: found[1][0] / 2,
        "Output": lambda: found.value,
    }
    inner[kind]().sum().backward()
    assert torch.allclose(x.grad, x.detach().cos())


def test_what_is_no_tensor_is_returned_as_it_is() -> None:
    marker = object()
    y, found, number, mask = checkpoint(
        lambda x: (x * 2, marker, 3, {"ids": torch.arange(2)}), torch.ones(1, requires_grad=True)
    )
    assert y.requires_grad
    assert (found, number) == (marker, 3)
    assert torch.equal(mask["ids"], torch.arange(2))


def test_a_module_that_returns_a_generator_is_refused_by_its_path() -> None:
    class Parts(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return (x * number for number in range(3))

    with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, slapo_memory.plugin):
        model = torch.nn.Sequential(Parts())
        create_schedule(model)["0"].checkpoint()
        with pytest.raises(ScheduleError, match=r"checkpoint\('0'\): the forward returns a generator"):
            model(torch.ones(1, requires_grad=True))
        assert [part.item() for part in _without_gradients(model)] == [0, 1, 2]


def test_a_module_that_gets_an_iterator_is_refused_by_its_path() -> None:
    class Summing(torch.nn.Module):
        def forward(self, parts: object) -> torch.Tensor:
            return sum(parts)

    with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, slapo_memory.plugin):
        model = torch.nn.ModuleList([Summing()])
        create_schedule(model)["0"].checkpoint()
        with pytest.raises(ScheduleError, match=r"checkpoint\('0'\): an argument is a list_iterator"):
            model[0](iter([torch.ones(1, requires_grad=True)]))


def _without_gradients(model: torch.nn.Module) -> object:
    with torch.no_grad():
        return model(torch.ones(1))
