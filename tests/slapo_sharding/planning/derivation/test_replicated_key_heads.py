"""Derived plans of attention with fewer key heads than ranks: replicated key heads if verified, else whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule, shard_spec
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.slapo_sharding.split_families import steps_of_same

pytestmark = pytest.mark.multiproc

LENGTH, SIZE = 12, 4


class Attention(nn.Module):
    """Grouped-query attention that pairs queries and keys in one way or another.

    Args:
        heads: Query heads.
        keys: Key heads.
        how: ``"grouped"``, as everybody does it; ``"dealt"``: queries take keys in turn; ``"scaled"``: by the number of keys;
            ``"normed"``: over all keys; ``"fused"``: one projection.
    """

    def __init__(self, heads: int, keys: int, how: str) -> None:
        super().__init__()
        self.how, self.head_dim, width = how, SIZE, heads * SIZE
        self.num_heads, self.num_key_value_heads, self.num_key_value_groups = heads, keys, heads // keys
        if how == "fused":
            self.qkv_proj = nn.Linear(width, width + 2 * keys * SIZE)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, number * SIZE) for number in (heads, keys, keys))
        self.o_proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(keys * SIZE if how == "normed" else SIZE)

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "dealt":
            return x.repeat(1, self.num_key_value_groups, 1, 1)
        return x.repeat_interleave(self.num_key_value_groups, 1)

    def _made(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.how != "fused":
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        keys = self.num_key_value_heads * SIZE
        return self.qkv_proj(x).split([self.num_heads * SIZE, keys, keys], dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._made(x)
        k = self.norm(k) if self.how == "normed" else k
        q, k, v = (part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (q, k, v))
        k = k if self.how == "normed" else self.norm(k)
        if self.how == "scaled":
            k = k / self.num_key_value_heads
        mixed = F.scaled_dot_product_attention(q, self._repeated(k), self._repeated(v), is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, heads: int, keys: int, how: str) -> None:
        super().__init__()
        width = heads * SIZE
        self.attention, self.mlp = Attention(heads, keys, how), nn.Sequential(nn.Linear(width, 24), nn.Linear(24, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, heads: int, keys: int, *how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(heads, keys, each) for each in how])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _train(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def _compare(rank: int, heads: int, keys: int, how: list[str], sequence_parallel: bool) -> tuple[Any, list[str]]:
    """Return the rank's shards of the keys in each layer, and the warnings."""
    model = Model(heads, keys, *how)
    before = copy.deepcopy(model)
    x = torch.randn(2, LENGTH, heads * SIZE, generator=torch.Generator().manual_seed(1), requires_grad=True)
    sch = create_schedule(
        model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=(x.detach(),)
    )
    with warnings_told() as told:
        sch.tensor_parallel(sequence_parallel=sequence_parallel)
    build(sch)
    assert_equivalent(before, model, x)
    for each in (before, model):
        _train(each, x.detach())
    torch.testing.assert_close(sch.full_state(), dict(before.state_dict()), atol=1e-5, rtol=1e-5)
    made: Any = [getattr(block.attention, "k_proj", None) or block.attention.qkv_proj for block in model.blocks]
    specs = [shard_spec(layer.weight) for layer in made]
    return [None if spec is None else spec.ranges() for spec in specs], told


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "heads", "keys", "how", "held"),
    [
        (4, 4, 2, "grouped", [((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)]),
        (2, 6, 3, "grouped", [((0, 4), (0, 8)), ((4, 12), (8, 12))]),
        (2, 4, 1, "fused", [((0, 8), (16, 20), (20, 24)), ((8, 16), (16, 20), (20, 24))]),
    ],
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_correctness_08_each_rank_holds_the_key_heads_of_its_queries(ranks, heads, keys, how, held, sequence_parallel):
    found = run_distributed(_compare, ranks, heads, keys, [how], sequence_parallel)
    assert [tuple(map(tuple, ranges)) for (ranges,), _ in found] == held
    assert not any(told for _, told in found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["dealt", "scaled", "normed"])
def test_attention_that_cannot_be_verified_stays_whole_with_a_warning(how):
    for held, told in run_distributed(_compare, 2, 6, 3, [how, "grouped"], False):
        assert held[0] is None
        assert any("blocks.0.attention" in message and "test_replicated_key_heads.py:" in message for message in told)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "phi3")])
def test_families_with_two_key_heads_on_four_ranks(name):
    steps = run_distributed(steps_of_same, 4, name, (True,), timeout=120)[0][0].steps
    assert any("self_attn.o_proj'].shard(" in step for step in steps)
