"""``save`` and ``load``: what goes on exactly, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_sharding.plugin
import slapo_torch.plugin
from slapo_core.build import build
from slapo_core.errors import ScheduleError
from slapo_core.registry import Registry
from slapo_core.schedule import create_schedule
from slapo_core.testing import run_distributed

from .layouts import mesh_of, message_of


def sharded_engine(blocks: int) -> Any:
    """One layer, its output cut over two ranks in some number of blocks."""
    torch.manual_seed(0)
    plugins = Registry([slapo_sharding.plugin, slapo_torch.plugin])
    sch = create_schedule(nn.Sequential(nn.Linear(12, 12, bias=False)), mesh=mesh_of(tp=2), plugins=plugins)
    sch["0"].shard("weight", axis=0, blocks=blocks, gathered=False).sync("bwd_post", "all_reduce")
    return build(sch, "torch", loss_fn=lambda outputs, labels: outputs.mean())


def load_with_other_blocks(rank: int, path: str) -> list[Any]:
    sharded_engine(1).save(path)
    engine = sharded_engine(3)
    before = engine.module[0].weight.detach().clone()
    messages = [message_of(lambda: engine.load(path))]
    same = sharded_engine(1)
    same.load(path)
    return [*messages, torch.equal(engine.module[0].weight, before)]


@pytest.mark.multiproc
def test_shards_cut_in_other_blocks_are_refused_on_all_ranks(tmp_path: Path) -> None:
    """They have the same shape, and other rows."""
    for message, unchanged in run_distributed(load_with_other_blocks, 2, str(tmp_path)):
        assert "'0.weight' is sharded with dim=0, full_shape=(12, 12), rank=" in message
        assert "blocks=(12,), axis=tp in the checkpoint, but" in message
        assert "blocks=(4, 4, 4), axis=tp in the engine; load it into a schedule that shards alike" in message
        assert unchanged


def replicas_with_statistics(rank: int, path: str) -> list[list[Any]]:
    torch.manual_seed(0)
    mesh = mesh_of(dp=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    sch = create_schedule(model, mesh=mesh, plugins=Registry([slapo_torch.plugin]))
    engine: Any = build(sch, "torch", optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=nn.functional.mse_loss)
    batch = {"input": torch.randn(8, 4) * (1 + 9 * rank), "labels": torch.randn(8, 1)}
    for _ in range(3):
        engine.train_batch(**batch)
    before = [engine.eval_batch(**batch).item(), model[1].running_mean.tolist()]
    engine.save(path)
    engine.train_batch(**batch)
    engine.load(path)
    return [before, [engine.eval_batch(**batch).item(), model[1].running_mean.tolist()]]


@pytest.mark.multiproc
def test_every_replica_gets_its_own_buffers_back(tmp_path: Path) -> None:
    first, second = run_distributed(replicas_with_statistics, 2, str(tmp_path))
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0][1] != second[0][1]


class Scaled(nn.Module):
    """Its own weight stands where that of the layer inside was."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.ones_like(inner.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight * self.weight, self.inner.bias)


def test_two_parameters_of_one_name_are_not_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = create_schedule(model, plugins=Registry([slapo_torch.plugin]))
    sch["0"].replace(Scaled(model[0]))
    engine: Any = build(sch, "torch", loss_fn=nn.functional.mse_loss)
    with pytest.raises(ScheduleError, match="'0.weight' and '0.inner.weight' are both '0.weight'"):
        engine.save(tmp_path)
    assert not (tmp_path / "layout.json").exists()
