"""``tensor_parallel()`` of a model whose forward switches autocast or gradients: it is split with its modes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import create_schedule
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Attention that takes sizes from its input, so that the dry run fails once before the plan is found."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))


class Net(nn.Module):
    """Model with a mode region around everything, and inside it a region that cannot be split."""

    def __init__(self, region: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.region, self.blocks = region, nn.ModuleList(Attention() for _ in range(2))
        self.whole, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.region == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.run(x)
        with torch.no_grad():
            scale = self.whole(x).softmax(-1)
        return self.run(x * scale)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.whole(x).softmax(-1)).float()


def modes() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()


def _split(rank: int, region: str) -> list[str]:
    model, x = Net(region), torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    unmodified, before = copy.deepcopy(model), modes()
    sch = create_schedule(model, example_inputs=(x,))
    sch.tensor_parallel()
    assert modes() == before
    near = 2e-2 if region == "autocast" else 1e-5
    for rows in (2, 3):
        inputs = x[:1].expand(rows, -1, -1).contiguous()
        assert_equivalent(unmodified, model, inputs, atol=near, rtol=near)
    return [str(step) for step in sch.journal.steps[-1].children]


@pytest.mark.parametrize("region", ["autocast", pytest.param("no_grad", marks=pytest.mark.slow)])
def test_a_model_with_a_region_is_split_and_the_process_keeps_its_modes(region: str) -> None:
    steps = run_distributed(_split, 2, region)[0]
    assert sum("qkv" in step and "shard" in step for step in steps) == 2, steps
