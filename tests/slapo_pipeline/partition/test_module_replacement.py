"""A model that was cut, and in which something is replaced before the next call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from slapo_core import build_program

from ..stage_comparison import assert_same, cut


class Inner(nn.Module):
    """Without parameters: it is traced into."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + 1.0


class Model(nn.Module):
    """Uses a buffer and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = Inner()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("temp", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.inner(self.b(self.a(x) * self.temp) * self.scale)) / self.temp


def _buffer(model: Model) -> None:
    model.temp = torch.tensor(2.0)


def _parameter(model: Model) -> None:
    model.scale = nn.Parameter(torch.full((4,), 3.0))


def _submodule(model: Model) -> None:
    torch.manual_seed(5)
    model.b = nn.Linear(4, 4)


def _hook_of_a_leaf(model: Model) -> None:
    model.b.register_forward_hook(lambda module, args, out: out * 2)


def _hook_inside(model: Model) -> None:
    model.inner.register_forward_hook(lambda module, args, out: out * 2)


def _forward_inside(model: Model) -> None:
    model.inner.forward = lambda x: x * 3  # type: ignore[method-assign]


CHANGES = [_buffer, _parameter, _submodule, _hook_of_a_leaf, _hook_inside, _forward_inside]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_replaced_counts_in_the_next_call(change: Callable[[Model], None]) -> None:
    model, x = Model(), torch.randn(2, 4)
    before = copy.deepcopy(model)
    program = build_program(cut(model, {"x": x}, "a"))
    assert_same(program(x=x), before(x), "before")
    assert program.replan(True, {"x": x}) is program  # type: ignore[misc]
    for each in (model, before):
        change(each)
    found, expected = program(x=x), before(x)
    assert_same(found, expected, "after")
    found.sum().backward()
    expected.sum().backward()
    assert_same(*({name: p.grad for name, p in each.named_parameters()} for each in (model, before)), "grad")
    again = program.replan(True, {"x": x})  # type: ignore[misc]
    assert program.replan(True, {"x": x}) is again  # type: ignore[misc]


def test_a_hook_of_the_model_put_on_later_runs_in_the_last_stage() -> None:
    model, x = Model(), torch.randn(2, 4)
    program = build_program(cut(model, {"x": x}, "a"))
    handle = model.register_forward_hook(lambda module, args, out: out * 2)
    assert_same(program(x=x), model(x), "with it")
    handle.remove()
    assert_same(program(x=x), model(x), "without it")


def test_a_hook_put_later_on_a_block_taken_apart_for_its_table_runs() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=16,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    before = copy.deepcopy(model)
    batch = {"input_ids": torch.randint(1, 16, (2, 5)), "labels": torch.randint(1, 16, (2, 3))}
    program = build_program(cut(model, batch, "encoder.block.0", "encoder"))
    assert len(program.stages[1].inputs) == 1  # the position bias does not cross: blocks are taken apart
    for each in (model, before):
        each.encoder.block[1].layer[0].register_forward_hook(lambda module, args, out: (out[0] * 2, *out[1:]))
    assert_same(program(**batch).loss, before(**batch).loss, "loss")
