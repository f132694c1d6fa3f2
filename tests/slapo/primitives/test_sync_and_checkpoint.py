"""Words of two plugins on one module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import slapo
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent


class _Sums(TorchDispatchMode):
    """Counts the all-reduces."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "all_reduce"
        return func(*args, **(kwargs or {}))


def _checkpointed(rank: int, sync_first: bool) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    before = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    sch["0"].shard("weight", axis=0)
    sch["2"].shard("weight", axis=1)
    if not sync_first:
        sch["0"].checkpoint()
        sch["2"].checkpoint()
    sch["0"].sync("bwd_post", "all_reduce")
    sch["2"].sync("fwd_post", "all_reduce")
    if sync_first:
        sch["0"].checkpoint()
        sch["2"].checkpoint()
    slapo.build(sch)
    x = torch.randn(3, 4, requires_grad=True)
    assert_equivalent(before, model, x)
    with _Sums() as sums:
        model(x).sum().backward()
    return sums.count


@pytest.mark.multiproc
@pytest.mark.parametrize("sync_first", [True, False])
def test_correctness_14_a_checkpointed_module_communicates_once(sync_first: bool) -> None:
    assert run_distributed(_checkpointed, 2, sync_first) == [2, 2]
