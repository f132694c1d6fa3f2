"""Full tensors are gathered from shards and loaded into shards under the unmodified model's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, ScheduleError, build, create_schedule, is_sharded
from slapo_sharding import gather_full, load_full_state, plugin, scatter_full
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc

IDS = torch.arange(12).view(2, 6)
_SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "vocab_size": 31, "use_cache": False}


def _gpt2(seed: int) -> nn.Module:
    """A model with fused projections and a tied vocabulary of uneven shards."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=4, n_positions=8, vocab_size=31, use_cache=False)).eval()


def _llama(seed: int) -> nn.Module:
    """A model with one key head for all ranks."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=1)).eval()


def _schedule(model: nn.Module) -> Schedule:
    sch = create_schedule(
        model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs={"input_ids": IDS}
    )
    sch.tensor_parallel()
    build(sch)
    return sch


def _load_states(rank: int, make: Any) -> None:
    model, other = make(0), make(1)
    sch = _schedule(model)
    assert any(is_sharded(parameter) for parameter in model.parameters())
    load_full_state(model, other.state_dict())
    full = dict(sch.full_state())
    for name, parameter in other.named_parameters(remove_duplicate=False):
        assert torch.equal(full[name], parameter), name
    torch.testing.assert_close(model(IDS).logits, other(IDS).logits, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        gathered = gather_full(parameter)
        assert torch.equal(gathered, other.get_parameter(name))
        assert not gathered.requires_grad
        scatter_full(parameter, gathered * 2)
        assert torch.equal(gather_full(parameter), gathered * 2)
    assert all(parameter.grad_fn is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("make", "ranks"), [(_gpt2, 2), (_llama, 2)])
def test_full_tensors_round_trip(make, ranks):
    run_distributed(_load_states, ranks, make)


def _refusals(rank: int) -> list[str]:
    model = _gpt2(0)
    sch = _schedule(model)
    before, state = sch.full_state(), _gpt2(1).state_dict()
    norm, bias = "transformer.ln_f.weight", "transformer.h.0.attn.c_attn.bias"
    untied = {**state, "lm_head.weight": state["lm_head.weight"] + 1}
    wrong = {key: value for key, value in {**state, bias: state[bias][:24], "more": torch.ones(1)}.items() if key != norm}
    messages = []
    for given in (wrong, untied, {**state, norm: [1.0]}):
        with pytest.raises(ScheduleError) as caught:
            load_full_state(model, given)
        messages.append(str(caught.value))
    with pytest.raises(ScheduleError) as caught:
        scatter_full(model.get_parameter(bias), state[bias][:24])
    messages.append(str(caught.value))
    with pytest.raises(ScheduleError) as caught:
        scatter_full(nn.Parameter(torch.empty(2, device="meta")), torch.ones(2))
    messages.append(str(caught.value))
    assert all(torch.equal(value, before[name]) for name, value in sch.full_state().items())
    load_full_state(model, {norm: state[norm] + 1, "more": torch.ones(1)}, strict=False)
    assert [name for name, value in sch.full_state().items() if not torch.equal(value, before[name])] == [norm]
    return messages


def test_a_wrong_state_is_refused_and_nothing_changes():
    close = "; give full tensors under the unmodified model's names"
    shape = "shape [24] instead of [48]"
    for messages in run_distributed(_refusals, 2):
        assert messages == [
            f"load_full_state: 'transformer.h.0.attn.c_attn.bias': {shape}; missing ['transformer.ln_f.weight']; "
            f"unknown ['more']{close}",
            f"load_full_state: 'transformer.wte.weight' and 'lm_head.weight' are tied and differ{close}",
            f"load_full_state: 'transformer.ln_f.weight': a list is not a tensor{close}",
            f"scatter_full: {shape}",
            "scatter_full: it is on meta and holds nothing; build the schedule first",
        ]
