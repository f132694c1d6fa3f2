"""Attention whose key heads the ranks do not divide: heads are replicated and their gradients reduced."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, ScheduleError, build, create_schedule, shard_spec
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_training.distributed import clip_grad_norm_
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


def _llama(heads: int, keys: int, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 4, "vocab_size": 32}
    config = {"num_attention_heads": heads, "num_key_value_heads": keys, "attention_bias": True, **sizes, **options}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def _batch() -> dict[str, Any]:
    ids = torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _schedule(module: nn.Module) -> Schedule:
    return create_schedule(module, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))


def _by_hand(sch: Schedule) -> None:
    for layer in sch.select("model.layers.*"):
        for name in ("v_proj", "q_proj", "k_proj"):
            layer["self_attn"][name].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        layer["self_attn.o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def _train_clipped(model: nn.Module, clip: Any) -> list[float]:
    """Train three clipped steps of two micro-batches, and return the norms before clipping."""
    optimizer, batch, norms = torch.optim.SGD(model.parameters(), lr=0.1), _batch(), []
    for _ in range(3):
        optimizer.zero_grad()
        for ids in (batch["input_ids"], batch["input_ids"].flip(1)):
            model(**{**batch, "input_ids": ids}).loss.backward()
        norms.append(float(clip(model.parameters(), 0.5)))
        optimizer.step()
    return norms


def _check(before: nn.Module, sch: Schedule) -> None:
    model = sch.mod
    assert_equivalent(before, model, **_batch())
    copied = copy.deepcopy(model)
    for norm_type in (2.0, math.inf):
        norms = [
            _train_clipped(each, lambda parameters, most, clip=clip, norm_type=norm_type: clip(parameters, most, norm_type))
            for each, clip in ((before, nn.utils.clip_grad_norm_), (model, clip_grad_norm_), (copied, clip_grad_norm_))
        ]
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)
        assert norms[2] == pytest.approx(norms[0], rel=1e-4)
    trained, gradients = sch.full_state(), sch.full_state("grad")
    for name, parameter in before.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(one, other)
        spec = shard_spec(one)
        if spec is not None:
            assert torch.equal(spec.local(trained[sch.original_names[_name(model, one)][0]]), one), "copies differ"


def _name(model: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, other in model.named_parameters() if other is parameter)


def _grouped(rank: int, heads: int, keys: int, by_hand: bool, options: dict[str, Any]) -> tuple[int, list[tuple[int, int]]]:
    model = _llama(heads, keys, **options)
    before, sch = copy.deepcopy(model), _schedule(model)
    if by_hand:
        _by_hand(sch)
    else:
        sch.tensor_parallel()
    build(sch)
    _check(before, sch)
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.out_features == len(attention.k_proj.weight)
    return attention.num_key_value_groups, shard_spec(attention.k_proj.weight).ranges()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "heads", "keys", "groups", "held"),
    [
        (2, 4, 1, 2, [[(0, 4)], [(0, 4)]]),
        (2, 6, 3, 1, [[(0, 4), (0, 8)], [(4, 12), (8, 12)]]),
        pytest.param(2, 4, 2, 2, [[(0, 4)], [(4, 8)]], marks=pytest.mark.slow),
        pytest.param(4, 4, 1, 1, [[(0, 4)]] * 4, marks=pytest.mark.slow),
        pytest.param(4, 4, 2, 1, [[(0, 4)], [(0, 4)], [(4, 8)], [(4, 8)]], marks=pytest.mark.slow),
    ],
    ids=["one key", "three keys", "they divide", "one key, 4 ranks", "two keys, 4 ranks"],
)
@pytest.mark.parametrize("by_hand", [False, True], ids=["published plan", "by hand"])
def test_correctness_08_key_heads_go_where_their_queries_are(ranks, heads, keys, groups, held, by_hand):
    options = {"attn_implementation": "eager"} if by_hand else {}
    assert run_distributed(_grouped, ranks, heads, keys, by_hand, options) == [(groups, own) for own in held]


def _frozen(rank: int) -> None:
    """Parameters that are unfrozen after the split, or copied while frozen, are reduced as well."""
    model = _llama(4, 1).requires_grad_(False)
    before, sch = copy.deepcopy(model), _schedule(model)
    sch.tensor_parallel()
    build(sch)
    copied = copy.deepcopy(model)
    for each in (before, model, copied):
        each.requires_grad_(True)
    assert_equivalent(before, model, **_batch())
    assert_equivalent(before, copied, **_batch())


def test_copies_that_are_unfrozen_later():
    run_distributed(_frozen, 2)


def _from_meta(rank: int) -> torch.Tensor:
    from slapo_core import init_empty_weights

    with init_empty_weights():
        model = _llama(6, 3)
    sch = _schedule(model)
    if dist.get_world_size() > 1:
        sch.tensor_parallel()
    build(sch, seed=1)
    model(**_batch()).loss.backward()
    gradients = sch.full_state("grad")
    return torch.cat([value.flatten() for state in (sch.full_state(), gradients) for value in state.values()])


def test_copies_of_weights_that_come_late():
    (whole,), (first, second) = run_distributed(_from_meta, 1), run_distributed(_from_meta, 2)
    torch.testing.assert_close(first, whole, atol=1e-5, rtol=1e-5)
    assert torch.equal(first, second)


def _fused(rank: int) -> tuple[int, int, int]:
    from transformers import GPTBigCodeConfig
    from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeAttention

    config = GPTBigCodeConfig(n_embd=16, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0, multi_query=True)
    config._attn_implementation = "sdpa"
    model = nn.Sequential(GPTBigCodeAttention(config, layer_idx=0))
    before, sch = copy.deepcopy(model), _schedule(model)
    sch["0.c_attn"].shard("weight", axis=0, blocks=(16, 4, 4)).sync("bwd_post", "all_reduce")
    sch["0.c_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    build(sch)
    assert_equivalent(before, model, torch.randn(2, 5, 16, requires_grad=True))
    return model[0].num_heads, model[0].kv_heads, model[0].c_attn.out_features


def test_correctness_08_one_key_head_in_a_fused_projection():
    assert run_distributed(_fused, 2) == [(2, 1, 16)] * 2


class _OneKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.fused, self.out = 4, nn.Linear(16, 24), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.fused(x).split([self.heads * 4, 4, 4], -1)
        q = q.unflatten(-1, (self.heads, 4)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k[:, None], v[:, None], enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def _by_blocks(rank: int) -> tuple[int, list[str]]:
    model = nn.Sequential(_OneKey())
    before, sch = copy.deepcopy(model), _schedule(model)
    refused = []
    for options in ({"copied": [3]}, {"copied": [0, 1, 2]}, {"copied": [1, 2], "gathered": True}, {"copied": 1}):
        with pytest.raises(ScheduleError) as caught:
            sch["0.fused"].shard("weight", axis=0, blocks=[16, 4, 4], **options)
        refused.append(str(caught.value))
    with pytest.raises(ScheduleError, match="a block has size 1, not divisible by 2 ranks"):
        sch["0.fused"].shard("weight", axis=0, blocks=[16, 7, 1], copied=[1])
    sch["0.fused"].shard("weight", axis=0, blocks=[16, 4, 4], copied=[1, 2]).sync("bwd_post", "all_reduce")
    sch["0.out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    model[0].heads //= 2
    build(sch)
    assert_equivalent(before, model, torch.randn(2, 5, 16, requires_grad=True))
    return model[0].fused.out_features, refused


def test_blocks_that_every_rank_replicates():
    (width, refused), other = run_distributed(_by_blocks, 2)
    assert (width, refused) == other
    assert width == 16 // 2 + 4 + 4
    given = ["[3]", "[0, 1, 2]", "1"]
    places = [f"copied is {each}; give indices of some of the 3 blocks, counted from 0" for each in given]
    expected = [*places[:2], "copied is for a layer whose output stays sharded; leave it out", places[2]]
    assert [message.removeprefix("shard('0.fused'): ") for message in refused] == expected


def _compare_compiled(rank: int) -> None:
    """Compile without a graph break; the backward reduces the copies."""
    model = _llama(6, 3)
    before, sch = copy.deepcopy(model).model.layers[0].self_attn, _schedule(model)
    sch.tensor_parallel()
    build(sch)
    after, x = model.model.layers[0].self_attn, torch.randn(2, 5, 24)
    tables = model.model.rotary_emb(x, torch.arange(5)[None])
    for each in (before, after):
        run = torch.compile(each, fullgraph=True, backend="aot_eager") if each is after else each
        run(x, position_embeddings=tables, attention_mask=None)[0].square().sum().backward()
    spec = shard_spec(after.k_proj.weight)
    torch.testing.assert_close(after.k_proj.weight.grad, spec.local(before.k_proj.weight.grad), atol=1e-4, rtol=1e-4)


def test_copies_in_a_compiled_module():
    run_distributed(_compare_compiled, 2)


def _other_counts(rank: int, name: str) -> str:
    model = _llama(4, 1)
    model.model.layers[0].self_attn.num_key_value_groups = 2
    with pytest.raises(ScheduleError) as caught:
        _schedule(model)["model.layers.0.self_attn"][name].shard("weight", axis=0)
    return str(caught.value)


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_attention_that_counts_in_another_way_is_refused(name):
    message = run_distributed(_other_counts, 2, name)[0]
    assert "num_key_value_groups of the attention module is 2, but 4 by its projections; use fewer ranks" in message


def _undone(rank: int) -> None:
    model = _llama(4, 1)
    before, kept = copy.deepcopy(model), dict(model.named_parameters())
    sch = _schedule(model)
    sch.tensor_parallel()
    sch.undo()
    assert all(kept[name] is parameter and not parameter._backward_hooks for name, parameter in model.named_parameters())
    assert model.model.layers[0].self_attn.num_key_value_groups == 4
    assert_equivalent(before, model, **_batch())


def test_undo_restores_replicated_key_heads():
    run_distributed(_undone, 2)
