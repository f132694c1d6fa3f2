"""Subclasses of Embedding with an own forward are split only if it multiplies the rows by a constant."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from slapo_core import create_schedule
from slapo_sharding.rules.embeddings import is_embedding
from slapo_verify import run_as_threads
from slapo_verify.comparison import assert_equivalent


class Clamped(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(-0.5, 0.5)


class Shifted(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Normed(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = super().forward(input)
        return rows / rows.norm(dim=-1, keepdim=True)


class Squared(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = super().forward(input)
        return rows * rows


class InTraining(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = super().forward(input)
        return rows * rows if self.training else rows


class WithoutGradient(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return super().forward(input)


class ByRow(nn.Embedding):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(sizes[0]))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale[input].unsqueeze(-1)


SCALED = {
    "gemma": lambda: Gemma3TextScaledWordEmbedding(10, 8, 3, embed_scale=2.5),
    "bart": lambda: BartScaledWordEmbedding(10, 8, 3, embed_scale=2.5),
}


@pytest.mark.parametrize("cls", [Clamped, Shifted, Normed, Squared, InTraining, WithoutGradient, ByRow])
def test_other_forwards_are_not_split(cls: Any) -> None:
    assert not is_embedding(cls(10, 8))


def _split(kind: str, axis: int) -> None:
    torch.manual_seed(0)
    before = SCALED[kind]()
    model = nn.Sequential(copy.deepcopy(before))
    sch = create_schedule(model)
    sch["0"].shard("weight", axis=axis)
    sch["0"].sync("fwd_post", "all_reduce" if axis == 0 else "all_gather", **({} if axis == 0 else {"axis": -1}))
    assert_equivalent(nn.Sequential(before), model, torch.tensor([[0, 3, 9], [5, 6, 3]]))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rows_are_split_along_both_dimensions(kind: str, axis: int) -> None:
    assert is_embedding(SCALED[kind]())
    run_as_threads(lambda: _split(kind, axis), 2)
