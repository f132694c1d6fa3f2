"""``analyze_tie_weights`` and the tie groups of stages."""

from __future__ import annotations

import time

import torch
from torch import nn

from slapo_core import TieGroup
from slapo_pipeline.partition import analyze_tie_weights
from slapo_pipeline.partition.stage_module import tie_groups


def _tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "middle": nn.Linear(4, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embedding"].weight
    return model


def test_ties_of_a_whole_model() -> None:
    model = _tied()
    assert analyze_tie_weights(model, False) == {model["head"].weight: {("embedding.weight", 0), ("head.weight", 0)}}


def test_ties_between_stages() -> None:
    model = _tied()
    stages = nn.Sequential(nn.ModuleDict({"embedding": model["embedding"]}), nn.ModuleDict({"head": model["head"]}))
    assert analyze_tie_weights(stages, True) == {model["head"].weight: {("embedding.weight", 0), ("head.weight", 1)}}
    assert tie_groups(model, list(stages)) == (TieGroup(("embedding.weight", "head.weight"), (0, 1)),)


def test_nothing_tied() -> None:
    model = nn.Linear(2, 2)
    assert analyze_tie_weights(model, False) == {}
    assert tie_groups(model, [model]) == ()


def test_linear_in_the_number_of_modules() -> None:
    def seconds(modules: int) -> float:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.PReLU() for _ in range(modules)))
        return min(_once(model) for _ in range(3))

    assert seconds(12_000) < 40 * seconds(1_200)


def _once(model: nn.Module) -> float:
    start = time.perf_counter()
    assert analyze_tie_weights(model, False) == {}
    return time.perf_counter() - start
