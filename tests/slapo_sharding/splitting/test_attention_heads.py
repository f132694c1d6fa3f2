"""Attention: fused projections, unsplit heads, local counts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, ScheduleError, build, create_schedule, shard_spec
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


def _schedule(module: nn.Module) -> Schedule:
    return create_schedule(module, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))


def _gpt2_attention(heads: int = 4, **options: object) -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    config = GPT2Config(n_embd=16, n_head=heads, attn_pdrop=0.0, resid_pdrop=0.0, **options)
    config._attn_implementation = "sdpa"
    return nn.Sequential(GPT2Attention(config, layer_idx=0))


def _fused_qkv(rank: int) -> tuple[object, ...]:
    for blocks in (None, 3, (16, 16, 16)):
        model = _gpt2_attention()
        before = copy.deepcopy(model)
        sch = _schedule(model)["0"]
        sch["c_attn"].shard(["weight", "bias"], axis=1, blocks=blocks).sync("bwd_post", "all_reduce")
        sch["c_proj"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
        build(sch)
        assert_equivalent(before, model, torch.randn(2, 5, 16, requires_grad=True))
    attention = model[0]
    return attention.num_heads, attention.split_size, attention.embed_dim, attention.head_dim, attention.c_attn.nf


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_correctness_08_fused_qkv_of_gpt2_is_split_block_by_block(ranks):
    local = run_distributed(_fused_qkv, ranks)
    assert local == [(4 // ranks, 16 // ranks, 16 // ranks, 4, 48 // ranks)] * ranks


class Attention(nn.Module):
    """Multi-head attention like BERT's, with counts as attributes."""

    def __init__(self, heads: int = 4, kv_heads: int = 4, size: int = 4) -> None:
        super().__init__()
        self.num_attention_heads, self.num_key_value_heads, self.attention_head_size = heads, kv_heads, size
        self.all_head_size = heads * size
        self.query = nn.Linear(16, heads * size)
        self.key = nn.Linear(16, kv_heads * size)
        self.value = nn.Linear(16, kv_heads * size)
        self.dense = nn.Linear(heads * size, 16)

    def _heads(self, x: torch.Tensor, count: int) -> torch.Tensor:
        x = x.view(*x.shape[:2], count, self.attention_head_size).transpose(1, 2)
        return x.repeat_interleave(self.num_attention_heads // count, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self._heads(self.query(x), self.num_attention_heads)
        key, value = (self._heads(layer(x), self.num_key_value_heads) for layer in (self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return self.dense(mixed.reshape(*x.shape[:2], self.all_head_size))


def _local_counts(rank: int) -> None:
    model = nn.Sequential(Attention(kv_heads=2))
    before = copy.deepcopy(model)
    sch = _schedule(model)["0"]
    for name in ("query", "key", "value"):
        sch[name].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    sch["dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    build(sch)
    own = model[0]
    assert (own.num_attention_heads, own.num_key_value_heads, own.all_head_size, own.attention_head_size) == (2, 1, 8, 4)
    assert_equivalent(before, model, torch.randn(2, 5, 16, requires_grad=True))


def test_correctness_09_counts_of_heads_turn_local_once():
    run_distributed(_local_counts, 2)


class Counted(nn.Module):
    """Attention with a head count and no head size."""

    def __init__(self, keys: int = 16, values: int = 16) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, keys), nn.Linear(16, values), nn.Linear(values, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.o(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


def _only_counted(rank: int) -> tuple[str, str]:
    for by_plan, flatten in ((False, False), (True, False), (False, True)):
        model = nn.Sequential(Counted())
        before, sch = (
            copy.deepcopy(model),
            create_schedule(
                model,
                plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]),
                example_inputs=torch.randn(2, 5, 16),
            ),
        )
        if by_plan:
            sch.tensor_parallel({"0.[qkv]": "colwise", "0.o": "rowwise"})
        else:
            _split_by_hand(sch["0"])
        if flatten:
            sch.trace(flatten=True)
        model = build(sch).module
        assert (model.get_submodule("0").num_heads, before[0].num_heads) == (2, 4)
        assert_equivalent(before, model, torch.randn(2, 5, 16, requires_grad=True))
    for model in (Counted(values=8), Counted(keys=10, values=10)):  # no heads of one size
        sch = _schedule(nn.Sequential(model))
        sch["0.q"].shard("weight", axis=0)
        assert model.num_heads == 4
    sch = _schedule(nn.Sequential(Counted()))
    sch["0.q"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    with pytest.raises(BuildError) as caught:
        build(sch)
    sch = _schedule(nn.Sequential(Counted()))
    sch["0"].mod.num_heads = 1
    with pytest.raises(ScheduleError) as refused:
        sch["0.q"].shard("weight", axis=0)
    return str(caught.value), str(refused.value)


def _split_by_hand(sch: Schedule) -> None:
    for name in "qkv":
        sch[name].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    sch["o"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def test_correctness_09_an_attention_is_known_by_its_number_of_heads():
    some, one = run_distributed(_only_counted, 2)[0]
    assert "'0': q make local heads, k, v all of them; shard all projections" in some
    assert "1 attention heads of size 16 cannot be dealt out to 2 ranks" in one


def _gathered_projection(rank: int) -> None:
    model = nn.Sequential(Attention(heads=3, kv_heads=1))
    before = copy.deepcopy(model)
    sch = _schedule(model)["0"]
    sch["query"].shard("weight", axis=0, gathered=True)
    sch["query"].sync("fwd_post", "all_gather", axis=-1).sync("bwd_post", "all_reduce")
    build(sch)
    assert (model[0].num_attention_heads, shard_spec(model[0].query.weight).num_shards) == (3, 2)
    assert_equivalent(before, model, torch.randn(2, 5, 16, requires_grad=True))


def test_correctness_09_a_gathered_projection_leaves_the_counts_alone():
    run_distributed(_gathered_projection, 2)


def _only_queries(rank: int) -> str:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2)
    sch = _schedule(nn.Sequential(LlamaAttention(config, layer_idx=0)))
    sch["0.q_proj"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    sch["0.o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    with pytest.raises(BuildError) as caught:
        build(sch)
    for name in ("k_proj", "v_proj"):
        sch["0"][name].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    build(sch)
    return str(caught.value)


def test_correctness_09_projections_of_one_attention_are_sharded_together():
    message = run_distributed(_only_queries, 2)[0]
    assert "'0': q_proj make local heads, k_proj, v_proj all of them; shard all projections" in message


def _undone(rank: int) -> tuple[int, int]:
    model = nn.Sequential(Attention())
    sch = _schedule(model)
    sch["0.query"].shard("weight", axis=0)
    counts = model[0].num_attention_heads
    sch.undo()
    return counts, model[0].num_attention_heads


def test_correctness_09_undo_restores_the_counts():
    assert run_distributed(_undone, 2) == [(2, 4)] * 2


def _refusals(rank: int) -> dict[str, str]:
    messages = {}

    def refused(key: str, sch: Schedule, *args: object, **kwargs: object) -> None:
        with pytest.raises(ScheduleError) as caught:
            sch.shard(*args, **kwargs)
        messages[key] = str(caught.value)

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head_dim, self.num_heads = 4, 4
            self.qkv_proj = nn.Linear(16, 48)
            self.gate_up_proj = nn.Linear(16, 64)

    odd = Attention(kv_heads=2)
    odd.num_key_value_heads = 1  # not as many as its layers make
    sch = _schedule(nn.Sequential(Fused(), odd, Attention(heads=3, kv_heads=1)))
    refused("fused", sch["0.qkv_proj"], "weight", axis=0)
    refused("gate and up", sch["0.gate_up_proj"], "weight", axis=0)
    refused("uneven sum", sch["0.qkv_proj"], "weight", axis=0, blocks=(16, 16, 15))
    refused("unequal", sch["0.qkv_proj"], "weight", axis=0, blocks=5)
    refused("block", sch["0.gate_up_proj"], "weight", axis=0, blocks=(33, 31))
    refused("heads", sch["2.query"], "weight", axis=0)
    refused("kv heads", sch["2.key"], "weight", axis=0)
    refused("count of kv heads", sch["1.query"], "weight", axis=0)
    sch["0.gate_up_proj"].shard("weight", axis=0, blocks=2)
    sch["0.qkv_proj"].shard("weight", axis=0, blocks=1)
    with pytest.raises(ScheduleError) as caught:
        sch["0.qkv_proj"].sync("fwd_post", "all_gather", axis=-1)
    return {**messages, "late gather": str(caught.value)}


def test_correctness_08_what_would_mix_or_split_heads_is_refused():
    messages = run_distributed(_refusals, 2)[0]
    assert "'qkv_proj' is a fused projection" in messages["fused"]
    assert "give blocks=[sizes along dim 0]" in messages["gate and up"]
    assert "blocks (16, 16, 15) do not add up to the size 48 of 'weight'" in messages["uneven sum"]
    assert "'weight' has size 48, which is not 5 equal blocks" in messages["unequal"]
    assert "has size 64 with a block of 33, not divisible by 2 ranks" in messages["block"]
    assert "1 attention heads of size 4 cannot be dealt out to 2 ranks" in messages["kv heads"]
    assert "num_key_value_heads of the attention module is 1, not divisible by 2 ranks" in messages["count of kv heads"]
    assert "3 attention heads of size 4 cannot be dealt out to 2 ranks" in messages["heads"]
    assert "counts local heads already; shard with gathered=True" in messages["late gather"]
