"""Layers that a model selects by name: those that the example inputs did not run are split like the one that ran."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import build, create_schedule, is_sharded
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.slapo_torch.layouts import mesh_of

pytestmark = pytest.mark.multiproc

_RANKS = {"first": 4, "second": 2, "narrow": 4}


class Adapted(nn.Module):
    """Layer with pairs of low-rank layers beside it, of which one is used."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.name = nn.Linear(inputs, outputs), "first"
        self.a = nn.ModuleDict({name: nn.Linear(inputs, rank, bias=False) for name, rank in _RANKS.items()})
        self.b = nn.ModuleDict({name: nn.Linear(rank, outputs, bias=False) for name, rank in _RANKS.items()})
        self.drop = nn.ModuleDict({name: nn.Dropout(0.5) for name in _RANKS})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b[self.name](self.a[self.name](self.drop[self.name](x)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapted(8, 16), Adapted(16, 8)
        self.down.a["narrow"] = nn.Linear(15, 4, bias=False)  # its width differs from the others'

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def _choices(rank: int) -> tuple[set[str], list[str]]:
    torch.manual_seed(0)
    plain = nn.Sequential(Mlp(), Mlp())
    model, x = copy.deepcopy(plain), torch.randn(3, 8)
    schedule = create_schedule(model, mesh=mesh_of(tp=2), example_inputs=(x,))
    schedule.tensor_parallel()
    build(schedule)
    split = {name.removesuffix(".weight") for name, each in model[0].named_parameters() if is_sharded(each)}
    forks = [line.split("'")[1] for line in str(schedule.journal).splitlines() if "fork_rng" in line]
    for name in ("first", "second", "first"):
        for module in (*plain.modules(), *model.modules()):
            if isinstance(module, Adapted):
                module.name = name
        assert_equivalent(plain.eval(), model.eval(), x)
    return split, forks


def test_unused_entries_are_split_like_the_one_that_ran() -> None:
    for split, forks in run_distributed(_choices, 2):
        assert split >= {f"{layer}.{name}" for layer in ("up.b", "down.a") for name in ("first", "second")}
        assert not split & {"down.a.narrow", *(f"{layer}.{name}" for layer in ("up.a", "down.b") for name in _RANKS)}
        assert {f"0.down.drop.{name}" for name in ("first", "second")} <= {*forks}
        assert not any("up.drop" in each for each in forks)
