"""Sharded layers of any width, axis, group size and blocks equal the unmodified ones: outputs and every gradient."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


@dataclass(frozen=True)
class Case:
    """A column layer, whose output stays sharded or is gathered, and a row layer.

    Args:
        widths: Widths of the input, of the value between the layers, and of the output.
        leading: Shape of the input before its width.
        blocks: Blocks of the width between the layers, each of which is split.
        gathered: True if the value between the layers is gathered.
        conv1d: Use layers with transposed weights.
        bias: Give the layers a bias.
        negative: Count axes from the end.
    """

    widths: tuple[int, int, int]
    leading: tuple[int, ...]
    blocks: tuple[int, ...]
    gathered: bool
    conv1d: bool
    bias: bool
    negative: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    blocks = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    widths = (draw(st.integers(1, 5)), sum(blocks), draw(st.integers(1, 5)))
    leading = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    return Case(widths, leading, blocks, draw(st.booleans()), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))


def _same(rank: int, case: Case) -> None:
    first, between, last = case.widths
    if case.conv1d:
        model = nn.Sequential(Conv1D(between, first), nn.Tanh(), Conv1D(last, between))
    else:
        model = nn.Sequential(nn.Linear(first, between, case.bias), nn.Tanh(), nn.Linear(between, last, case.bias))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    column, row = (1, 0) if case.conv1d else (0, 1)
    column, row = (column - 2, row - 2) if case.negative else (column, row)
    blocks = list(case.blocks)
    sch["0"].shard("weight", axis=column, blocks=blocks, uneven=True, gathered=case.gathered).sync("bwd_post", "all_reduce")
    if case.gathered:
        sch["0"].sync("fwd_post", "all_gather", axis=-1)
        sch["2"].sync("fwd_pre", "scatter", axis=-1)
        blocks = [between]
    sch["2"].shard("weight", axis=row, blocks=blocks, uneven=True).sync("fwd_post", "all_reduce")
    build(sch)
    assert_equivalent(before, model, torch.randn(*case.leading, first, requires_grad=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@settings(max_examples=12, deadline=None)
@given(case=cases())
def test_column_and_row_layers(ranks: int, case: Case) -> None:
    run_distributed(_same, ranks, case)


@dataclass(frozen=True)
class Table:
    """An embedding: rows, width, shape of the indices, and the axis to split."""

    rows: int
    width: int
    indices: tuple[int, ...]
    axis: int
    padding: int | None


@st.composite
def tables(draw: st.DrawFn) -> Table:
    rows = draw(st.integers(4, 11))
    indices = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    return Table(rows, draw(st.integers(1, 9)), indices, draw(st.integers(-2, 1)), draw(st.none() | st.integers(0, rows - 1)))


def _same_table(rank: int, table: Table) -> None:
    model = nn.Sequential(nn.Embedding(table.rows, table.width, padding_idx=table.padding))
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["0"].shard("weight", axis=table.axis, uneven=True)
    if table.axis in (0, -2):
        sch["0"].sync("fwd_post", "all_reduce")
    else:
        sch["0"].sync("fwd_post", "all_gather", axis=-1)
    build(sch)
    assert_equivalent(before, model, torch.randint(table.rows, table.indices))


def _leaves_the_last_with_nothing(table: Table, ranks: int) -> bool:
    return table.axis in (0, -2) and -(-table.rows // ranks) * (ranks - 1) >= table.rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@settings(max_examples=10, deadline=None)
@given(table=tables())
def test_embeddings(ranks: int, table: Table) -> None:
    assume(not _leaves_the_last_with_nothing(table, ranks))
    run_distributed(_same_table, ranks, table)
