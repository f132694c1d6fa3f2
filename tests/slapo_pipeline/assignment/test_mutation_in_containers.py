"""A block that stays whole changes a tensor in place that it was given inside of a container or an object."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import TraceError, build_program

from ..stage_comparison import assert_same, assert_same_as_model, cut


class Holder:
    """An object with a tensor in it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


WRAPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda t: [t],
    "list of lists": lambda t: [[t]],
    "dict": lambda t: {"h": t},
    "dict of lists": lambda t: {"h": [t]},
    "object": Holder,
    "object in a dict": lambda t: {"h": Holder(t)},
}


def _inside(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = value[0] if isinstance(value, list) else value["h"] if isinstance(value, dict) else value.value
    return value


class Doubles(nn.Module):
    """Doubles what is inside its second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, held: Any) -> torch.Tensor:
        value = _inside(held)
        value.mul_(2.0)
        return self.linear(x) * value


class Model(nn.Module):
    """Uses the value again behind the block; ``of`` says where it comes from."""

    def __init__(self, wrap: str, of: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), Doubles(), nn.Linear(8, 8)
        self.wrap, self.of = wrap, of

    def forward(self, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        value = {"mask": (x > 0).float(), "argument": m, "hidden": h * 1.0}[self.of]
        if self.wrap == "put in later":
            held: Any = Holder(x)
            self.b(h, Holder(x.clone()))
            held.value = value
        else:
            held = WRAPS[self.wrap](value)
        h = self.b(h, held)
        return self.c(h) * value + value


@pytest.mark.parametrize("cuts", [("a",), ("b",), ("a", "b")])
@pytest.mark.parametrize("of", ["mask", "argument", "hidden"])
@pytest.mark.parametrize("wrap", [*WRAPS, "put in later"])
def test_users_behind_a_cut_see_the_change(wrap: str, of: str, cuts: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Model(wrap, of)
    before = copy.deepcopy(model)
    x, m = torch.randn(4, 8), torch.randn(4, 8)
    program = build_program(cut(model, {"x": x, "m": m}, *cuts))
    changed, expected = m.clone(), before(x, given := m.clone())
    found = program(x=x, m=changed)
    assert_same([found, changed], [expected, given], "outputs")
    expected.sum().backward()
    found.sum().backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in before.named_parameters()}, "grad")


class Scaled(nn.Module):
    """Reads a number, a tensor and whether it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.mask = nn.Linear(8, 8), 1.0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * self.scale + (0.25 if self.training else 0.0)
        return x if self.mask is None else x * self.mask


class Switched(nn.Module):
    """Sets what its blocks read for the first of their two calls, as an adapter is switched off for a reference."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            block.scale, block.mask = number + 2.0, (x > 0).float()
            block.eval()
            x = block(x)
            block.scale, block.mask = 1.0, None
            block.train()
            x = block(x)
        return x.square().mean()


def test_attributes_that_the_model_sets_for_one_call_of_a_block() -> None:
    torch.manual_seed(0)
    assert_same_as_model(Switched(), {"x": torch.randn(4, 8)}, "blocks.0", "blocks.1")


def test_a_block_with_hooks_that_is_called_with_another_attribute_is_refused() -> None:
    model = Switched()
    model.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(TraceError, match="sets '(training|scale)' for some calls of 'blocks.1', which is sharded or has hooks"):
        build_program(cut(model, {"x": torch.randn(4, 8)}, "blocks.0"))
