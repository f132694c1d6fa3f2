"""The trace of ``pipeline`` serves the build that follows, and only where a trace of its own would give the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import build_program
from slapo_pipeline.tracing import flat_trace, pipe_split
from slapo_tracing.tracers import selection

from ..stage_comparison import assert_same, cut

X = {"input": torch.randn(2, 8)}


class Scaled(nn.Module):
    """A block with a number that a trace takes into its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A scaled layer."""
        return self.inner(x) * self.scale


class Row(nn.Module):
    """Blocks in a list, and a number between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.shift = nn.ModuleList([Scaled() for _ in range(4)]), 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """All blocks."""
        for block in self.blocks:
            input = block(input) + self.shift
        return input


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were traced."""
    found: list[nn.Module] = []

    def traced(root: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.append(root)
        return selection.trace_module(root, *args, **kwargs)

    monkeypatch.setattr(flat_trace, "trace_module", traced)
    return found


def assert_same_as_a_copy(model: nn.Module, schedule: Any) -> None:
    before = copy.deepcopy(model)
    program = build_program(schedule)
    found, expected = program(**X), before(**X)
    assert_same(found, expected, "outputs")
    if expected.requires_grad:
        expected.sum().backward()
        found.sum().backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in before.named_parameters()}, "grad")


@pytest.mark.parametrize("how", [{"stages": 2}, {"boundaries": ["blocks.0", "blocks.2"]}])
def test_a_build_uses_it_once(traces: list[nn.Module], how: dict[str, Any]) -> None:
    model = Row()
    schedule = cut(model, X).pipeline(**how)
    assert len(traces) == 1
    assert_same_as_a_copy(model, schedule)
    assert len(traces) == 1
    model.zero_grad()
    assert_same_as_a_copy(model, schedule)
    assert len(traces) == 2


def freeze(model: Row) -> None:
    model.blocks[0].requires_grad_(False)


def freeze_all(model: Row) -> None:
    model.requires_grad_(False)


def shift(model: Row) -> None:
    model.shift = 3.0


def scale(model: Row) -> None:
    model.get_submodule("blocks.1").scale = 5.0  # type: ignore[assignment]


def another_block(model: Row) -> None:
    model.blocks[2] = nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def same_block_twice(model: Row) -> None:
    model.blocks[3] = model.blocks[2]


def one_block_less(model: Row) -> None:
    del model.blocks[3]


def hook(model: Row) -> None:
    model.blocks[3].register_forward_hook(lambda module, args, result: result * 2)


def evaluate(model: Row) -> None:
    model.eval()


def another_class(model: Row) -> None:
    class Doubled(Row):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model.__class__ = Doubled


@pytest.mark.parametrize(
    "change",
    [freeze, freeze_all, shift, scale, another_block, same_block_twice, one_block_less, hook, evaluate, another_class],
)
def test_a_model_changed_since_is_traced_anew(traces: list[nn.Module], change: Callable[[Row], None]) -> None:
    model = Row()
    schedule = cut(model, X).pipeline(2)
    change(model)
    assert_same_as_a_copy(model, schedule)
    assert len(traces) == 2


def test_without_gradients_it_is_traced_anew(traces: list[nn.Module]) -> None:
    model = Row()
    schedule = cut(model, X).pipeline(2)
    with torch.no_grad():
        build_program(schedule)
    assert len(traces) == 2


def test_a_step_of_the_schedule_between_is_seen(traces: list[nn.Module]) -> None:
    model = Row()
    schedule = cut(model, X).pipeline(2)
    schedule["blocks.3"].replace(nn.Linear(8, 8))
    assert_same_as_a_copy(model, schedule)
    assert len(traces) == 2


def test_a_copy_of_the_schedule_is_traced_anew(traces: list[nn.Module]) -> None:
    schedule = copy.deepcopy(cut(Row(), X).pipeline(2))
    assert_same_as_a_copy(schedule.mod, schedule)
    assert len(traces) == 2


def test_a_cut_at_a_mark_is_found_in_a_trace_of_its_own(traces: list[nn.Module]) -> None:
    class Marked(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            pipe_split()
            return y * self.scale

    model = Row()
    model.blocks[3] = Marked()
    schedule = cut(model, X).pipeline(2)
    schedule["blocks.3"].cut_at_marks(0)
    assert_same_as_a_copy(model, schedule)
    assert len(traces) == 2
