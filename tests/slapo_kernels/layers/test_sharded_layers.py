"""The classic modules split over ranks, as the layers they stand for are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_kernels.plugin
import slapo_sharding.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, ScheduleError, build, create_schedule
from slapo_kernels import op
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = op.FlashAttention(16, 4, is_decoder=True, fused_qkv=True)
        self.mlp = op.FusedMLP(16, 32, "gelu_new")

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(x, mask)[0]
        return x + self.mlp(x)


def split(rank: int) -> None:
    before, after = Block(), Block()
    after.load_state_dict(before.state_dict())
    sch = create_schedule(
        after, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_kernels.plugin, slapo_sharding.plugin])
    )
    attention, mlp = sch["attention"], sch["mlp"]
    attention["qkv.fused_linear"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    attention["out_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    mlp["fc_in"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    mlp["fc_out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    build(sch)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    padded = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    for mask in (None, padded):
        assert_equivalent(before, after, x, mask)
    assert after.attention.qkv.fused_linear.weight.shape == (24, 16)


def test_on_two_ranks() -> None:
    run_distributed(split, 2)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        op.LinearWithAct(8, 16, act_fn="relu"),
        op.LinearWithSyncFunc(16, 8),
        op.LinearWithSeparateBias(8, 16),
        op.LinearWithSeparateBias(16, 8, bias=False),
    )


def split_layers(rank: int) -> None:
    sch = create_schedule(
        layers(), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_kernels.plugin, slapo_sharding.plugin])
    )
    for columns, rows in ("01", "23"):
        sch[columns].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch[rows].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    assert_equivalent(layers(), build(sch).module, torch.randn(3, 8, generator=torch.Generator().manual_seed(1)))
    whole = create_schedule(nn.Sequential(op.LinearWithAct(8, 16), op.LinearWithDropout(8, 8)), plugins=sch.registry)
    with pytest.raises(ScheduleError, match="'weight' of a LinearWithAct cannot be split along 1; it can split 'bias' along 0"):
        whole["0"].shard("weight", axis=1)
    with pytest.raises(ScheduleError, match="'weight' is in a LinearWithDropout, which no sharding rule covers"):
        whole["1"].shard("weight", axis=0)


def test_the_linear_layers_are_split() -> None:
    run_distributed(split_layers, 2)
