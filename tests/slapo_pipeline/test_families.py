"""Transformers classes in two and four stages, in train mode: outputs, loss, gradients and buffers of the unmodified model."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_core import TraceError, build_program

from .families import CLASSES, FAST, IN_TWO, REFUSED, places, small
from .family_table import table
from .stage_comparison import assert_same_as_model, cut, expected_of

EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in sorted(CLASSES) if name not in IN_TWO]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", EACH)
def test_same_loss_and_gradients(name: str) -> None:
    check(name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_same_loss_and_gradients_in_two_stages(name: str) -> None:
    check(name, 2)


def check(name: str, stages: int) -> None:
    model, batch = small(name)
    assert model.training
    expected = expected_of(model, batch)
    assert any(gradient is not None and gradient.any() for gradient in expected.gradients.values())
    assert_same_as_model(model, batch, *places(model, batch, stages), tolerance=1e-5, expected=expected)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in sorted(REFUSED)])
def test_refused_classes_say_why(name: str) -> None:
    model, batch = small(name)
    with pytest.raises(TraceError, match=REFUSED[name].told):
        build_program(cut(model, batch, *places(model, batch, 2)))


def test_there_are_sixty_classes_and_far_more_when_there_is_time() -> None:
    assert len(FAST) >= 60
    assert len(CLASSES) >= 200
    assert len(set(CLASSES)) == len(CLASSES)
    assert set(FAST) <= {*CLASSES, *REFUSED}


@pytest.mark.slow  # the names of the classes take making all models
def test_the_page_of_limits_lists_them() -> None:
    page = Path(__file__).parents[2] / "docs" / "limits.md"
    assert table() in page.read_text(), "put the output of python -m tests.slapo_pipeline.family_table there"
