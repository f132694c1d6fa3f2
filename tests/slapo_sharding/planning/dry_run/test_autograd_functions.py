"""A model's own autograd functions between layers: split if forward and backward work on shards, else whole."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import build, create_schedule
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc
WIDTH = 8


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        z = x.sigmoid()
        return grad * (z + x * z * (1 - z))


class ClippedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


class ScaledByWidth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / math.sqrt(x.size(-1))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / math.sqrt(grad.size(-1))


class LearnedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, step)
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, step = ctx.saved_tensors
        return grad, (grad * ((x / step).round() - x / step)).sum()


class SizedStep(LearnedStep):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given, step = LearnedStep.backward(ctx, grad)
        return given, step / math.sqrt(grad.numel())


class Mlp(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), function
        self.step = nn.Parameter(torch.tensor(0.25)) if issubclass(function, LearnedStep) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = (self.up(x),) if self.step is None else (self.up(x), self.step)
        return self.down(self.function.apply(*given))  # type: ignore[no-untyped-call, no-any-return]


class TwoMlps(nn.Module):
    """Two MLPs, of which one has an autograd function; the other is always split."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.own = Mlp(function)
        self.plain = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.own(x)
        return x + self.plain(x)


def compare_mlps(rank: int, function: type[torch.autograd.Function]) -> tuple[bool, bool]:
    """Compare outputs and gradients; return for each MLP if it is split."""
    torch.manual_seed(0)
    expected = TwoMlps(function)
    model = copy.deepcopy(expected)
    sch = create_schedule(model, example_inputs=(torch.randn(2, 4, WIDTH),))
    sch.tensor_parallel()
    build(sch)
    for rows in (2, 3):
        x = torch.randn(rows, 4, WIDTH, generator=torch.Generator().manual_seed(rows))
        for each in (expected, model):
            each.zero_grad()
            each(x).square().mean().backward()
        torch.testing.assert_close(model(x), expected(x))
        found = sch.full_state("grad")
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
    return model.own.up.weight.shape[0] < 4 * WIDTH, model.plain[0].weight.shape[0] < 4 * WIDTH


@pytest.mark.parametrize(
    ("function", "is_split"),
    [(Swish, True), (LearnedStep, True), (ClippedGradient, False), (ScaledByWidth, False), (SizedStep, False)],
)
def test_layers_around_a_function_are_split_if_its_backward_works_on_shards(function: type[Any], is_split: bool) -> None:
    assert run_distributed(compare_mlps, 2, function) == [(is_split, True)] * 2


class Gated(nn.Module):
    """Module with a factor of its own between sharded layers, and a norm that communicates."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(4 * WIDTH)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.up(x).tensor_split(2, -1)
        return self.down(self.norm(x * gate.sigmoid() * self.factor))  # type: ignore[no-any-return]


def compare_gradients(sch: Any, expected: nn.Module, x: torch.Tensor) -> None:
    """Compare all gradients of one step with those of the unmodified model."""
    for each in (expected, sch.mod):
        each(x).square().mean().backward()
    found = sch.full_state("grad")
    for name, parameter in expected.named_parameters():
        if parameter.grad is not None:  # the force does not depend on the last bias of the energy
            torch.testing.assert_close(found[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert found[name] is None or not found[name].any()


def gradients_of_the_factor(rank: int) -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(Gated(), nn.LayerNorm(WIDTH))
    model = copy.deepcopy(expected)
    sch = create_schedule(model, example_inputs=(torch.randn(2, 4, WIDTH),))
    sch.tensor_parallel()
    build(sch)
    compare_gradients(sch, expected, torch.randn(3, 5, WIDTH))
    assert model[0].up.weight.shape[0] == 4 * WIDTH


def test_a_factor_beside_a_norm_over_the_sharded_width() -> None:
    run_distributed(gradients_of_the_factor, 2)


class Force(nn.Module):
    """Gradient of an energy, as in models of molecules."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force


class WithForce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.force = Force()
        self.plain = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x + self.force(x))  # type: ignore[no-any-return]


def split_with_a_force(rank: int, kind: type[nn.Module]) -> bool:
    torch.manual_seed(0)
    expected = kind()
    model = copy.deepcopy(expected)
    sch = create_schedule(model, example_inputs=(torch.randn(2, 4, WIDTH),))
    sch.tensor_parallel()
    build(sch)
    compare_gradients(sch, expected, torch.randn(3, 4, WIDTH))
    energy = model.energy if kind is Force else model.force.energy
    return energy[0].weight.shape[0] < 4 * WIDTH


@pytest.mark.parametrize("kind", [Force, WithForce])
def test_submodules_of_a_module_that_calls_autograd_grad_are_split(kind: type[nn.Module]) -> None:
    assert run_distributed(split_with_a_force, 2, kind) == [True, True]


class Scaling(torch.autograd.Function):
    """Autograd function that scales its gradient by the length, or does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mixes: bool) -> torch.Tensor:
        ctx.mixes = mixes
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / grad.norm() if ctx.mixes else grad * 2, None


class ScalingMlp(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.up, self.down, self.mixes = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(Scaling.apply(self.up(x), self.mixes))  # type: ignore[no-any-return]


def sharded_by_hand(rank: int, mixes: bool) -> None:
    torch.manual_seed(0)
    expected = ScalingMlp(mixes)
    model = copy.deepcopy(expected)
    sch = create_schedule(model)
    sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    build(sch)
    compare_gradients(sch, expected, torch.randn(3, WIDTH))


def test_a_function_between_layers_sharded_by_hand() -> None:
    run_distributed(sharded_by_hand, 2, False)
    with pytest.raises(
        Exception, match=r"Scaling needs all of it, or its backward all of the gradient, and each rank has a part"
    ):
        run_distributed(sharded_by_hand, 2, True)


class Counting(torch.autograd.Function):
    """Autograd function that counts its calls, like the hooks that engines install."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def with_hooks_of_an_engine(rank: int) -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    sch = create_schedule(copy.deepcopy(expected))
    sch["0"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    build(sch)
    shapes = []

    def count(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        shapes.append(args[0].shape)
        return (Counting.apply(*args),)

    sch.mod[1].register_forward_pre_hook(count)
    compare_gradients(sch, expected, torch.randn(3, WIDTH))
    assert Counting.calls == len(shapes)


def test_autograd_functions_of_hooks_are_not_probed() -> None:
    run_distributed(with_hooks_of_an_engine, 2)
