"""Optional outputs that would be shards are refused, whatever the form of the output."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, ScheduleError, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc

IDS = torch.arange(16).view(2, 8)
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32}
HIDDEN_STATES = "tensor_parallel(''): the hidden_states requested from the model are this rank's parts of the sequence; leave"
ATTENTIONS = "tensor_parallel(''): the attentions requested from the model are this rank's heads; leave out output_attentions"


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False, attn_implementation="eager"))


def _bert() -> nn.Module:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(**SIZES, **rates, attn_implementation="eager"))


def _t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 32, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**sizes, attn_implementation="eager", use_cache=False, decoder_start_token_id=0))


class Lists(nn.Module):
    """Model that returns lists in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, output_attentions: bool = False) -> Any:
        x = self.down(self.up(x).tanh())
        return x, [x]


MODELS = {"llama": _llama, "bert": _bert, "t5": _t5}
INPUTS = {"input_ids": IDS}
PLANS: dict[str, dict[str, Any]] = {
    "published": {},
    "sequence": {"sequence_parallel": True},
    "given": {"plan": {"model.layers.*.self_attn.[qkv]_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}},
    "MLP": {
        "plan": {
            "model.layers.*.mlp.gate_proj": "colwise",
            "model.layers.*.mlp.up_proj": "colwise",
            "model.layers.*.mlp.down_proj": "rowwise",
        }
    },
}


def _split(model: nn.Module, inputs: Any, **options: Any) -> nn.Module:
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=inputs)
    sch.tensor_parallel(**options)
    build(sch)
    return model


BOTH = {**INPUTS, "decoder_input_ids": IDS}
ASKED: list[tuple[str, str, dict[str, Any], list[tuple[str, str]]]] = [
    ("llama", "sequence", INPUTS, [("output_hidden_states", HIDDEN_STATES), ("output_attentions", ATTENTIONS)]),
    ("llama", "published", INPUTS, [("output_attentions", ATTENTIONS)]),
    ("llama", "given", INPUTS, [("output_attentions", ATTENTIONS)]),
    ("bert", "published", INPUTS, [("output_attentions", ATTENTIONS)]),
    (
        "t5",
        "published",
        BOTH,
        [("output_attentions", "encoder_attentions and decoder_attentions and cross_attentions requested")],
    ),
    ("t5", "sequence", BOTH, [("output_hidden_states", "encoder_hidden_states and decoder_hidden_states requested")]),
]


def _refusals(rank: int) -> list[tuple[str, str]]:
    messages = []
    for kind, plan, inputs, asked in ASKED:
        model = _split(MODELS[kind](), inputs, **PLANS[plan])
        for option, message in asked:
            for given in ({option: True}, {option: True, "return_dict": False}):
                with pytest.raises(ScheduleError) as caught:
                    model(**inputs, **given)
                of_tuple = "return_dict" in given and kind == "t5"  # a tuple has no names
                messages.append((option if of_tuple else message, str(caught.value)))
    return messages


@pytest.mark.slow
def test_shards_are_refused_by_name_and_in_tuples() -> None:
    for pairs in run_distributed(_refusals, 2, timeout=100):
        assert [(wanted, message) for wanted, message in pairs if wanted not in message] == []


def _in_config(rank: int) -> list[str]:
    messages = []
    model: Any = _split(_llama(), INPUTS, sequence_parallel=True)
    for option in ("output_hidden_states", "output_attentions"):
        setattr(model.config, option, True)
        for as_dict in (True, False):
            with pytest.raises(ScheduleError) as caught:
                model(**INPUTS, return_dict=as_dict)
            messages.append(str(caught.value))
        assert model(**INPUTS, **{option: False}).logits.shape == (2, 8, 32)
        setattr(model.config, option, False)
    return messages


def test_options_in_the_config_count() -> None:
    for messages in run_distributed(_in_config, 2):
        expected = [HIDDEN_STATES, HIDDEN_STATES, ATTENTIONS, ATTENTIONS]
        assert [message.startswith(start) for message, start in zip(messages, expected, strict=True)] == [True] * 4


def _by_position(rank: int) -> str:
    model = _split(Positions(), (IDS,), sequence_parallel=True)
    assert model(IDS)[0].shape == (2, 8, 32)
    assert model(IDS, False)[0].shape == (2, 8, 32)
    with pytest.raises(ScheduleError) as caught:
        model(IDS, True)
    return str(caught.value)


class Positions(nn.Module):
    """Model with a positional option that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _llama()

    def forward(self, ids: torch.Tensor, output_hidden_states: bool = False) -> Any:
        return self.model(ids, output_hidden_states=output_hidden_states, return_dict=False)


def test_positional_options_count() -> None:
    for message in run_distributed(_by_position, 2):
        assert message.startswith(HIDDEN_STATES)


def _whole(rank: int) -> None:
    model = _llama()
    before = copy.deepcopy(model)
    _split(model, INPUTS, **PLANS["MLP"])
    asked = {"output_attentions": True, "output_hidden_states": True}
    torch.testing.assert_close(model(**INPUTS, **asked).attentions, before(**INPUTS, **asked).attentions)
    found, expected = (each(**INPUTS, **asked, return_dict=False) for each in (model, before))
    torch.testing.assert_close(found, expected)
    model = _split(_llama(), INPUTS)
    assert len(model(**INPUTS, output_hidden_states=True, return_dict=False)) == 2
    x, (same,) = _split(Lists(), (torch.ones(2, 4),))(torch.ones(2, 4), output_attentions=True)
    assert x is same


def test_whole_outputs_are_returned() -> None:
    run_distributed(_whole, 2)
