"""Code between a row-parallel layer and the module that reduces its partial output must be linear."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, build, create_schedule, set_random_seed
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


class Block(nn.Module):
    """Two layers, and the code of subclasses on their output before the reduction."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.again = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.norm, self.next = nn.LayerNorm(4), nn.Linear(4, 8)
        self.bias = nn.Parameter(torch.zeros(4))
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).tanh()
        return self.after(x, hidden, self.down(hidden))

    def after(self, x: torch.Tensor, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Relu(Block):
    def after(self, x: torch.Tensor, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return made.relu()


class Residual(Block):
    def after(self, x: torch.Tensor, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return x + made


class Bias(Block):
    """A bias that is still zero, so that the values of the first run are right."""

    def after(self, x: torch.Tensor, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return made.add_(self.bias)


class Buffer(Block):
    def after(self, x: torch.Tensor, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return made + self.table


class Norm(Block):
    def after(self, x: torch.Tensor, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return self.norm(made)


class Square(Block):
    def after(self, x: torch.Tensor, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return made * self.again(hidden)


class Next(Block):
    def after(self, x: torch.Tensor, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return self.next(made)


class Pair(Block):
    """The outer sync reduces only the first output."""

    def after(self, x: torch.Tensor, hidden: torch.Tensor, made: torch.Tensor) -> Any:
        return made, self.again(hidden)


class Scaled(Block):
    """Reshapes, scales and adds partial values, and reads them."""

    def after(self, x: torch.Tensor, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        assert torch.isfinite(made).all()
        assert made.relu().sum() >= 0
        parts = made.view(-1, 2, 2).transpose(1, 2).flatten(1) * 0.5 + self.again(hidden) / (1 + self.table)
        parts = torch.fft.irfft(torch.fft.rfft(parts, n=4), n=4)
        return torch.where(self.table > 1, parts, torch.zeros_like(parts)) @ torch.ones(4, 4).triu()


class Dropped(Block):
    """Dropout without a fork draws the same mask on every rank."""

    def after(self, x: torch.Tensor, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return functional.dropout(made, 0.5, self.training)


class Model(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(4, 4), block()

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(self.first(x))


def _make_schedule(model: nn.Module) -> Schedule:
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["block.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    for name in ("down", "again"):
        sch[f"block.{name}"].shard("weight", axis=1)
    sch["block"].sync("fwd_post", "all_reduce")
    return sch


WRONG: dict[type[Block], str] = {
    Relu: "relu is not linear: the sum of its results for the parts is not its result for the sum, and each rank has a "
    "part of the output of 'block.down'; give sync('fwd_post', 'all_reduce') to that layer itself; check=False",
    Residual: f"Residual 'block' at {__file__}",
    Bias: "add_ is not linear",
    Buffer: "add is not linear",
    Norm: "LayerNorm 'block.norm' at",
    Square: "mul is not linear",
}


def _wrong(rank: int) -> dict[str, str]:
    messages, x = {}, torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    for block in WRONG:
        before = Model(block)
        checked, unchecked = copy.deepcopy(before), copy.deepcopy(before)
        sch = _make_schedule(checked)
        if block is Norm:  # what an error about its gradient asks for
            sch["block.norm"].sync("grad", "all_reduce")
        build(sch)
        with pytest.raises(BuildError) as caught:
            checked(x)
        messages[block.__name__] = str(caught.value)
        build(_make_schedule(unchecked), check=False)
        with torch.no_grad():
            for model in (before, unchecked):
                model.block.bias.fill_(0.5)
        assert not torch.allclose(before(x), unchecked(x))
    return messages


def test_nonlinear_code_on_partial_values_is_an_error_that_names_the_layer() -> None:
    messages = run_distributed(_wrong, 2)[0]
    assert {block.__name__: messages[block.__name__] for block in WRONG if WRONG[block] not in messages[block.__name__]} == {}


def _given(rank: int) -> list[str]:
    messages = []
    for block in (Next, Pair):
        sch = _make_schedule(Model(block))
        sch["block.next"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        build(sch)
        with pytest.raises(BuildError) as caught:
            sch.mod(torch.ones(6, 4))
        messages.append(str(caught.value))
    return messages


def test_the_model_returns_no_partial_value() -> None:
    given, returned = run_distributed(_given, 2)[0]
    assert "a Linear that is sharded receives a partial value" in given
    assert "the model, Model, at" in returned
    assert (
        "it returns a partial value that is never reduced, and each rank has a part of the output of 'block.again'" in returned
    )


def _half(rank: int) -> str:
    """Small values are not lost in rounding, and a wider dtype is not a fault."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    for block in (Scaled, Dropped):
        model = Model(block).bfloat16()
        build(_make_schedule(model))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
    model = Model(Residual).bfloat16()
    with torch.no_grad():
        for parameter in model.first.parameters():
            parameter.mul_(1e-3)
    build(_make_schedule(model))
    with pytest.raises(BuildError) as caught, torch.no_grad():
        model(x)
    return str(caught.value)


def test_sums_of_half_precision() -> None:
    assert "add is not linear" in run_distributed(_half, 2)[0]


def _right(rank: int) -> None:
    for block in (Scaled, Dropped):
        model = Model(block)
        before = copy.deepcopy(model)
        build(_make_schedule(model))
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        for mode in (False, True):
            for each in (before.train(mode), model.train(mode)):
                each.zero_grad()
                torch.manual_seed(3)
                each(x).pow(2).sum().backward()
            assert all(
                torch.allclose(one.grad, other.grad, atol=1e-6)  # type: ignore[arg-type]
                for one, other in zip(before.first.parameters(), model.first.parameters(), strict=True)
            )
        if block is Scaled:
            assert_equivalent(before, model, x)


def test_linear_code_on_partial_values_is_no_error() -> None:
    run_distributed(_right, 2)


def _forked(rank: int) -> str:
    set_random_seed(1, tp_rank=rank)
    sch = _make_schedule(Model(Dropped))
    sch["block"].fork_rng()
    build(sch)
    with pytest.raises(BuildError) as caught:
        sch.mod(torch.ones(6, 4))
    return str(caught.value)


def test_forked_dropout_of_a_partial_value_is_refused() -> None:
    assert "dropout draws different random numbers on each rank for a partial value" in run_distributed(_forked, 2)[0]
