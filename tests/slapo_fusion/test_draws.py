"""Dropouts of compiled regions have the masks that eager torch draws, and the compiler gets the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core.testing import assert_equivalent
from slapo_core.tracing import trace_module
from slapo_fusion.draws import dropout, dropout_mask, with_masks_apart

X = torch.randn(3, 4, 8)


class Model(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop, self.p = nn.Dropout(p), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.drop(x)) + F.dropout(x.transpose(0, 1), self.p, True).transpose(0, 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_it_computes_and_draws_the_same(p: float, training: bool) -> None:
    model = Model(p).train(training)
    region = with_masks_apart(trace_module(model, (X,), leaf=lambda path, module: isinstance(module, nn.Dropout)))
    assert not region.graph.find_nodes(op="call_function", target=F.dropout)
    x = X.clone().requires_grad_()
    assert_equivalent(model, region.train(training), x, atol=1e-6, rtol=1e-6)


def test_the_settings_of_a_dropout_are_those_of_the_call() -> None:
    model = Model(0.5)
    region = with_masks_apart(trace_module(model, (X,), leaf=lambda path, module: isinstance(module, nn.Dropout)))
    model.drop.p = 0.0
    model.p = 0.5
    torch.manual_seed(0)
    expected = model(X)
    torch.manual_seed(0)
    torch.testing.assert_close(region(X), expected)


def test_torch_knows_that_the_mask_is_drawn() -> None:
    torch.library.opcheck(dropout_mask, (X, 0.3), test_utils=("test_schema", "test_faketensor"))
    assert torch.Tag.nondeterministic_seeded in torch.ops.slapo.dropout_mask.default.tags


@pytest.mark.parametrize("change", [{"inplace": True}, {"p": 2.0}, {"input": X.double().to("meta")}])
def test_what_is_not_a_plain_draw_on_a_cpu_is_left_to_torch(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(F, "dropout", lambda *args: seen.append(args))
    dropout(**{"input": X, "p": 0.3, "training": True, **change})
    assert len(seen) == 1
