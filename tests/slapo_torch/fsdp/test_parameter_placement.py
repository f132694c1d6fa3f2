"""Placement of sharded parameters: in the model after all ranks have sharded it, and in the stages of kept plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_torch.fsdp.sharded_replicas
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_testing import run_distributed
from slapo_torch.fsdp.unit import Unit

from ..layouts import adamw, mesh_of, message_of

pytestmark = pytest.mark.multiproc


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))


def _engine(model: nn.Module, **config: Any) -> Any:
    schedule = create_schedule(
        model, mesh=mesh_of(dp=2), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin])
    )
    return build(schedule, "torch", **{"loss_fn": F.mse_loss, "optimizer": adamw, "data_parallel": "fsdp", **config})


def _out_of_memory(rank: int) -> tuple[str, bool, float]:
    """The error where one rank has no memory for its rows; whether the model is as it was; how far an engine then is."""
    model, x, labels = _model(), torch.randn(4, 8), torch.randn(4, 1)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    config: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "fsdp_units": ["0", "2", "4"]}
    made: list[Unit] = []

    def unit(*args: Any) -> Unit:
        if rank == 1 and len(made) == 2:
            raise torch.OutOfMemoryError("out of memory")
        made.append(Unit(*args))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slapo_torch.fsdp.sharded_replicas, "Unit", unit)
        message = message_of(lambda: _engine(model, **config))
    same = all(before[name][0] is p and torch.equal(before[name][1], p) for name, p in model.named_parameters())
    other = F.mse_loss(model(x), labels).detach()
    torch.distributed.all_reduce(other)
    engine = _engine(model, **config)
    return message, same, abs(engine.train_batch(input=x, labels=labels).item() - other.item() / 2)


def test_a_rank_without_memory_for_its_rows_leaves_all_models_as_they_were() -> None:
    first, second = run_distributed(_out_of_memory, 2, timeout=50)
    assert first[0].startswith("BuildError: rank 1 failed: OutOfMemoryError: out of memory")
    assert second[0].startswith("OutOfMemoryError: out of memory")
    for _, same, difference in (first, second):
        assert same
        assert difference < 1e-6


def _places(rank: int) -> list[list[bool]]:
    """Return whether two trees have the model's parameter after steps with both, the second, both, and no extra module."""
    engine = _engine(model := _model(), fsdp_units=[])
    shards, trees, found = engine._shards, [nn.Linear(1, 1), nn.Linear(1, 1)], []
    for followed in (trees, trees[1:], [trees[1], *trees[:1]], []):
        shards.gather()
        for tree in followed:
            tree.weight = model[0].weight
        shards.set_extra_modules(followed)
        shards.release()
        found.append([tree.weight is model[0].weight for tree in trees])
        engine.train_batch(input=torch.randn(2, 8), labels=torch.randn(2, 1))
    engine.close()
    return [*found, [tree is model for tree in shards._trees]]


def test_trees_that_are_no_longer_kept_are_left() -> None:
    both, second, none = [True, True], [False, True], [False, False]
    for found in run_distributed(_places, 2):
        assert found[:4] == [both, second, both, none]
        assert all(found[4])
