"""Traced models are cut without example inputs: the stages of their graphs, and plans with shapes for every batch."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import BuildError, Schedule, ScheduleError, TraceError, build
from slapo_pipeline.analysis import analyze_pipeline_module
from slapo_pipeline.propagation import generate_pipeline_partition, propagate_partition

from ..stage_comparison import assert_same, cut
from ..test_propagation import Coder, Pair, X, assert_runs_as

FOUR = ("encoder.block.2", "encoder", "decoder.block.2")
BATCH = (X, X + 1)


def cut_after(trace: Callable[[Schedule], Any], model: nn.Module, *paths: str) -> Schedule:
    """Trace a model without example inputs, and cut it."""
    schedule = cut(model, None)
    trace(schedule)
    for path in paths:
        schedule[path].cut_pipeline_stage()
    return schedule


TRACES: dict[str, Callable[[Schedule], Any]] = {
    "not at all": lambda sch: None,
    "each module": lambda sch: sch.trace(),
    "the model alone": lambda sch: sch.trace(recursive=False),
    "one graph": lambda sch: sch.trace(flatten=True, leaf_modules=["Block"]),
    "down to the blocks": lambda sch: sch.trace_until(["encoder.block", "decoder.block"]),
    "by one's own tracer": lambda sch: sch.trace(tracer=torch.fx.Tracer),
    "from inside": lambda sch: [sch["encoder"].trace(recursive=False), sch.trace(recursive=False)],
}


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_every_trace_is_cut(trace: Callable[[Schedule], Any]) -> None:
    paths = FOUR if trace not in (TRACES["one graph"], TRACES["down to the blocks"]) else (FOUR[0], FOUR[2])
    schedule = cut_after(trace, Pair(), *paths)
    staged = generate_pipeline_partition(schedule)
    assert list(staged.child) == [f"submod_{index}" for index in range(len(paths) + 1)]
    assert [stage.partition_idx for stage in staged.child.values()] == list(range(len(paths) + 1))
    assert {name for name, _ in staged["submod_0"].mod.named_parameters()} >= {"encoder.block.2.up.weight"}
    assert_runs_as(staged.mod, schedule.mod, *BATCH)
    assert_runs_as(staged.mod, schedule.mod, torch.randn(5, 4), y=torch.randn(5, 4))


def test_stages_run_by_themselves_for_every_shape() -> None:
    schedule = cut_after(TRACES["each module"], Pair(), "encoder")
    staged = generate_pipeline_partition(schedule)
    assert analyze_pipeline_module(staged.mod).stage_id_2_arg_names == {0: ["x"], 1: ["submod_0", "y"]}
    first, second = (stage.mod for stage in staged.child.values())
    for x in (X, torch.randn(7, 4)):
        assert_same(second(first(x=x), y=x + 1), schedule.mod(x, x + 1), "outputs")
    with pytest.raises(TraceError, match="stage 1 takes encoder, y; give these"):
        second(X)
    second.eval()
    with pytest.raises(TraceError, match="stage 1 was made in train mode; call the whole model"):
        second(X, y=X)


def test_a_module_inside_is_propagated() -> None:
    schedule = cut_after(TRACES["each module"], Pair(), "encoder.block.0", "encoder.block.1")
    module, following = propagate_partition(schedule["encoder"], 2, "encoder")
    assert (following, [name for name, _ in module.named_children()]) == (5, ["submod_2", "submod_3", "submod_4"])
    assert_same(module(X), schedule["encoder"].mod(X), "outputs")


class Several(nn.Module):
    """Tuples, a skip, a gradient region, dropout of the input, and an output in a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.a, self.b, self.c = nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        dropped = self.drop(x)
        left, right = torch.split(self.a(dropped), 2, -1)
        mixed = self.b(torch.cat([right, left], -1)) + dropped
        return {"out": self.c(mixed) + left.sum(), "parts": (left, right)}


def test_tuples_and_random_numbers_cross() -> None:
    model = Several()
    plain = copy.deepcopy(model)
    staged = generate_pipeline_partition(cut_after(TRACES["each module"], model, "a", "b"))
    torch.manual_seed(1)
    found = staged.mod(X)
    torch.manual_seed(1)
    assert_same(found, plain(X), "outputs")
    arguments = analyze_pipeline_module(staged.mod).stage_id_2_arg_names
    assert (arguments[1], arguments[2][0]) == (["submod_0.1"], "submod_0.0")


def test_a_rewritten_graph_is_cut_as_it_is() -> None:
    schedule = cut_after(TRACES["each module"], Several(), "a")
    before = schedule.mod(X)["parts"]
    schedule.replace(lambda x: (x[..., 2:], x[..., :2]), lambda x: torch.split(x, 2, -1))
    staged = generate_pipeline_partition(schedule)
    schedule.mod.eval()
    assert_same(staged.mod(X)["parts"], schedule.mod(X)["parts"], "outputs")
    assert before[0].shape == (2, 2)


def test_the_plain_model_of_a_cut_schedule_is_built() -> None:
    schedule = cut_after(TRACES["the model alone"], Coder(), "block.1")
    expected = schedule.mod(X)
    module, optimizer = build(schedule)
    assert optimizer is None
    assert_same(module(X), expected, "outputs")


class Asks(nn.Module):
    """Looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.b(self.a(x) if x.sum() > 0 else x))


def test_what_takes_example_inputs_says_so() -> None:
    with pytest.raises(
        BuildError, match="the Asks cannot be traced without example inputs; give create_schedule example_inputs="
    ):
        generate_pipeline_partition(cut(Asks(), None, "a"))
    model = nn.Sequential(OrderedDict(asks=Asks()))
    partitioned, _ = propagate_partition(cut(model, None, "asks.a"))
    positive = torch.ones(2, 4)
    assert_same(partitioned(positive), model(positive), "outputs")
    with pytest.raises(ScheduleError, match="the model does not run this module on the example inputs"):
        partitioned(-positive)
