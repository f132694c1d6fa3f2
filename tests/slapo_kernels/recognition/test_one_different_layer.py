"""One layer of 48 is otherwise than the rest in one small thing: it computes what it did, and the rest by kernels."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import create_schedule
from slapo_verify.comparison import assert_equivalent
from tests.slapo_kernels.kernel_calls import COUNTED, Counted, counted_kernels

DEPTH, WIDTH, ODD = 48, 8, 17


@pytest.fixture
def counted() -> Iterator[Counted]:
    with counted_kernels() as found:
        yield found


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.silu(x) * factor


once, twice = times(1.0), times(2.0)


class Norm(nn.Module):
    scale: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH) + 0.5), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            x = x + self.scale
        if "shift" in self._buffers:
            x = x + self.shift
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Act(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.act, self.function, self.flag = Act(), once, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.function(self.gate(x)) if self.flag else self.act(self.gate(x))
        out: torch.Tensor = self.down(gate * self.up(x))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.mlp(self.norm(x))  # type: ignore[no-any-return]


def other(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def odd_function(layer: Layer) -> None:
    layer.mlp.flag, layer.mlp.function = True, twice


def odd_class(layer: Layer) -> None:
    class Subclass(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.5

    layer.norm.__class__ = Subclass


ODDITIES: dict[str, tuple[Callable[[Layer], Any], dict[str, int]]] = {
    "nothing": (lambda layer: None, {}),
    "forward of the norm": (lambda layer: setattr(layer.norm, "forward", types.MethodType(other, layer.norm)), {"rms_norm": 1}),
    "partial forward": (lambda layer: setattr(layer.norm, "forward", functools.partial(other, layer.norm)), {"rms_norm": 1}),
    "attribute": (lambda layer: setattr(layer.norm, "scale", 0.25), {"rms_norm": 1}),
    "buffer": (lambda layer: layer.norm.register_buffer("shift", torch.ones(WIDTH)), {"rms_norm": 1}),
    "class": (odd_class, {"rms_norm": 1}),
    "eps": (lambda layer: setattr(layer.norm, "eps", 0.5), {}),
    "forward of the activation": (
        lambda layer: setattr(layer.mlp.act, "forward", types.MethodType(other, layer.mlp.act)),
        {"swiglu": 1},
    ),
    "activation": (lambda layer: setattr(layer.mlp, "act", nn.Tanh()), {"swiglu": 1}),
    "closure": (odd_function, {"swiglu": 1}),
    "hook": (lambda layer: layer.mlp.act.register_forward_hook(lambda module, args, out: out * 2), {"swiglu": 1}),
}
"""Change of the odd layer, and the number of kernel calls that it loses."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("oddity", ODDITIES)
def test_the_odd_layer(oddity: str, counted: Counted) -> None:
    change, lacking = ODDITIES[oddity]
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(DEPTH)))
    x = torch.randn(2, 3, WIDTH)
    usual = model(x)
    change(model[ODD])  # type: ignore[arg-type]
    expected = model(x)
    assert (oddity == "nothing") is torch.equal(usual, expected)
    create_schedule(model, plugins=counted.plugins).use_kernels(force=COUNTED)
    torch.testing.assert_close(model(x), expected)
    full = {"rms_norm": DEPTH, "swiglu": DEPTH}
    assert counted.calls == {kernel: number - lacking.get(kernel, 0) for kernel, number in full.items()}


def test_gradients_of_the_odd_layer(counted: Counted) -> None:
    model = nn.Sequential(*(Layer() for _ in range(DEPTH)))
    model[ODD].norm.eps = 0.5  # type: ignore[union-attr]
    model[ODD].mlp.act = nn.GELU()  # type: ignore[union-attr]
    before, x = copy.deepcopy(model), torch.randn(2, 3, WIDTH, requires_grad=True)
    create_schedule(model, plugins=counted.plugins).use_kernels(force=COUNTED)
    assert_equivalent(before, model, x)
    assert counted.calls == {"rms_norm": DEPTH, "swiglu": DEPTH - 1, "geglu": 1}
