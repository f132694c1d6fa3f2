"""Sharded layers take their input as a keyword, under the name of their class."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, ScheduleError, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent


class Renamed(nn.Linear):
    """A Linear with another name for its input and a further argument."""

    def forward(self, hidden_states: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        return super().forward(hidden_states if scale is None else hidden_states * scale)


class Keywords(nn.Module):
    """Calls the inner module with the keyword ``name``."""

    def __init__(self, inner: nn.Module, name: str, **more: Any) -> None:
        super().__init__()
        self.inner, self.name, self.more = inner, name, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(**{self.name: x}, **self.more)


CASES = {
    "Linear": (lambda: Keywords(nn.Linear(8, 6), "input"), 0, 1, -1),
    "Linear without bias": (lambda: Keywords(nn.Linear(8, 6, bias=False), "input"), 0, 1, -1),
    "a subclass": (lambda: Keywords(Renamed(8, 6), "hidden_states"), 0, 1, -1),
    "a default": (lambda: Keywords(Renamed(8, 6), "hidden_states", scale=None), 0, 1, -1),
    "Conv1D": (lambda: Keywords(Conv1D(6, 8), "x"), 1, 0, -1),
    "Conv1d": (lambda: Keywords(nn.Conv1d(8, 6, 3), "input"), 0, 1, -2),
}
"""A model, the axes that split its weight along the output and along the input, and the dimension these then have."""


def _rows(model: nn.Module, axis: int, dim: int) -> None:
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["inner"].shard("weight", axis=axis).sync("fwd_pre", "scatter", axis=dim).sync("fwd_post", "all_reduce")
    build(sch)


def _same(rank: int, case: str, by_rows: bool) -> None:
    make, column, row, dim = CASES[case]
    torch.manual_seed(0)
    model = make()
    before = copy.deepcopy(model)
    if by_rows:
        _rows(model, row, dim)
    else:
        sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
        sch["inner"].shard("weight", axis=column).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=dim)
        build(sch)
    assert_equivalent(before, model, torch.randn(2, 8, 8, requires_grad=True))


@pytest.mark.multiproc
@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("case", CASES)
def test_correctness_04_keyword_only_calls_of_layers(case, by_rows):
    run_distributed(_same, 2, case, by_rows)


def _table(rank: int) -> None:
    model = Keywords(nn.Embedding(10, 6, padding_idx=3), "input")
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["inner"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    build(sch)
    assert_equivalent(before, model, torch.arange(10).view(2, 5))


@pytest.mark.multiproc
def test_correctness_04_keyword_only_calls_of_a_table():
    run_distributed(_table, 2)


def _other_calls(rank: int, by_rows: bool) -> tuple[str, str]:
    model = Keywords(Renamed(8, 6), "hidden_states", scale=2.0)
    if by_rows:
        _rows(model, 1, -1)
    else:
        build(
            create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))["inner"].shard(
                "weight", axis=0
            ),
            check=False,
        )
    with pytest.raises(ScheduleError) as more:
        model(torch.randn(2, 8))
    with pytest.raises(TypeError) as unknown:
        model.inner(input=torch.randn(2, 8))
    return str(more.value), str(unknown.value)


@pytest.mark.multiproc
@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
def test_a_call_that_gives_more_than_the_input_or_another_name_is_refused(by_rows):
    for more, unknown in run_distributed(_other_calls, 2, by_rows):
        assert more.startswith("a Renamed that is split is called with 'scale' besides the input")
        assert unknown == "missing a required argument: 'hidden_states'"


def _compare_compiled(rank: int) -> None:
    model = Keywords(Renamed(8, 6), "hidden_states")
    before = copy.deepcopy(model)
    _rows(model, 1, -1)
    x = torch.randn(2, 8)
    model(x)  # what is looked at in the first run is not for a graph
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), before(x))


@pytest.mark.multiproc
def test_keywords_are_compiled():
    run_distributed(_compare_compiled, 2)
