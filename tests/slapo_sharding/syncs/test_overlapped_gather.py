"""Layers save this rank's shard of a gathered value and gather it again in the backward."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, build, create_schedule
from slapo_sharding import plugin
from slapo_sharding.syncs.overlapped_reduction import _RegatheredInput
from slapo_testing import run_distributed
from tests.slapo_sharding.operators import Operators

pytestmark = pytest.mark.multiproc

BATCH, LENGTH, WIDTH = 4, 8, 8


class Gated(nn.Module):
    """Two layers on the gathered value, passed in the way ``how``, and one on their product."""

    how = "as it is"

    def __init__(self, kind: str) -> None:
        super().__init__()
        make = Conv1D if kind == "conv1d" else lambda out, width: nn.Linear(width, out, bias=kind != "no bias")
        self.gate, self.up, self.down = make(16, WIDTH), make(16, WIDTH), make(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate, self.up
        given = _GIVEN[self.how]
        if self.how == "changed in place":
            gated = gate(x.clone())
            x.mul_(2)
            return self.down(torch.tanh(gated) * up(x))
        if self.how == "changed between":
            gated = gate(x)
            return self.down(torch.tanh(gated.clone()) * up(x.mul(1).add_(1)))
        if self.how == "recomputed":
            return self.down(torch.tanh(gate(x)) * checkpoint(up, x, use_reentrant=False))
        if self.how == "one twice":
            return self.down(torch.tanh(gate(x)) * up(x) * gate(x))
        if self.how == "by name":
            return self.down(torch.tanh(gate(**{_argument(gate): x})) * up(x))
        return self.down(torch.tanh(gate(x)) * up(given(x)).view(*x.shape[:-1], -1))


def _argument(layer: nn.Module) -> str:
    return "x" if isinstance(layer, Conv1D) else "input"


_GIVEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "flattened": lambda x: x.view(-1, x.shape[-1]),
    "all of it": lambda x: x[:, slice(0, None), :],
    "one by one": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "another": lambda x: x + 1,
    "changed in place": lambda x: x,
    "changed between": lambda x: x,
    "recomputed": lambda x: x,
    "one twice": lambda x: x,
    "by name": lambda x: x,
}


class Block(nn.Module):
    """A module between two sharded values."""

    def __init__(self, kind: str = "linear", how: str = "as it is") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Gated(kind)
        self.mlp.how = how
        for name, parameter in self.mlp.named_parameters():
            parameter.requires_grad_(name not in _FROZEN.get(kind, ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


_FROZEN = {
    "a frozen weight": ("gate.weight",),
    "a frozen layer": ("up.weight", "up.bias"),
    "frozen": tuple(f"{name}.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")),
}


def _sharded(model: Block, axis: int = 1) -> Schedule:
    """Shard a model with replicated inputs and outputs."""
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    transposed = isinstance(model.mlp.gate, Conv1D)
    if any(parameter.requires_grad for parameter in model.norm.parameters()):
        sch["norm"].sync("grad", "all_reduce")
    sch["norm"].sync("fwd_pre", "scatter", axis=axis)
    sch["mlp"].sync("fwd_pre", "all_gather", axis=axis)
    for name in ("gate", "up"):
        sch["mlp"][name].shard("weight", axis=int(transposed))
    sch["mlp.down"].shard("weight", axis=int(not transposed)).sync("fwd_post", "reduce_scatter", axis=axis)
    sch["mlp"].sync("fwd_post", "all_gather", axis=axis)
    return sch


def _input(seed: int = 1) -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _backward(model: nn.Module, x: torch.Tensor, how: str) -> torch.Tensor:
    """Run a backward and return the gradient of ``x``; gradients of parameters accumulate."""
    if how == "penalty":
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        return slope.detach()
    if how == "penalty of weights":
        weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        slopes = torch.autograd.grad(model(x).pow(2).sum(), weights, create_graph=True)
        sum(slope.pow(2).sum() for slope in slopes).backward()
    elif how == "twice":
        loss = model(x).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    elif how == "input first":
        loss = model(x).pow(2).sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
    elif how == "two at once":
        first, second = model(x), model(2 * x)
        (first * second).sum().backward()
    elif how == "all recomputed":
        checkpoint(model, x, use_reentrant=False).pow(2).sum().backward()
    else:
        model(x).pow(2).sum().backward()
    return x.grad


def _compare(rank: int, kind: str, how: str, backward: str, axis: int = 1) -> None:
    model = Block(kind, how)
    before = copy.deepcopy(model)
    sch = _sharded(model, axis)
    build(sch)
    for _ in range(2):  # the first run is looked at
        model.zero_grad()
        before.zero_grad()
        found, expected = (_backward(each, _input(), backward) for each in (model, before))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        grads = {name: parameter.grad for name, parameter in before.named_parameters()}
        torch.testing.assert_close(sch.full_state("grad"), grads, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_axes(axis: int):
    run_distributed(_compare, 4, "linear", "as it is", "plain", axis)


@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d", *_FROZEN])
def test_layers(kind: str):
    run_distributed(_compare, 2, kind, "as it is", "plain")


@pytest.mark.parametrize("how", [*_GIVEN])
def test_ways_to_pass_the_gathered_value(how: str):
    run_distributed(_compare, 2, "linear", how, "plain")


@pytest.mark.parametrize("backward", ["penalty", "penalty of weights", "twice", "input first", "two at once", "all recomputed"])
def test_backwards(backward: str):
    run_distributed(_compare, 2, "linear", "as it is", backward)


def _order(rank: int) -> list[str]:
    model = Block()
    build(_sharded(model))
    model(_input()).sum().backward()
    loss = model(_input()).sum()
    with Operators() as operators:
        loss.backward()
    calls = {"mm": "matrix", "bmm": "matrix", "all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}
    calls |= {"all_reduce": "sum", "wait_tensor": "wait", "native_layer_norm_backward": "norm"}
    return [calls[name] for name in operators.names if name in calls]


def test_gather_and_scatter_overlap_with_computation():
    bias = ["sum", "wait"]  # of the split output
    down = ["gather", "wait", "matrix", "matrix"]  # the gradient of the split output; of down's input and weight
    inputs = ["gather", "matrix", "matrix"]  # the value is gathered while the gradients of the layers' inputs are computed
    weights = ["scatter", "wait", "matrix", "matrix", "wait"]  # their sum is scattered while the weights' are computed
    names = run_distributed(_order, 2)[0]
    assert names[: names.index("norm")] == [*bias, *down, *inputs, *weights], names


def _kept(rank: int) -> None:
    model = Block()
    build(_sharded(model))
    model(_input()).sum().backward()
    loss = model(_input()).sum()
    loss.backward(retain_graph=True)
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is _RegatheredInput]
    assert alive
    assert all(each.started is None and each.gathered is None for each in alive)


def test_regathered_inputs_are_released():
    run_distributed(_kept, 2)


def _autocast(rank: int) -> None:
    model = Block()
    before = copy.deepcopy(model)
    sch = _sharded(model)
    build(sch)
    for each in (before, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = each(_input())
        output.float().pow(2).sum().backward()
    grads = sch.full_state("grad")
    for name, parameter in before.named_parameters():
        assert parameter.grad.dtype == grads[name].dtype == torch.float32
        torch.testing.assert_close(grads[name], parameter.grad, atol=3e-1, rtol=3e-2)


def test_autocast():
    run_distributed(_autocast, 2)


def _copied(rank: int) -> None:
    model = Block()
    build(_sharded(model))
    second = copy.deepcopy(model)
    second(_input()).sum().backward()
    assert all(parameter.grad is not None for parameter in second.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_copy_has_gradients_of_its_own():
    run_distributed(_copied, 2)


def _between(rank: int, how: str) -> None:
    """Code and hooks between the gathered value and a layer run in the backward."""
    model = Block()
    before = copy.deepcopy(model)
    build(_sharded(model))
    grads = []
    for each in (before, model):
        each.mlp.register_forward_pre_hook(_PUT[how])
        if how == "a hook of the backward":
            each.mlp.gate.register_full_backward_hook(lambda module, grads, outputs: (3 * grads[0],))
        x = _input()
        for _ in range(2):
            x.grad = None
            each(x).pow(2).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], atol=1e-4, rtol=1e-4)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


def _unknown(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    with torch.no_grad():
        return (args[0].view_as(args[0]),)


def _hooked(module: nn.Module, args: tuple[torch.Tensor]) -> None:
    args[0].register_hook(lambda grad: 2 * grad)


_PUT: dict[str, Callable[..., Any]] = {
    "a function": lambda module, args: (_Reversed.apply(args[0]),),
    "a view without a gradient": _unknown,
    "a hook of the value": _hooked,
    "a hook of the backward": lambda module, args: None,
}


@pytest.mark.parametrize("how", _PUT)
def test_code_between_the_gathered_value_and_a_layer(how: str):
    run_distributed(_between, 2, how)


def _odd(rank: int, how: str) -> None:
    model = Block()
    before = copy.deepcopy(model)
    sch = _sharded(model)
    build(sch)
    for each in (before, model):
        gated = each.mlp
        if how == "in place":
            gated.gate.register_forward_hook(lambda module, args, output: output.relu_())
        elif how == "nested checkpoints":
            plain = gated.up.forward
            gated.up.__dict__["forward"] = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
        x = _input()
        if how == "nested checkpoints":
            checkpoint(each, x, use_reentrant=False).sum().backward()
        elif how == "anomaly":
            with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
                each(x).sum().backward()
        else:
            each(x).sum().backward()
    expected = {name: parameter.grad for name, parameter in before.named_parameters()}
    torch.testing.assert_close(sch.full_state("grad"), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("how", ["in place", "nested checkpoints", "anomaly"])
def test_odd_runs(how: str):
    run_distributed(_odd, 2, how)


def _detached(rank: int) -> None:
    """Layers that take the user's leaf tensor: the backward ends there."""
    model = Block()
    build(_sharded(model), check=False)
    plain = model.mlp.forward
    model.mlp.forward = lambda x: plain(x.detach().requires_grad_())
    for _ in range(2):
        model(_input()).sum().backward()
    assert model.norm.weight.grad is None
    assert model.mlp.gate.weight.grad is not None


def test_a_leaf_ends_the_backward():
    run_distributed(_detached, 2)


def _batched(rank: int) -> str:
    model = Block()
    build(_sharded(model))
    x = _input()
    loss = model(x).sum((0, 1))
    with pytest.raises(RuntimeError) as err:
        torch.autograd.grad(loss, x, torch.eye(WIDTH), is_grads_batched=True)
    return str(err.value)


def test_batched_gradients_are_refused():
    assert "one gradient at a time; leave out is_grads_batched" in run_distributed(_batched, 2)[0]
