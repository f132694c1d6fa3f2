"""The two lines of checkpoints in the list of what goes silently wrong, each by its number, at once and over two ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import slapo_memory.plugin
import slapo_sharding.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, create_schedule, get_cuda_rng_tracker, set_random_seed
from slapo_testing import run_distributed

pytestmark = pytest.mark.usefixtures("only_memory")

PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_memory.plugin, slapo_sharding.plugin])
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "matmuls": {"policy": "matmuls"},
    "draws": {"policy": [torch.ops.aten.bernoulli_.float, torch.ops.aten.empty_like.default, torch.ops.aten.rand_like.default]},
    "budget": {"budget": 0.5},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=[*OPTIONS])


class Layer(nn.Module):
    """Keyword arguments that would fit by position, in the wrong order; draws from two states."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.up(x) * torch.rand_like(x[..., :1])
        with get_cuda_rng_tracker().fork():
            y = nn.functional.dropout(y.relu(), 0.5)
        y = nn.functional.dropout(self.down(y), 0.3)
        y = y if mask is None else y * mask
        return y if scale is None else y + scale.exp()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](scale=x / 2, mask=(x > 0).to(x.dtype), x=x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers[1](x, scale=x.sigmoid())


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of weights and input, with the backward outside autocast and from other random states."""
    set_random_seed(3, tp_rank=0)
    model.zero_grad()
    x = x.clone().requires_grad_()
    loss = model(x).float().square().sum()
    torch.rand(5)
    with get_cuda_rng_tracker().fork():
        torch.rand(5)
    loss.backward()
    return [*(parameter.grad for parameter in model.parameters()), x.grad]


@options
def test_correctness_13_keywords_autocast_and_random_states(options: dict[str, Any]) -> None:
    set_random_seed(3, tp_rank=0)
    before, x = Model(), torch.randn(4, 8)
    sch = create_schedule(copy.deepcopy(before), example_inputs=(x,))
    sch["layers"].checkpoint(**options)
    for one, other in zip(gradients(before, x), gradients(sch.mod, x), strict=True):
        assert torch.equal(one, other)


@options
def test_correctness_13_an_input_without_gradients_still_trains_the_weights(options: dict[str, Any]) -> None:
    """A reentrant checkpoint would give none."""
    x = torch.randn(4, 8)
    before = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    sch = create_schedule(copy.deepcopy(before), example_inputs=(x,))
    sch.checkpoint(**options)
    for model in (before, sch.mod):
        model(x).square().sum().backward()
    for one, other in zip(before.parameters(), sch.mod.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Collectives(TorchDispatchMode):
    """Counts sums over ranks."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "c10d" in func.namespace and "reduce" in str(func)
        return func(*args, **(kwargs or {}))


def summed(rank: int, options: dict[str, Any], order: tuple[str, str], path: str = "1") -> tuple[int, int]:
    """How many sums a forward and its backward of a row-split layer take; outputs and gradients are the whole layer's."""
    torch.manual_seed(0)
    before, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    model = copy.deepcopy(before)
    sch = create_schedule(model, example_inputs=(x,), plugins=PLUGINS)
    sch["0"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
    sch["1"].shard("weight", axis=1)
    for step in order:
        if step == "sync":
            sch["1"].sync("fwd_post", "all_reduce")
        else:
            sch[path].checkpoint(**options)
    counts = []
    with Collectives() as collectives:
        out = model(x)
        counts.append(collectives.count)
        out.square().sum().backward()
        counts.append(collectives.count)
    expected = before(x)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    rows = slice(4 * rank, 4 * rank + 4)
    torch.testing.assert_close(sch["1"].mod.weight.grad, before[1].weight.grad[:, rows])
    torch.testing.assert_close(sch["0"].mod.weight.grad, before[0].weight.grad[rows])
    return counts[0], counts[1]


@pytest.mark.multiproc
@pytest.mark.parametrize("order", [("sync", "checkpoint"), ("checkpoint", "sync")], ids="-".join)
@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}, {"budget": 1.0}], ids=["all", "matmuls", "budget"])
def test_correctness_14_a_collective_of_sync_runs_once(options: dict[str, Any], order: tuple[str, str]) -> None:
    assert run_distributed(summed, 2, options, order, timeout=100) == [(1, 1)] * 2


def keeps_sums(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    """A policy function; operators themselves are not sent to other processes."""
    return operator is torch.ops._c10d_functional.all_reduce.default


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("options", "sums"),
    [({}, 2), ({"policy": keeps_sums}, 1), ({"budget": 1.0}, 2)],
    ids=["all", "kept", "budget"],
)
def test_correctness_14_a_sync_inside_of_a_checkpoint_is_repeated_or_kept(options: dict[str, Any], sums: int) -> None:
    assert run_distributed(summed, 2, options, ("sync", "checkpoint"), "", timeout=100) == [(1, sums)] * 2


def kept_sum(rank: int, options: dict[str, Any]) -> bool:
    """A collective inside of a checkpoint writes to what is kept: sums of the forward are not summed again."""
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)

    class Summing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ weight
            torch.distributed.all_reduce(y.detach())
            return y.sin()

    module = Summing()
    create_schedule(module, example_inputs=(x,), plugins=PLUGINS).checkpoint(**options)
    module(x).sum().backward()
    expected = x.T @ (2 * (x @ weight.detach())).cos()
    torch.testing.assert_close(weight.grad, expected)
    return True


@pytest.mark.multiproc
@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}, {"budget": 1.0}], ids=["all", "matmuls", "budget"])
def test_correctness_14_a_sum_in_place_inside_a_checkpoint_is_not_summed_twice(options: dict[str, Any]) -> None:
    assert run_distributed(kept_sum, 2, options, timeout=100) == [True, True]
