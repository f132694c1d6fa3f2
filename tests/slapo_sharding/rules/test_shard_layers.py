"""Sharded layers have the outputs and gradients of the unmodified ones."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, build, create_schedule, set_random_seed, shard_spec
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


def _build_split(model: nn.Module, steps: Callable[[Schedule], object]) -> tuple[nn.Module, nn.Module]:
    before = copy.deepcopy(model)
    schedule = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    steps(schedule)
    build(schedule)
    return before, model


class Two(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def _pair(model: Two, column: int, row: int) -> tuple[nn.Module, nn.Module]:
    for parameter in model.parameters():
        nn.init.normal_(parameter)

    def steps(sch: Schedule) -> None:
        sch["first"].shard(["weight", "bias"], axis=column).sync("bwd_post", "all_reduce")
        sch["second"].shard("weight", axis=row).sync("fwd_post", "all_reduce")

    return _build_split(model, steps)


def _correctness_02(rank: int) -> None:
    inputs = torch.randn(2, 3, 8, requires_grad=True)
    assert_equivalent(*_pair(Two(nn.Linear(8, 16), nn.Linear(16, 8)), 0, 1), inputs)
    assert_equivalent(*_pair(Two(Conv1D(16, 8), Conv1D(8, 16)), 1, 0), inputs)


@pytest.mark.parametrize("ranks", [2, 4])
def test_correctness_02_bias_of_a_row_parallel_layer_is_added_once(ranks):
    run_distributed(_correctness_02, ranks)


def _sync_first(rank: int) -> None:
    def steps(sch: Schedule) -> None:
        sch["first"].sync("bwd_post", "all_reduce")
        sch["second"].sync("fwd_post", "all_reduce")
        sch["second"].shard("weight", axis=-1)
        sch["first"].shard("weight", axis=-2)

    assert_equivalent(*_build_split(Two(nn.Linear(8, 16), nn.Linear(16, 8)), steps), torch.randn(3, 8, requires_grad=True))


def test_sync_may_come_before_shard():
    run_distributed(_sync_first, 2)


def _bias_after_copy(rank: int) -> None:
    before, after = _pair(Two(nn.Linear(8, 16), nn.Linear(16, 8)), 0, 1)
    x = torch.randn(3, 8)
    torch.testing.assert_close(copy.deepcopy(after)(x), before(x))


def test_correctness_02_a_copied_module_still_adds_the_bias_once():
    run_distributed(_bias_after_copy, 2)


def _scattered_row(rank: int) -> None:
    """A row-parallel layer whose output is reduce-scattered along a dimension, and gathered again."""
    for axis in (0, 1, 2, -1, -2):

        def steps(sch: Schedule, axis: int = axis) -> None:
            sch["first"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
            sch["second"].shard("weight", axis=1)
            sch["second"].sync("fwd_post", "reduce_scatter", axis=axis).sync("fwd_post", "all_gather", axis=axis)

        model = Two(nn.Linear(8, 16), nn.Linear(16, 8))
        assert_equivalent(*_build_split(model, steps), torch.randn(2, 4, 8, requires_grad=True))


def test_correctness_02_bias_and_its_gradient_under_reduce_scatter():
    run_distributed(_scattered_row, 2)


def _custom_reduce(rank: int) -> None:
    import torch.distributed.nn.functional as functional

    def steps(sch: Schedule) -> None:
        sch["first"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        sch["second"].shard("weight", axis=1).sync("fwd_post", lambda module, args, output: functional.all_reduce(output))

    before, after = _build_split(Two(nn.Linear(8, 16), nn.Linear(16, 8)), steps)
    x = torch.randn(2, 8)
    torch.testing.assert_close(after(x), before(x))


def test_correctness_02_bias_is_added_after_a_function_that_reduces():
    run_distributed(_custom_reduce, 2)


def _autocast(rank: int) -> None:
    x = torch.randn(3, 8)
    for first, second, column, row in ((nn.Linear(8, 16), nn.Linear(16, 8), 0, 1), (Conv1D(16, 8), Conv1D(8, 16), 1, 0)):
        before, after = _pair(Two(first, second), column, row)
        with torch.autocast("cpu", torch.bfloat16):
            expected, found = before(x), after(x)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.2)  # compares dtypes too


def test_correctness_02_the_bias_keeps_autocast_s_dtype():
    run_distributed(_autocast, 2)


def _compare_gathered(rank: int) -> None:
    for axis, shape in ((-1, (2, 3, 8)), (2, (2, 3, 8)), (1, (4, 8)), (-1, (8,))):

        def steps(sch: Schedule, axis: int = axis) -> None:
            sch["first"].shard("weight", axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=axis)

        assert_equivalent(
            *_build_split(Two(nn.Linear(8, 16), nn.Linear(16, 8)), steps), torch.randn(*shape, requires_grad=True)
        )


def test_correctness_03_column_parallel_gathers_on_any_dimension():
    run_distributed(_compare_gathered, 2)


def _embedding(axis: int, op: str, **options: object) -> None:
    def steps(sch: Schedule) -> None:
        sch["0"].shard("weight", axis=axis)
        sch["0"].sync("fwd_post", op, **({"axis": -1} if op == "all_gather" else {}))

    model = nn.Sequential(nn.Embedding(12, 4, **options), nn.Linear(4, 4))
    ids = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [3, 3, 6, 6, 9, 0]])
    assert_equivalent(*_build_split(model, steps), ids)


def _correctness_01(rank: int) -> None:
    _embedding(0, "all_reduce")
    for padding in (0, 3, 6, 11, -1):  # first and last row of a shard, of whichever rank
        _embedding(0, "all_reduce", padding_idx=padding)
        _embedding(1, "all_gather", padding_idx=padding)


@pytest.mark.parametrize("ranks", [2, 4])
def test_correctness_01_vocabulary_parallel_embedding_has_every_rank_s_rows(ranks):
    run_distributed(_correctness_01, ranks)


def _outside(rank: int) -> list[str]:
    sch = create_schedule(
        nn.Sequential(nn.Embedding(12, 4)), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])
    )
    sch["0"].shard("weight", axis=0)  # no sync: a rank that fails alone would leave the others waiting
    messages = []
    for index in (12, -1):
        with pytest.raises(IndexError) as caught:
            sch.mod(torch.tensor([[0, index]]))
        messages.append(str(caught.value))
    return messages


def test_correctness_01_an_index_outside_the_vocabulary_fails_on_every_rank():
    assert all("out of range" in message for messages in run_distributed(_outside, 2) for message in messages)


def _meta_and_frozen(rank: int) -> tuple[tuple[int, ...], str, bool]:
    model = nn.Sequential(nn.Linear(8, 16, device="meta"))
    model[0].weight.requires_grad_(False)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["0"].shard("weight", axis=0)
    weight = model[0].weight
    return tuple(weight.shape), weight.device.type, weight.requires_grad


def test_meta_parameters_are_sharded_as_meta():
    assert run_distributed(_meta_and_frozen, 2) == [((8, 8), "meta", False)] * 2


def test_without_processes_shard_leaves_the_numbers_and_a_spec_of_one():
    model = nn.Sequential(nn.Linear(8, 7))
    weight, before = model[0].weight, copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["0"].shard("weight", axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)
    spec = shard_spec(model[0].weight)
    assert model[0].weight is weight
    assert (spec.num_shards, spec.blocks, spec.group) == (1, (7,), None)
    assert_equivalent(before, model, torch.randn(3, 8))


def _traced(rank: int) -> None:
    from slapo_tracing import trace_module

    before, after = _pair(Two(nn.Linear(8, 16), nn.Linear(16, 8)), 0, 1)
    x = torch.randn(3, 8, requires_grad=True)
    traced = trace_module(after, (x,))
    assert traced.second is after.second
    assert_equivalent(before, traced, x)
    _traced_embedding()


def _traced_embedding() -> None:
    from slapo_tracing import trace_module

    def steps(sch: Schedule) -> None:
        sch["0"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
        sch["1"].shard("weight", axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)
        sch["2"].fork_rng()

    before, after = _build_split(nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 4), nn.Dropout(0.0)), steps)
    set_random_seed(1, tp_rank=0)
    ids = torch.randint(12, (2, 3))
    assert_equivalent(before, trace_module(after, (ids,)), ids)


def test_correctness_02_a_traced_module_keeps_its_shards_and_syncs():
    run_distributed(_traced, 2)


def _traced_first(rank: int) -> None:
    from slapo_tracing import trace_module

    model = Two(nn.Linear(8, 16), nn.Linear(16, 8))
    before, x = copy.deepcopy(model), torch.randn(3, 8, requires_grad=True)
    sch = create_schedule(
        trace_module(model, (x,), leaf=lambda path, module: True),
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]),
    )
    sch["first"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    sch["second"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    assert_equivalent(before, sch.mod, x)


def test_a_traced_module_may_be_sharded():
    run_distributed(_traced_first, 2)
