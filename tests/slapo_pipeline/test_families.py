"""Transformers classes in two and four stages, in train mode: outputs, loss, gradients and buffers of the unmodified model."""

from __future__ import annotations

import pytest

from .families import CLASSES, FAST, places, small
from .staged import assert_same_as_model

EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in sorted(CLASSES)]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", EACH)
def test_same_loss_and_gradients(name: str, stages: int) -> None:
    model, batch = small(name)
    assert model.training
    assert_same_as_model(model, batch, *places(model, batch, stages), tolerance=1e-5)
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_there_are_sixty_classes() -> None:
    assert len(FAST) >= 60
    assert set(FAST) <= set(CLASSES)
