"""Derived plans of models that use a whole parameter on sharded and on whole values."""

from __future__ import annotations

import copy
from collections.abc import Callable

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

WORDS, WIDTH = 20, 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Head(nn.Module):
    """Product with a table and with another matrix, after a layer that can be split."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table, self.more = table, nn.Parameter(torch.randn(8, WORDS) / 4)
        self.transform = nn.Linear(WIDTH, WIDTH + 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.transform(x)) @ torch.cat([self.table.t(), self.more])


class TiedTable(nn.Module):
    """Table that is looked up whole and multiplies sharded values."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(WORDS, WIDTH), Mlp()
        self.head = Head(self.words.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(ids)))


class ScaledMlp(nn.Module):
    """Scale that multiplies sharded values, and whole ones before or after."""

    def __init__(self, before: bool, scale: nn.Parameter) -> None:
        super().__init__()
        self.before, self.scale, self.up, self.down = before, scale, nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            x = (x.unflatten(-1, (-1, 4)) * self.scale).flatten(-2)
        made = self.down((torch.tanh(self.up(x)).unflatten(-1, (-1, 4)) * self.scale).flatten(-2))
        return made if self.before else (made.unflatten(-1, (-1, 4)) * self.scale).flatten(-2)


class SharedScale(nn.Module):
    """Scale shared by two modules and a penalty of the model."""

    def __init__(self) -> None:
        super().__init__()
        scale = nn.Parameter(torch.linspace(0.5, 2.0, 4))
        self.words, self.body = nn.Embedding(WORDS, WIDTH), Mlp()
        self.first, self.second = ScaledMlp(True, scale), ScaledMlp(False, scale)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(self.body(self.words(ids))))
        return x + self.first.scale.square().sum()


class SharedLinear(nn.Module):
    """Layer that is called with whole values and with sharded ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(WORDS, WIDTH), Mlp()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.both = nn.Linear(4, 4)

    def _pieces(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(x.unflatten(-1, (-1, 4))).flatten(-2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self._pieces(self.body(self.words(ids)))
        return self.down(torch.tanh(self._pieces(self.up(x))))


class SharedWeight(nn.Module):
    """Matrix used by ``F.linear`` on whole and on sharded values, with a layer norm used likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(WORDS, WIDTH), Mlp()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.gain = nn.Parameter(torch.randn(4, 4) / 2), nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def _pieces(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.layer_norm(x.unflatten(-1, (-1, 4)), (4,), self.gain), self.inner).flatten(-2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self._pieces(self.up(self._pieces(self.body(self.words(ids)))))))


class BiasedAttention(nn.Module):
    """Attention with biases of its queries as inputs, as in Transformer-XL."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = (each.view(b, n, *bias.shape).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q + bias[:, None], k, v)
        return x + self.out(out.transpose(1, 2).reshape(b, n, c))


class GivenBias(nn.Module):
    """Bias per head that the model passes to all of its attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.bias = nn.Embedding(WORDS, WIDTH), Mlp(), nn.Parameter(torch.randn(4, WIDTH // 4))
        self.layers = nn.ModuleList(BiasedAttention() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.body(self.words(ids))
        for layer in self.layers:
            x = layer(x, self.bias)
        return x


SPLIT: dict[Callable[[], nn.Module], tuple[str, ...]] = {
    TiedTable: ("head.transform",),
    SharedScale: ("first.up", "first.down", "second.up", "second.down"),
    SharedLinear: (),
    SharedWeight: ("up", "down"),
    GivenBias: ("layers.0.qkv", "layers.0.out", "layers.1.qkv", "layers.1.out"),
}
"""Layers that are split beside the body, which always is."""


class Below(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids)  # type: ignore[no-any-return]


def _train(model: nn.Module, ids: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()


def _same(rank: int, kind: Callable[[], nn.Module]) -> tuple[set[str], list[str]]:
    torch.manual_seed(0)
    model = Below(kind())
    before = copy.deepcopy(model)
    ids = torch.randint(WORDS, (2, 6), generator=torch.Generator().manual_seed(1))
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=(ids,))
    with warnings_told() as told:
        sch.tensor_parallel()
    build(sch)
    assert_equivalent(before, model, ids)
    for each in (before, model):
        _train(each, ids)
    torch.testing.assert_close(sch.full_state(), dict(before.state_dict()), atol=1e-5, rtol=1e-5)
    parts = {name.removeprefix("model.").rpartition(".")[0] for name, each in model.named_parameters() if is_sharded(each)}
    return parts, told


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [*((kind, 2) for kind in SPLIT), (TiedTable, 4), *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in [*SPLIT][1:])],
)
def test_same(kind: Callable[[], nn.Module], ranks: int) -> None:
    parts, _ = run_distributed(_same, ranks, kind, timeout=120)[0]
    assert parts >= {"body.up", "body.down", *SPLIT[kind]}
