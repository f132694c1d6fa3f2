"""A head count that may be the global one is not taken for the local one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc

PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin])
X = torch.arange(12.0).view(3, 4).cos()


class Between(nn.Module):
    """A function runs between the layers."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(4, 24), nn.Linear(24, 4), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


class Counted(nn.Module):
    """The attribute for the head count has an unknown name."""

    def __init__(self, size: int = -1) -> None:
        super().__init__()
        self.up, self.down, self.parts, self.size = nn.Linear(4, 16), nn.Linear(16, 4), 4, size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).view(x.shape[0], self.parts, self.size)
        return self.down((heads * heads.softmax(-1)).flatten(1))


def _message(model: nn.Module) -> str:
    sch = create_schedule(model, plugins=PLUGINS)
    sch.tensor_parallel({"up": "colwise", "down": "rowwise"})
    module = build(sch).module
    with pytest.raises(BuildError) as caught:
        module(X)
    return str(caught.value)


def _count(rank: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(Counted())
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=PLUGINS, example_inputs=X)
    sch.tensor_parallel()
    assert (before[0].parts, model[0].parts) == (4, 2)
    assert_equivalent(before, build(sch).module, X)
    assert_equivalent(before, copy.deepcopy(model), X)
    sch = create_schedule(copy.deepcopy(before), plugins=PLUGINS, example_inputs=X)
    sch.tensor_parallel().trace(flatten=True)
    assert_equivalent(before, build(sch).module, X)
    model = copy.deepcopy(before)
    sch = create_schedule(model, plugins=PLUGINS, example_inputs=X)
    sch.tensor_parallel()
    sch.undo()
    assert vars(model[0]) == {**vars(before[0]), **{name: vars(model[0])[name] for name in vars(model[0]) if name[0] == "_"}}
    return [
        _message(Counted()),
        _message(Between(lambda x: x.unflatten(-1, (2, -1)).softmax(-1).flatten(1))),
        _message(Between(lambda x: x.reshape(3, 2, -1).mean(-1).repeat_interleave(6, 1))),
        _message(Counted(size=4)),
    ]


def test_a_head_count_that_may_be_global_is_refused() -> None:
    *unclear, wrong = run_distributed(_count, 2)[0]
    for message, call in zip(unclear, ("view is given 4", "unflatten is given 2", "reshape is given 2"), strict=True):
        assert f"{call}, which may be the number for all ranks or for one, and each rank has a part of the output of" in message
        assert "'up'; give the size of each one and -1 for their number" in message
    assert "view fails" in wrong
