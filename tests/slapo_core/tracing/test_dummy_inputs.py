"""The classic way to trace a model of Transformers: no example inputs, and the arguments that are none by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from slapo_core.errors import ScheduleError
from slapo_core.schedule import create_schedule
from slapo_core.tracing import TracedModule, trace

TOKENS = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(0))


def bert() -> nn.Module:
    return BertModel(
        BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    ).eval()


def t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).eval()


def concrete(model: nn.Module, *names: str) -> dict[str, Any]:
    """Every argument but the named ones, by its default, which ``**kwargs`` has none of."""
    parameters = inspect.signature(model.forward).parameters.values()
    found = {each.name: each.default for each in parameters if each.name not in names}
    assert inspect.Parameter.empty in found.values()
    return found


MASKED = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS), "token_type_ids": torch.zeros_like(TOKENS)}
CALLS: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "tokens": (bert, {"input_ids": TOKENS}),
    "a mask": (bert, MASKED),
    "labels": (t5, {"input_ids": TOKENS, "decoder_input_ids": TOKENS, "labels": TOKENS}),
}


@pytest.mark.parametrize(("make", "call"), CALLS.values(), ids=CALLS)
def test_the_inputs_are_the_arguments_that_are_not_concrete(make: Any, call: dict[str, torch.Tensor]) -> None:
    model = make()
    expected = model(**call)[0]
    sch = create_schedule(model)
    sch.trace(tracer="huggingface", concrete_args=concrete(model, *call))
    assert [node.target for node in sch.mod.graph.find_nodes(op="placeholder")] == list(call)
    torch.testing.assert_close(sch.mod(**call)[0], expected)
    assert sch.example_inputs.keys() == call.keys()
    sch.undo()
    assert sch.example_inputs is None


def test_down_to_a_module_and_inside() -> None:
    model = bert()
    expected = model(**MASKED)[0]
    sch = create_schedule(model)
    sch.trace_until("encoder", tracer="huggingface", concrete_args=concrete(model, *MASKED))
    assert "encoder" in [node.target for node in sch.mod.graph.find_nodes(op="call_module")]
    sch["encoder.layer.0"].trace(tracer="huggingface")
    assert isinstance(sch["encoder.layer.0"].mod, TracedModule)
    torch.testing.assert_close(sch.mod(**MASKED)[0], expected)


def test_a_function_traces_so_too() -> None:
    model = bert()
    traced = trace(model, tracer="huggingface", concrete_args=concrete(model, "input_ids"))
    torch.testing.assert_close(traced(TOKENS)[0], model(TOKENS)[0])


def test_inputs_given_to_trace_are_the_schedule_s() -> None:
    x = torch.randn(2, 4)
    sch = create_schedule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    sch["0"].trace_until("", example_inputs=x)
    assert sch.example_inputs is None
    sch.trace(example_inputs=x)
    assert sch.example_inputs is x


def test_a_model_without_inputs_of_its_own_takes_some() -> None:
    with pytest.raises(ScheduleError, match="tracer 'huggingface' runs the module; give its example_inputs"):
        create_schedule(nn.Linear(4, 4)).trace(tracer="huggingface")
