"""A traced module follows changes made after the trace to attributes that its forward reads."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import slapo
from slapo_core import TraceError
from slapo_tracing import trace
from tests.slapo_tracing.tracers.test_value_tracer import Forward

X = torch.randn(2, 4)
Change = Callable[[Any], Any]


@dataclass(slots=True)
class Slots:
    scale: float = 1.0


def with_parts(function: Callable[..., Any], **parts: Any) -> nn.Module:
    model = Forward(function)
    for name, part in parts.items():
        model.register_parameter(name, None) if part is nn.Parameter else setattr(model, name, part)
    return model


def layers() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def optional(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.fc(x)
    return x if self.part is None else self.part(x) if isinstance(self.part, nn.Module) else x + self.part


def all_layers(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer(x).relu()
    return x


def in_the_dtype_of_weights(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.embed(x).float().to(self.embed.weight.dtype) + torch.ones(4, dtype=self.fc(self.embed(x)).dtype)


def new(function: Callable[..., Any]) -> nn.Parameter:
    return nn.Parameter(torch.full((4,), 5.0))


CHANGES: dict[str, tuple[nn.Module, Change]] = {
    "a parameter for None": (with_parts(optional, part=nn.Parameter), lambda m: setattr(m, "part", new(m))),
    "None for a parameter": (with_parts(optional, part=new(optional)), lambda m: setattr(m, "part", None)),
    "a module for None": (with_parts(optional, part=None), lambda m: setattr(m, "part", nn.Tanh())),
    "None for a module": (with_parts(optional, part=nn.Tanh()), lambda m: setattr(m, "part", None)),
    "another module": (with_parts(optional, part=nn.Tanh()), lambda m: setattr(m, "part", nn.ReLU())),
    "one layer more": (with_parts(all_layers, layers=layers()), lambda m: m.layers.append(nn.Softmax(-1))),
    "one layer less": (with_parts(all_layers, layers=layers()), lambda m: m.layers.__delitem__(1)),
    "fewer layers": (with_parts(all_layers, layers=layers()), lambda m: setattr(m, "layers", m.layers[:2])),
    "an attribute that was not there": (
        with_parts(lambda self, x: self.fc(x) * getattr(self, "factor", 1.0)),
        lambda m: setattr(m, "factor", 3.0),
    ),
    "a module that was not there": (
        with_parts(lambda self, x: self.last(self.fc(x)) if hasattr(self, "last") else self.fc(x)),
        lambda m: setattr(m, "last", nn.Tanh()),
    ),
    "the other mode": (
        with_parts(lambda self, x: self.fc(x) * 2 if self.training else self.fc(x)),
        lambda m: m.eval(),
    ),
    "another number": (with_parts(lambda self, x: self.fc(x) * self.width, width=2.0), lambda m: setattr(m, "width", 3.0)),
    "another partial": (
        with_parts(lambda self, x: self.act(self.fc(x)), act=partial(torch.add, other=0.1)),
        lambda m: setattr(m, "act", partial(torch.add, other=0.9)),
    ),
    "inside of slots": (
        with_parts(lambda self, x: self.fc(x) * self.config.scale, config=Slots()),
        lambda m: setattr(m.config, "scale", 3.0),
    ),
}


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    model.zero_grad()
    out = model(x)
    out.sum().backward()
    return out, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("options", [{"example_inputs": (X,)}, {"example_inputs": (X,), "flatten": True}, {"tracer": "fx"}])
@pytest.mark.parametrize("case", CHANGES)
def test_changes(case: str, options: dict[str, Any]) -> None:
    model, change = copy.deepcopy(CHANGES[case])
    traced = trace(copy.deepcopy(model), **options)
    torch.testing.assert_close(gradients(traced, X), gradients(model, X))
    before = model(X)
    change(model), change(traced)
    torch.testing.assert_close(gradients(traced, X), gradients(model, X))
    assert not torch.equal(before, model(X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_of_weights(dtype: torch.dtype) -> None:
    model = with_parts(in_the_dtype_of_weights, embed=nn.Embedding(9, 4))
    ids = torch.arange(3)
    traced = trace(copy.deepcopy(model), example_inputs=(ids,))
    torch.testing.assert_close(gradients(traced.to(dtype), ids), gradients(model.to(dtype), ids))
    torch.testing.assert_close(gradients(traced.float(), ids), gradients(model.float(), ids))


def test_a_rewrite_is_not_lost_where_a_list_has_grown() -> None:
    model = with_parts(all_layers, layers=layers())
    sch = slapo.create_schedule(model, example_inputs=(X,))
    sch.trace()
    sch.replace(lambda x: x.relu() * 2, lambda x: x.relu())
    expected = X
    for layer in model.layers:
        expected = layer(expected).relu() * 2
    assert torch.equal(sch.mod(X), expected)
    sch.mod.layers.append(nn.Identity())
    with pytest.raises(TraceError, match=r"layers._modules\['3'\] is new, and the rewritten graph"):
        sch.mod(X)


@pytest.mark.parametrize("source", [itertools.count(), iter([1, 2]), random.Random(0)])
def test_what_gives_something_else_every_time(source: Any) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (source.random() if isinstance(self.source, random.Random) else next(self.source))

    model = with_parts(forward, source=source)
    with pytest.raises(TraceError, match="'source', which returns a different value each time"):
        trace(model, example_inputs=(X,))


CACHE: dict[int, torch.Tensor] = {}
TABLES: dict[str, dict[int, torch.Tensor]] = {"cpu": {}}


def test_a_cache_in_a_global() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[0]
        for cache in (CACHE, TABLES["cpu"], self.cache):
            if size not in cache:
                cache[size] = torch.arange(size)[:, None]
            x = x + cache[size]
        return self.fc(x)

    model = Forward(forward)
    type(model).cache = {}
    traced = trace(model, example_inputs=(X,))
    assert not CACHE
    for rows in (2, 3, 2, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(traced(x), model(x))
        CACHE.clear() if rows == 2 else None
    del type(model).cache


def test_what_is_asked_in_the_middle_does_nothing_twice() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        x = self.fc(x)
        return x if x.requires_grad else x * 5

    model = Forward(forward)
    model.register_buffer("steps", torch.zeros(()))
    traced = trace(model, example_inputs=(X,))
    traced(X)
    model.requires_grad_(False)
    assert torch.equal(traced(X), model.fc(X) * 5)
    assert model.steps == 2


def test_what_a_hook_notes_is_noted_once() -> None:
    noted: list[torch.Tensor] = []
    model = Forward(lambda self, x: self.fc2(self.fc(x)))
    model.fc.register_forward_hook(lambda module, args, out: noted.append(out))
    traced = trace(model, example_inputs=(X,))
    assert noted == []
    for rows in (2, 3):
        traced(torch.randn(rows, 4))
    assert [type(each) for each in noted] == [torch.Tensor, torch.Tensor]
    assert [len(each) for each in noted] == [2, 3]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = Forward(lambda self, x: self.fc(x).relu()), nn.ReLU()
        self.layers = nn.ModuleList([self.first, Forward(lambda self, x: self.fc(x).tanh())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.act(x)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("place", ["first", "layers.0"])
def test_a_shared_module_stays_one(place: str, flatten: bool) -> None:
    model = Shared()
    traced: Any = trace(copy.deepcopy(model), example_inputs=(X,), flatten=flatten)
    assert traced.first is traced.layers[0]
    for each in (model, traced):
        torch.manual_seed(0)
        each.get_submodule(place).fc = nn.Linear(4, 4)
    torch.testing.assert_close(gradients(traced, X), gradients(model, X))


class Tied(nn.Module):
    """A weight and a module at two places each; it reads the one and calls the other by one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight
        self.one = nn.Linear(4, 4)
        self.several = nn.ModuleList([self.one, nn.Linear(4, 4)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.several:
            x = layer(x)
        return functional.linear(self.one(x), self.head.weight)


def untie(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.linspace(-1, 1, 20).view(5, 4))


def replace_one(model: Any) -> None:
    model.several[0] = new_layer()


def replace_other(model: Any) -> None:
    model.one = new_layer()


def new_layer() -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [*itertools.permutations([untie, replace_one, replace_other])])
@pytest.mark.parametrize("rewritten", [False, True])
def test_a_tie_ends(order: tuple[Change, ...], rewritten: bool) -> None:
    model = Tied()
    plain, ids = copy.deepcopy(model), torch.tensor([[0, 1, 4]])
    sch = slapo.create_schedule(model, example_inputs=(ids,))
    sch.trace(flatten=True)
    if rewritten:
        sch.replace(lambda x, w: functional.linear(x, w), lambda x, w: functional.linear(x, w))
    for change in order:
        change(sch.mod)
        change(plain)
        for given in (ids, ids[:, :2]):
            torch.testing.assert_close(sch.mod(given), plain(given))
