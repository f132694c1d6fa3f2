"""Models traced without example inputs: those of Transformers by their own, with the arguments that are none by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from slapo_core import ScheduleError, TraceError, create_schedule
from slapo_tracing import trace
from slapo_tracing.graphs import TracedModule

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("make", "call"), CALLS.values(), ids=CALLS)
def test_the_inputs_are_the_arguments_that_are_not_concrete(make: Any, call: dict[str, torch.Tensor]) -> None:
    model = make()
    expected = model(**call)[0]
    sch = create_schedule(model)
    sch.trace(tracer="huggingface", concrete_args=concrete(model, *call))
    assert [node.target for node in sch.mod.graph.find_nodes(op="placeholder")] == list(call)
    torch.testing.assert_close(sch.mod(**call)[0], expected)
    sch.undo()
    assert sch.mod is model


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


class Gated(nn.Module):
    """Nothing that ``torch.fx`` can trace."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return out * 2 if out.shape[-1] > 1 else out


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 6), nn.Linear(6, 6)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) + self.table(ids)
        return out if len(ids) else x


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight if x.dim() > 1 else x


MODELS: dict[str, tuple[nn.Module, tuple[tuple[int, ...], ...]]] = {
    "linear": (Gated(nn.Linear(4, 2)), ((3, 4),)),
    "norm": (Gated(nn.LayerNorm(4)), ((3, 5, 4),)),
    "sequential": (Gated(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), ((3, 7, 4),)),
    "transformer": (Gated(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)), ((3, 7, 8),)),
    "image": (Gated(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), ((2, 3, 9, 9),)),
    "sound": (Gated(nn.Conv1d(2, 4, 3)), ((2, 2, 9),)),
    "video": (Gated(nn.Conv3d(2, 4, 3)), ((2, 2, 9, 9, 9),)),
    "bare": (Bare(), ((4, 5),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_the_first_layers_take(name: str) -> None:
    model, shapes = MODELS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    expected = model(*inputs)
    sch = create_schedule(model)
    sch.trace(flatten=True)
    assert isinstance(sch.mod, TracedModule)
    torch.testing.assert_close(sch.mod(*inputs), expected)


def test_arguments_of_two_kinds() -> None:
    model = Pair()
    ids, x = torch.randint(10, (2, 5)), torch.randn(2, 5, 6)
    expected = model(ids, x)
    sch = create_schedule(model)
    sch.trace(tracer="value")
    torch.testing.assert_close(sch.mod(ids, x), expected)


def test_where_no_inputs_are_found_the_user_gives_some() -> None:
    class Strange(nn.Module):
        def forward(self, x: Any) -> torch.Tensor:
            found: torch.Tensor = x["a"] if "a" in x else x["b"]
            return found

    for tracer, error in (("huggingface", ScheduleError), ("value", ScheduleError), (None, TraceError)):
        with pytest.raises(error, match="give (its )?example_inputs"):
            create_schedule(Strange()).trace(tracer=tracer)
