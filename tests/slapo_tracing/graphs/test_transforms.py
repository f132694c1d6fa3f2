"""A traced module under torch's transforms: compiled, exported, or inside of ``torch.func``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from slapo_tracing import trace
from tests.slapo_tracing.graphs.test_variants import Attention

X = torch.randn(2, 4, 8)


def loss(model: nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = functional_call(model, weights, (x,)).square().mean()
    return out


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def run_compiled(model: nn.Module, x: torch.Tensor) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="eager")(x)


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "compile": run_compiled,
    "export": lambda model, x: torch.export.export(model, (x,)).module()(x),
    "grad": lambda model, x: grad(lambda weights: loss(model, weights, x))(weights_of(model)),
    "vmap": lambda model, x: vmap(grad(lambda w, row: loss(model, w, row[None])), (None, 0))(weights_of(model), x),
    "jvp": lambda model, x: jvp(lambda x: loss(model, weights_of(model), x), (x,), (x,)),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*torch.jit.script")
@pytest.mark.parametrize("shape", [(2, 4, 8), (3, 5, 8)])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(Attention(), Attention()).eval()
    traced = trace(copy.deepcopy(model), example_inputs=(X,))
    x = torch.randn(shape)
    torch.testing.assert_close(TRANSFORMS[name](traced, x), TRANSFORMS[name](model, x))
    torch.testing.assert_close(traced(x), model(x))
