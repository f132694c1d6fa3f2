"""Objects that a hook can reach, declarations of hooks, and masks that are sharded with their parameter."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import UnknownNameError
from slapo_training.gradient_hooks import gradient_hook, shard_attributes
from slapo_training.gradient_hooks.hook_kinds import is_elementwise, reads_weights

LAYER = nn.Linear(2, 3)
MASK = torch.ones(3, 2)


class _Keeps:
    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __call__(self, gradient: torch.Tensor) -> None:
        """Do nothing."""

    def method(self, gradient: torch.Tensor) -> None:
        """Do nothing."""


def _of_global(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + LAYER.weight


def _closed(value: Any) -> Any:
    return lambda gradient: (gradient, value)


@pytest.mark.parametrize(
    "hook",
    [
        _of_global,
        lambda gradient: _of_global(gradient),
        _closed({"layers": [LAYER]}),
        _closed(LAYER.weight),
        functools.partial(lambda weight, gradient: gradient, LAYER.weight),
        lambda gradient, layer=LAYER: gradient,
        _Keeps(LAYER),
        _Keeps([_Keeps(LAYER.bias)]).method,
        _closed(torch.optim.SGD(LAYER.parameters())),
        lambda gradient: [LAYER.weight for _ in range(2)],
    ],
)
def test_a_hook_that_can_reach_weights(hook: Any) -> None:
    assert reads_weights(hook)


@pytest.mark.parametrize(
    "hook",
    [
        lambda gradient: gradient * MASK,
        lambda gradient: F.normalize(torch.clamp(gradient, -1, 1)),
        _closed([MASK, 3, "name", {}, torch.float32]),
        _Keeps({"norms": []}),
        _Keeps(MASK).method,
        torch.Tensor.sign,
        [].append,
        functools.partial(torch.mul, MASK),
    ],
)
def test_a_hook_that_cannot(hook: Any) -> None:
    assert not reads_weights(hook)


def test_a_method_can_be_said_to_be_elementwise() -> None:
    keeps = _Keeps(None)
    assert is_elementwise(gradient_hook(keeps.method, kind="elementwise"))
    assert not is_elementwise(gradient_hook(keeps))
    assert not is_elementwise(keeps.method)


def test_an_unknown_kind() -> None:
    with pytest.raises(UnknownNameError, match="no kind 'linear'; available: elementwise, whole"):
        gradient_hook(torch.sign, kind="linear")


def test_what_is_cut_with_a_parameter() -> None:
    part: Any = nn.Parameter(torch.ones(2, 6))
    kept = {"mask": torch.arange(24).view(4, 6), "rows": torch.arange(4)[:, None], "columns": torch.arange(6)[None]}
    part.__dict__.update({**kept, "scale": torch.tensor(2.0), "other": torch.ones(4), "name": "w"})
    found = shard_attributes(part, (4, 6), 0, lambda tensor: tensor[2:])
    assert found.keys() == {"mask", "rows"}
    assert part.mask.tolist() == kept["mask"][2:].tolist()
    assert part.rows.tolist() == [[2], [3]]
    assert part.columns is kept["columns"]
    assert part.other.tolist() == [1.0] * 4
