"""Dropouts of compiled regions have the masks that eager torch draws, and the compiler gets the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import create_schedule
from slapo_fusion.compilers import with_cpu_operators
from slapo_fusion.cpu_operators import DropoutFunction, dropout, dropout_mask, fast_dropout, fast_dropout_mask
from slapo_tracing import trace_module
from slapo_verify.comparison import assert_equivalent

X = torch.randn(3, 4, 8)


class Model(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop, self.p = nn.Dropout(p), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.drop(x)) + F.dropout(x.transpose(0, 1), self.p, True).transpose(0, 1)


class Dropped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.dropout(x, 0.25, True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_it_computes_and_draws_the_same(p: float, training: bool) -> None:
    model = Model(p).train(training)
    region = with_cpu_operators(trace_module(model, (X,), leaf=lambda path, module: isinstance(module, nn.Dropout)))
    assert not region.graph.find_nodes(op="call_function", target=F.dropout)
    x = X.clone().requires_grad_()
    assert_equivalent(model, region.train(training), x, atol=1e-6, rtol=1e-6)


def test_the_settings_of_a_dropout_are_those_of_the_call() -> None:
    model = Model(0.5)
    region = with_cpu_operators(trace_module(model, (X,), leaf=lambda path, module: isinstance(module, nn.Dropout)))
    model.drop.p = 0.0
    model.p = 0.5
    torch.manual_seed(0)
    expected = model(X)
    torch.manual_seed(0)
    torch.testing.assert_close(region(X), expected)


def test_torch_knows_that_the_mask_is_drawn() -> None:
    for mask, arguments in ((dropout_mask, (X, 0.3)), (fast_dropout_mask, (X, 19661))):
        torch.library.opcheck(mask, arguments, test_utils=("test_schema", "test_faketensor"))
    for name in ("dropout_mask", "fast_dropout_mask"):
        assert torch.Tag.nondeterministic_seeded in getattr(torch.ops.slapo, name).default.tags


@pytest.mark.parametrize("draw", [dropout, fast_dropout])
@pytest.mark.parametrize("change", [{"inplace": True}, {"p": 2.0}, {"p": float("nan")}, {"input": X.double().to("meta")}])
def test_what_is_not_a_plain_draw_on_a_cpu_is_left_to_torch(
    change: dict[str, Any], draw: DropoutFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(F, "dropout", lambda *args: seen.append(args))
    draw(**{"input": X, "p": 0.3, "training": True, **change})
    assert len(seen) == 1


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_fast_masks_are_equal_in_distribution(p: float) -> None:
    torch.manual_seed(0)
    ones = torch.ones(4, 250_001)  # no multiple of what one draw gives
    y = fast_dropout(ones, p)
    kept = y != 0
    within = 4 * (p * (1 - p) / ones.numel()) ** 0.5  # four times what chance makes
    assert abs(kept.double().mean() - (1 - p)) < within + 1 / (1 << 17)
    assert (y[kept] * (1 - p) - 1).abs().max() < 1e-3
    neighbours = (~kept[:, 1:] & ~kept[:, :-1]).double().mean()
    assert abs(neighbours - p * p) < 4 * (p * p * (1 + 2 * p) / ones.numel()) ** 0.5 + 1e-5
    assert (~kept[0] & ~kept[1]).double().mean() == pytest.approx(p * p, rel=0.1)


def test_fast_masks_come_from_the_generator_of_torch() -> None:
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(fast_dropout(X, 0.5))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.random.get_rng_state().ne(torch.Generator().manual_seed(1).get_state()).any()


@pytest.mark.parametrize("p", [1e-6, 0.001, 1 - 1e-6])
def test_probabilities_that_16_bits_cannot_give_have_the_masks_of_torch(p: float) -> None:
    torch.manual_seed(0)
    y = fast_dropout(X, p)
    torch.manual_seed(0)
    torch.testing.assert_close(y, F.dropout(X, p))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow), torch.bfloat16])
def test_a_fused_region_with_fast_masks_has_the_gradients_of_its_mask(dtype: torch.dtype) -> None:
    x = X.to(dtype, copy=True).requires_grad_()
    sch = create_schedule(Dropped(), example_inputs=(x,)).trace()
    sch.fuse(sch.find(lambda x: torch.tanh(F.dropout(x, 0.25, True))), compiler="inductor_fast_dropout")
    y = sch.mod(x)
    y.sum().backward()
    kept = y != 0
    assert 0.5 < kept.double().mean() < 1
    close = {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y[kept], torch.tanh(x.detach()[kept] / 0.75), **close)
    torch.testing.assert_close(x.grad, (1 - y * y).detach() * kept / 0.75, **close)
