"""Derived plans of convolutional models: channels are split like widths, with norms and depthwise layers between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule, is_sharded
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.slapo_sharding.logged_warnings import warnings_told

pytestmark = pytest.mark.multiproc

C = 8


class PoolFormer(nn.Module):
    """Token mixing by pooling, and an MLP of 1x1 convolutions after a norm of one group."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.pool = nn.GroupNorm(1, C), nn.GroupNorm(1, C), nn.AvgPool2d(3, 1, 1)
        self.fc1, self.act, self.fc2 = nn.Conv2d(C, 4 * C, 1), nn.GELU(), nn.Conv2d(4 * C, C, 1)
        self.scale = nn.Parameter(torch.full((C, 1, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.pool(y) - y
        return x + self.scale * self.fc2(self.act(self.fc1(self.norm2(x))))


class ConvNext(nn.Module):
    """Depthwise convolution, norm and MLP of 1x1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(C, C, 3, padding=1, groups=C), nn.GroupNorm(1, C)
        self.up, self.down = nn.Conv2d(C, 4 * C, 1), nn.Conv2d(4 * C, C, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(self.dwconv(x)))))


class MbConv(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, and projection."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.expand, self.depthwise = nn.Conv2d(C, 4 * C, 1), nn.Conv2d(4 * C, 4 * C, 3, padding=1, groups=4 * C, bias=False)
        self.norm1, self.norm2 = norm(4 * C), norm(4 * C)
        self.reduce, self.excite = nn.Conv2d(4 * C, C, 1), nn.Conv2d(C, 4 * C, 1)
        self.project = nn.Conv2d(4 * C, C, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm1(self.expand(x)))
        y = F.silu(self.norm2(self.depthwise(y)))
        y = torch.sigmoid(self.excite(F.silu(self.reduce(y.mean((2, 3), keepdim=True))))) * y
        return x + self.project(y)


class PooledMbConv(MbConv):
    """``MbConv`` that pools by a module."""

    def __init__(self) -> None:
        super().__init__(lambda channels: nn.GroupNorm(channels // 4, channels))
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm2(self.depthwise(F.silu(self.norm1(self.expand(x))))))
        return x + self.project(y * self.excite(F.silu(self.reduce(self.pool(y)))).sigmoid())


class UnetBlock(nn.Module):
    """Residual block that adds a time embedding to its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, C), nn.GroupNorm(8, 4 * C)
        self.conv1, self.conv2 = nn.Conv2d(C, 4 * C, 3, padding=1), nn.Conv2d(4 * C, C, 3, padding=1)
        self.time, self.dropout = nn.Linear(C, 4 * C), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = self.time(F.silu(x.mean((2, 3))))
        y = self.conv1(F.silu(self.norm1(x))) + time[:, :, None, None]
        return x + self.conv2(self.dropout(F.silu(self.norm2(y))))


class Conformer(nn.Module):
    """Gated pointwise convolution, depthwise convolution with a batch norm, and pointwise convolution."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm, self.gate = how, nn.LayerNorm(C), nn.GLU(1)
        self.first, self.last = nn.Conv1d(C, 4 * C, 1), nn.Conv1d(2 * C, C, 1)
        self.depthwise, self.inner = nn.Conv1d(2 * C, 2 * C, 3, padding=1, groups=2 * C), nn.BatchNorm1d(2 * C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(self.norm(x.flatten(2).transpose(1, 2)).transpose(1, 2))
        if self.how == "glu":
            y = F.glu(y, dim=1)
        elif self.how == "module":
            y = self.gate(y)
        else:
            y, gate = y.chunk(2, dim=1)
            y = y * gate.sigmoid()
        y = self.last(F.silu(self.inner(self.depthwise(y))))
        return x + y.unflatten(2, x.shape[2:])


class Flattened(nn.Module):
    """Attention over pixels by 1x1 convolutions, as in U-Nets."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.heads, self.norm = 4, nn.GroupNorm(2, C)
        width = 3 if fused else 1
        self.q, self.out = nn.Conv2d(C, width * 2 * C, 1), nn.Conv2d(2 * C, C, 1)
        if not fused:
            self.k, self.v = nn.Conv2d(C, 2 * C, 1), nn.Conv2d(C, 2 * C, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, _, h, w = x.shape
        y = self.norm(x)
        made = (self.q(y), self.k(y), self.v(y)) if hasattr(self, "k") else self.q(y).chunk(3, dim=1)
        q, k, v = (each.reshape(b, self.heads, -1, h * w).transpose(2, 3) for each in made)
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(b, -1, h, w)
        return x + self.out(y)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "pool": PoolFormer,
    "next": ConvNext,
    "mb": lambda: MbConv(lambda channels: nn.Identity()),
    "mb batch": lambda: MbConv(nn.BatchNorm2d),
    "mb instance": lambda: MbConv(lambda channels: nn.InstanceNorm2d(channels, affine=True, track_running_stats=True)),
    "mb plain instance": lambda: MbConv(nn.InstanceNorm2d),
    "mb slopes": lambda: MbConv(lambda channels: nn.Sequential(nn.BatchNorm2d(channels), nn.PReLU(channels))),
    "mb pooled": PooledMbConv,
    "unet": UnetBlock,
    "chunk": lambda: Conformer("chunk"),
    "glu": lambda: Conformer("glu"),
    "glu module": lambda: Conformer("module"),
    "pixels": lambda: Flattened(False),
    "fused pixels": lambda: Flattened(True),
}


class Net(nn.Module):
    """Two blocks between a patch convolution and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, C, 2, stride=2), nn.ModuleList([BLOCKS[kind]() for _ in range(2)])
        self.head = nn.Linear(C, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _train(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def _compare(rank: int, kind: str) -> tuple[set[str], list[str]]:
    torch.manual_seed(0)
    model = Net(kind)
    before = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=(x,))
    with warnings_told() as told:
        sch.tensor_parallel()
    build(sch)
    assert_equivalent(before, model, x)
    for each in (before, model):
        _train(each, torch.cat([x, x[:1]]))
    expected: dict[str, Any] = dict(before.state_dict())
    torch.testing.assert_close(sch.full_state(), {name: expected[name] for name in sch.full_state()}, atol=1e-5, rtol=1e-4)
    for each in (before, model):
        each.eval()
    torch.testing.assert_close(model(x), before(x), atol=1e-5, rtol=1e-4)
    block = model.blocks[1]
    whole = {name.rpartition(".")[0] for name, each in block.named_parameters() if not is_sharded(each) and each.dim() > 1}
    return whole, told


@pytest.mark.sampled(7)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", BLOCKS)
def test_derived_plans_equal_the_unmodified_model(kind: str, ranks: int) -> None:
    whole, told = run_distributed(_compare, ranks, kind, timeout=120)[0]
    assert whole <= {"", "dwconv"}, told


class Unbatched(nn.Module):
    """Unbatched input, whose rows an InstanceNorm takes for channels; it norms over the width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(C, 4 * C), nn.InstanceNorm1d(4 * C), nn.Linear(4 * C, C)
        self.first, self.second = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(F.relu(self.norm(self.up(x))))
        return self.second(F.gelu(self.first(x)))


def _unbatched(rank: int) -> set[str]:
    torch.manual_seed(0)
    model, x = Unbatched(), torch.randn(4 * C, C)
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=(x,))
    sch.tensor_parallel()
    build(sch)
    assert_equivalent(before, model, x)
    return {name for name, each in model.named_parameters() if is_sharded(each)}


def test_an_instance_norm_of_unbatched_input_stays_whole() -> None:
    parts = run_distributed(_unbatched, 2)[0]
    assert "first.weight" in parts
    assert "up.weight" not in parts
