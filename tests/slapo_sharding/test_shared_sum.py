"""A column-parallel layer sums its input's gradient while it computes its weights', and all gradients are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from slapo_core.build import build
from slapo_core.registry import Registry
from slapo_core.schedule import Schedule, create_schedule
from slapo_core.testing import assert_equivalent, run_distributed
from slapo_sharding import plugin

pytestmark = pytest.mark.multiproc


class Gated(nn.Module):
    """Two layers on one value, and one that takes their product."""

    def __init__(self, kind: str = "linear") -> None:
        super().__init__()
        torch.manual_seed(0)
        make = Conv1D if kind == "conv1d" else lambda out, width: nn.Linear(width, out, bias=kind != "no bias")
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(8), make(16, 8), make(16, 8), make(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


def _sharded(model: nn.Module, of: tuple[str, ...] = ("gate", "up"), *, sequence: bool = False) -> Schedule:
    sch = create_schedule(model, plugins=Registry([plugin]))
    transposed = isinstance(model.gate, Conv1D)
    for name in ("gate", "up"):
        sch[name].shard("weight", axis=int(transposed))
        if sequence:
            sch[name].sync("fwd_pre", "all_gather", axis=1)
    if not sequence:
        sch.sync("bwd_post", "all_reduce", of=list(of))
    sch["down"].shard("weight", axis=int(not transposed))
    if sequence:
        sch["down"].sync("fwd_post", "reduce_scatter", axis=1).sync("fwd_post", "all_gather", axis=1)
        sch["norm"].sync("fwd_pre", "scatter", axis=1).sync("grad", "all_reduce")
    else:
        sch["down"].sync("fwd_post", "all_reduce")
    return sch


class _Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _order(rank: int) -> list[str]:
    model = Gated()
    build(_sharded(model))
    x = torch.randn(2, 4, 8, requires_grad=True)
    model(x).sum().backward()
    loss = model(x).sum()
    with _Operators() as operators:
        loss.backward()
    wanted = {"mm", "bmm", "all_reduce", "wait_tensor", "native_layer_norm_backward"}
    return [name for name in operators.names if name in wanted]


def test_weights_get_their_gradients_while_the_sum_is_under_way():
    names = run_distributed(_order, 2)[0]
    start, wait = names.index("all_reduce"), names.index("wait_tensor")
    assert names.count("all_reduce") == 1
    assert names[start + 1 : wait] == ["mm", "mm"], names  # of gate and up
    assert names[wait + 1] == "native_layer_norm_backward"


def _gradients(rank: int, kind: str) -> None:
    for shape in ((2, 4, 8), (4, 8), (8,)):
        model = Gated(kind)
        if kind == "frozen":
            model.gate.weight.requires_grad_(False)
            model.up.bias.requires_grad_(False)
        before = copy.deepcopy(model)
        build(_sharded(model))
        assert_equivalent(before, model, torch.randn(*shape, requires_grad=True))
        assert_equivalent(before, copy.deepcopy(model), torch.randn(*shape, requires_grad=True))
        assert not any("_slapo_given" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d", "frozen"])
def test_gradients(kind: str):
    run_distributed(_gradients, 2, kind)


def _copied(rank: int) -> None:
    model = Gated()
    build(_sharded(model))
    second = copy.deepcopy(model)
    second(torch.randn(3, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in second.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_copy_has_gradients_of_its_own():
    run_distributed(_copied, 2)


def _autocast(rank: int) -> None:
    model = Gated()
    before = copy.deepcopy(model)
    sch = _sharded(model)
    build(sch)
    x = torch.randn(2, 4, 8)
    for each in (before, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = each(x)
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()
    grads = sch.full_state("grad")
    for name, parameter in before.named_parameters():
        assert parameter.grad.dtype == grads[name].dtype == torch.float32
        torch.testing.assert_close(grads[name], parameter.grad, atol=3e-2, rtol=3e-2)


def test_autocast():
    run_distributed(_autocast, 2)


def _penalty(model: nn.Module, x: torch.Tensor) -> None:
    (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    slope.pow(2).sum().backward()


def _second_order(rank: int, sequence: bool) -> None:
    model = Gated()
    before = copy.deepcopy(model)
    sch = _sharded(model, sequence=sequence)
    build(sch)
    for each in (before, model):
        _penalty(each, torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_())
    expected = {name: parameter.grad for name, parameter in before.named_parameters()}
    torch.testing.assert_close(sch.full_state("grad"), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sequence", [False, True], ids=["all_reduce", "gather and scatter"])
def test_gradients_of_gradients(sequence: bool):
    run_distributed(_second_order, 2, sequence)
