"""Weights on the meta device: the same numbers in every layout, and real ones untouched."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from slapo_core import (
    BuildError,
    ShardSpec,
    build,
    create_schedule,
    init_empty_weights,
    materialize,
    parameter_facts,
    successor,
)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=96, n_positions=32, bos_token_id=0, eos_token_id=0)
    )


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=96, **sizes))


def test_an_empty_model_has_shapes_ties_and_no_memory() -> None:
    with init_empty_weights():
        model = gpt2()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not nn.Linear(2, 2).weight.is_meta


def test_disabled_it_does_nothing() -> None:
    with init_empty_weights(enable=False):
        assert not nn.Linear(2, 2).weight.is_meta


def test_frozen_parameters_stay_frozen() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3), requires_grad=False)

    with init_empty_weights():
        assert Frozen().w.requires_grad is False


@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_models_own_initialiser_is_used(make: type) -> None:
    """Also where it initialises a child's parameter from the parent, as GPT-2 does with c_proj."""
    with init_empty_weights(include_buffers=True):
        model = make()
    build(create_schedule(model))
    torch.manual_seed(1)
    usual = dict(make().named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.std().item() == pytest.approx(usual[name].std().item(), rel=0.15, abs=1e-6), name
        assert parameter.mean().item() == pytest.approx(usual[name].mean().item(), abs=0.02), name
    for name, buffer in dict(make().named_buffers()).items():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer)


def test_ties_stay_ties() -> None:
    with init_empty_weights():
        model = gpt2()
    build(create_schedule(model))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert parameter_facts(model.lm_head.weight).names == ("transformer.wte.weight", "lm_head.weight")


@pytest.mark.parametrize(("dim", "num_shards", "blocks"), [(0, 2, (8,)), (1, 2, (4,)), (0, 2, (4, 4)), (0, 4, (8,))])
def test_every_layout_gets_the_same_numbers(dim: int, num_shards: int, blocks: tuple[int, ...]) -> None:
    def sharded(rank: int | None) -> torch.Tensor:
        with init_empty_weights():
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        create_schedule(model)
        if rank is not None:
            old = model[0].weight
            spec = ShardSpec(dim, (8, 4), rank, num_shards, blocks)
            model[0].weight = successor(old, spec.local(old.detach()), spec=spec)
        materialize(model, seed=7)
        return model[0].weight.detach()

    shards = [sharded(rank) for rank in range(num_shards)]
    assert torch.equal(ShardSpec(dim, (8, 4), 0, num_shards, blocks).assemble(shards), sharded(None))


def test_the_seed_and_the_name_decide() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        with init_empty_weights():
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        torch.manual_seed(torch.seed() % 1000)
        build(create_schedule(model), seed=seed)
        return [model[0].weight.detach(), model[1].weight.detach()]

    one, same, other = weights(1), weights(1), weights(2)
    assert torch.equal(one[0], same[0])
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[0], one[1])


def test_the_global_random_state_is_not_used_up() -> None:
    with init_empty_weights():
        model = nn.Linear(4, 4)
    before = torch.get_rng_state()
    build(create_schedule(model))
    assert torch.equal(torch.get_rng_state(), before)


def test_real_weights_are_never_touched() -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    real = nn.Linear(4, 4)
    values = real.weight.detach().clone()
    model[0] = real
    weight = real.weight
    build(create_schedule(model))
    assert model[0].weight is weight
    assert torch.equal(weight, values)
    assert not model[1].weight.is_meta


def test_buffers_follow_the_weights_to_their_device() -> None:
    with init_empty_weights():
        model = llama()
    table = model.model.rotary_emb
    kept = table.inv_freq
    parameter_facts(kept).tags.add("mine")
    materialize(model)
    assert table.inv_freq is kept
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to("meta"))
    materialize(model, device="meta")
    assert all(buffer.is_meta for buffer in model.buffers())
    assert parameter_facts(table.inv_freq).tags == {"mine"}
    assert not model.model.norm.weight.is_meta


def test_a_parameter_nothing_initialises_is_an_error() -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.empty(3))

    with init_empty_weights():
        model = nn.Sequential(Token())
    with pytest.raises(BuildError, match="leaves 0.token, or a part of it, without values; give an initialiser"):
        build(create_schedule(model))


def half(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.bias)
        nn.init.ones_(module.weight[:1])


def test_a_parameter_initialised_in_part_is_an_error() -> None:
    with init_empty_weights():
        model = nn.Linear(4, 4)
    with pytest.raises(BuildError, match="leaves weight, or a part of it, without values"):
        build(create_schedule(model), param_init_fn=half)


@pytest.mark.parametrize(
    "init", [nn.init.orthogonal_, nn.init.trunc_normal_, nn.init.kaiming_uniform_, nn.init.eye_, nn.init.dirac_]
)
def test_torchs_initialisers_can_be_replayed(init: type) -> None:
    shape = (4, 3, 2) if init is nn.init.dirac_ else (4, 4)

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(*shape))

    with init_empty_weights():
        model = Module()
    build(create_schedule(model), param_init_fn=lambda module: init(module.w))
    assert model.w.isfinite().all()
    if init is nn.init.orthogonal_:
        torch.testing.assert_close(model.w.detach() @ model.w.detach().T, torch.eye(4))
