"""A traced module has the methods and properties of the class that was traced."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from slapo_core import create_schedule
from slapo_tracing import trace

CONFIG = GPT2Config(
    n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16, bos_token_id=1, eos_token_id=2, pad_token_id=0
)
TOKENS = torch.randint(3, 32, (2, 4), generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    kind = "scaled"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0

    @property
    def width(self) -> int:
        return self.linear.in_features

    @classmethod
    def made(cls) -> str:
        return cls.__name__

    @staticmethod
    def one() -> int:
        return 1

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self(self(x))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x).sin()
        return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"flatten": True}, {"recursive": False}])
def test_generation_and_saving(options: dict[str, Any], tmp_path: Path) -> None:
    model = GPT2LMHeadModel(CONFIG).eval()
    sch = create_schedule(copy.deepcopy(model), example_inputs={"input_ids": TOKENS})
    sch.trace(**options)
    traced: Any = sch.mod
    assert (traced.device, traced.dtype, traced.config) == (model.device, model.dtype, sch.mod.config)
    for how in ({"do_sample": False}, {"num_beams": 2}, {"use_cache": False}):
        given = {"attention_mask": torch.ones_like(TOKENS), "max_new_tokens": 4, **how}
        assert torch.equal(traced.generate(TOKENS, **given), model.generate(TOKENS, **given))
    traced.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    again = GPT2LMHeadModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("rewritten", [False, True])
def test_what_a_class_defines(rewritten: bool) -> None:
    model, x = Scaled(), torch.randn(2, 3)
    sch = create_schedule(model, example_inputs=(x,))
    sch.trace()
    if rewritten:
        sch.replace(torch.cos, lambda x: x.sin())
    traced: Any = sch.mod
    for each in (traced, copy.deepcopy(traced)):
        assert (each.kind, each.width, each.made(), each.one()) == ("scaled", 3, "Scaled", 1)
        torch.testing.assert_close(each.twice(x), each(each(x)))
    assert torch.equal(traced(x), model.linear(x).cos()) is rewritten
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        _ = traced.missing


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_method_sets_attributes(rewritten: bool) -> None:
    sch = create_schedule(Scaled(), example_inputs=torch.randn(2, 3))
    sch.trace()
    if rewritten:
        sch.replace(torch.cos, lambda x: x.sin())
    traced: Any = sch.mod
    traced.twice(torch.randn(2, 3))
    assert traced.calls == 1


def test_a_traced_sequence_is_a_sequence() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU()))
    traced: Any = trace(model, example_inputs=torch.randn(2, 3))
    assert len(traced) == 2
    assert [*traced] == [traced[0], traced[1]]
    assert traced[0] is model[0]
    assert len(traced[1]) == 1
