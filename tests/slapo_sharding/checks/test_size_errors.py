"""The error for sizes that do not fit in the first run names the module and the sync."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc


class Row(nn.Sequential):
    """A chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        for name, sizes in {"into": (4, 4), "up": (4, 8), "down": (8, 4)}.items():
            self.add_module(name, nn.Linear(*sizes))


SIZES: dict[str, tuple[Callable[[Schedule], object], str]] = {
    "row without scatter": (
        lambda sch: sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce"),
        "Linear 'down': it is split along its input and is given all 8 of it; needs sync('fwd_pre', 'scatter', axis=-1); check",
    ),
    "gathered here and there": (
        lambda sch: (
            sch["up"].shard("weight", axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1),
            sch["down"].sync("fwd_pre", "all_gather", axis=-1, backward="split"),
        ),
        "Linear 'down': it fails, mat1 and mat2 shapes cannot be multiplied (3x16 and 8x4), given [3, 8], which "
        "sync('fwd_pre', 'all_gather') then changes; look whether syncs there and before gather or scatter twice",
    ),
    "scattered and not gathered": (
        lambda sch: (sch["into"].sync("fwd_post", "scatter", axis=-1), sch.mod.requires_grad_(False)),
        "linear fails, mat1 and mat2 shapes cannot be multiplied (3x2 and 4x8), and each rank has a part of the output of "
        "'into'; gather it there",
    ),
}


def _sizes(rank: int) -> dict[str, str]:
    messages = {}
    for key, (steps, _) in SIZES.items():
        sch, unchecked = (
            create_schedule(Row(), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])) for _ in range(2)
        )
        steps(sch)
        build(sch)
        with pytest.raises(BuildError) as caught:
            sch.mod(torch.ones(3, 4))
        messages[key] = str(caught.value)
        steps(unchecked)
        build(unchecked, check=False)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            unchecked.mod(torch.ones(3, 4))
    return messages


def test_sizes_that_do_not_fit_name_the_module_and_its_sync():
    messages = run_distributed(_sizes, 2)[0]
    assert {key: message for key, message in messages.items() if SIZES[key][1] not in message} == {}


class Retries(nn.Module):
    """Falls back if sizes do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.up(x)
        except RuntimeError:
            return self.up(x[:, :4])


def _falls_back(rank: int) -> None:
    sch = create_schedule(Retries(), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["up"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    build(sch)
    assert sch.mod(torch.ones(3, 5)).shape == (3, 4)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        sch.mod(torch.ones(3, 3))


def test_code_may_catch_a_size_error():
    run_distributed(_falls_back, 2)
