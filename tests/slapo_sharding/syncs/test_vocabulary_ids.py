"""Functions around a vocabulary-parallel embedding may use local ids, as classic scripts do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_sharding import plugin
from slapo_sharding.communication import reduce_forward_output
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc

Call = tuple[Any, ...]


def _masked(start: int, stop: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Install the classic pair of functions, which mask ids and zero rows of other ranks."""
    masks = []

    def before(module: nn.Module, args: Call) -> torch.Tensor:
        masks.append((args[0] < start) | (args[0] >= stop))
        return (args[0] - start).masked_fill(masks[-1], 0)

    def after(module: nn.Module, args: Call, output: torch.Tensor) -> torch.Tensor:
        output[masks.pop(), :] = 0.0
        return reduce_forward_output(output)

    return before, after


def _same(ranks: int) -> None:
    """Compare the classic pair, and functions that return the same or other global ids."""
    rows = 12 // ranks
    rank = torch.distributed.get_rank()
    functions = [
        _masked(rank * rows, rank * rows + rows),
        (lambda module, args: None, lambda module, args, output: reduce_forward_output(output)),
        (lambda module, args: args[0].clone(), lambda module, args, output: reduce_forward_output(output)),
        (lambda module, args, kwargs: ((args[0].flip(0),), kwargs), lambda module, args, output: reduce_forward_output(output)),
    ]
    for before, after in functions:
        model = nn.Sequential(nn.Embedding(12, 4, padding_idx=7), nn.Linear(4, 4))
        unmodified = copy.deepcopy(model)
        if before is functions[-1][0]:
            unmodified[0].register_forward_pre_hook(lambda module, args: (args[0].flip(0),))
        sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
        sch["0"].shard("weight", axis=0).sync("fwd_pre", before).sync("fwd_post", after)
        module = build(sch).module
        for ids in (torch.arange(12), torch.tensor([0, 1, 0]), torch.tensor([7, 8, 11, 7])):
            assert_equivalent(unmodified, module, ids)


def _rank(rank: int) -> None:
    torch.manual_seed(0)
    _same(torch.distributed.get_world_size())


@pytest.mark.parametrize("ranks", [2, 3])
def test_local_and_global_ids(ranks: int) -> None:
    run_distributed(_rank, ranks)
