"""A model that computes no loss of its own, given to the engine that ``import slapo`` brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo

BATCH = {"input": torch.ones(4, 2), "labels": torch.zeros(4, 1)}


class AnyKeyword(nn.Linear):
    def forward(self, input: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(super().forward(input), kwargs["labels"])


def train(model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None = None) -> Any:
    engine = slapo.build(slapo.create_schedule(model), "torch", optimizer=torch.optim.AdamW, loss_fn=loss_fn)
    return engine.train_batch(**BATCH)


def test_labels_that_nothing_takes_are_told_with_loss_fn():
    message = r"^the forward of Linear takes input and no 'labels'; build with loss_fn=, a function of \(outputs, labels\)"
    with pytest.raises(slapo.BuildError, match=message):
        train(nn.Linear(2, 1))


def test_labels_that_somebody_takes_are_taken():
    assert train(nn.Linear(2, 1), F.mse_loss).ndim == 0
    assert train(AnyKeyword(2, 1)).ndim == 0
