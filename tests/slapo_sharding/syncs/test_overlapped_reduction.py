"""A column-parallel layer reduces its input's gradient while it computes its weight's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.slapo_sharding.operators import Operators

pytestmark = pytest.mark.multiproc


class Gated(nn.Module):
    """Two layers on one value, one of which may be recomputed, and one on their product."""

    recompute = False

    def __init__(self, kind: str = "linear") -> None:
        super().__init__()
        torch.manual_seed(0)
        make = Conv1D if kind == "conv1d" else lambda out, width: nn.Linear(width, out, bias=kind != "no bias")
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(8), make(16, 8), make(16, 8), make(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        up = checkpoint(self.up, x, use_reentrant=False) if self.recompute else self.up(x)
        return self.down(torch.tanh(self.gate(x)) * up)


def _sharded(model: nn.Module, of: tuple[str, ...] = ("gate", "up"), *, sequence: bool = False) -> Schedule:
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
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


def _order(rank: int) -> list[str]:
    model = Gated()
    build(_sharded(model))
    x = torch.randn(2, 4, 8, requires_grad=True)
    model(x).sum().backward()
    loss = model(x).sum()
    with Operators() as operators:
        loss.backward()
    wanted = {"mm", "bmm", "all_reduce", "wait_tensor", "native_layer_norm_backward"}
    return [name for name in operators.names if name in wanted]


def test_a_weight_gets_its_gradient_while_the_sum_is_under_way():
    names = run_distributed(_order, 2)[0]
    start, wait = names.index("all_reduce"), names.index("wait_tensor")
    assert names.count("all_reduce") == 1
    assert names[start + 1 : wait] == ["mm", "mm"], names  # of both weights
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


@pytest.mark.sampled(2)
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


class _Drawn(nn.Module):
    """A parametrization that drops random parts of a weight at each access."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.mask = torch.rand_like(weight) < 0.5
        return weight * self.mask


def _odd(rank: int, how: str) -> None:
    model = Complex() if how == "complex" else Gated()
    model.recompute = how == "checkpoint"
    before = copy.deepcopy(model)
    build(_sharded(model))
    assert_equivalent(before, model, torch.randn(8, 8, requires_grad=True), atol=1e-4, rtol=1e-4)


class Complex(nn.Module):
    """Layers with complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.gate, self.up, self.down = (nn.Linear(*size, dtype=torch.complex64) for size in ((8, 16), (8, 16), (16, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x).to(torch.complex64) * (1 + 1j)
        return self.down(torch.tanh(self.gate(x)) * self.up(x)).abs()


@pytest.mark.parametrize("how", ["checkpoint", "complex"])
def test_odd_layers(how: str):
    run_distributed(_odd, 2, how)


def _drawn(rank: int) -> None:
    model = Gated()
    build(_sharded(model))
    model(torch.randn(3, 8)).sum().backward()
    parametrize.register_parametrization(model.up, "weight", _Drawn())
    model.zero_grad()
    model(torch.randn(3, 8)).sum().backward()
    own = model.up.parametrizations.weight
    assert own.original.grad.count_nonzero() > 0
    assert not own.original.grad[~own[0].mask].any()


def test_a_weight_that_is_drawn_at_each_access_is_read_once():
    run_distributed(_drawn, 2)


def _weight_penalty(rank: int) -> None:
    model = Gated()
    before = copy.deepcopy(model)
    build(_sharded(model))
    for each in (before, model):
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
        slopes = torch.autograd.grad(each(x).pow(2).sum(), [each.gate.weight, each.up.weight], create_graph=True)
        sum(slope.pow(2).sum() for slope in slopes).backward()
    torch.testing.assert_close(model.norm.weight.grad, before.norm.weight.grad, atol=1e-4, rtol=1e-5)


def test_gradients_of_weights_gradients():
    run_distributed(_weight_penalty, 2)


def _replaced(rank: int) -> None:
    model = Gated()
    build(_sharded(model))
    x = torch.randn(3, 8, requires_grad=True)
    model.gate(x)
    old = model.up.weight
    model.up.weight = nn.Parameter(old.detach().clone())
    model.up(x).sum().backward()
    assert old.grad is None
    assert model.up.weight.grad is not None


def test_a_weight_that_was_replaced_gets_its_gradient():
    run_distributed(_replaced, 2)
