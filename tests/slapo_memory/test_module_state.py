"""State and random numbers of a checkpointed forward are as without the checkpoint: they advance once."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from slapo_core import create_schedule
from slapo_memory.forward_wrappers import checkpoint

pytestmark = pytest.mark.usefixtures("only_memory")


class Counter(nn.Module):
    """Scales by how often it ran, counted in place or in a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.in_place = in_place
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("unused", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.runs += 1
        else:
            self.runs = self.runs + 1
        return self.fc(x * self.runs).tanh() * self.runs


class Functional(nn.Module):
    """Batch norm by hand: the kernel writes to a buffer of a class of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=True).tanh()


class Remembering(nn.Module):
    """Scales by what it keeps in plain attributes, some of them not there at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.calls, self.sums, self.total = 0, {"all": [0]}, torch.ones(())
        self.recent, self.seen = deque([1], maxlen=2), set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sums["all"].append(self.sums["all"][-1] + self.calls)
        self.recent.append(self.calls)
        self.seen.add(len(self.sums["all"]))
        self.total += len(self.seen)
        self.last = getattr(self, "last", 0) + sum(self.recent)
        return self.fc(x * self.sums["all"][-1] + self.last).tanh() * self.total


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), Counter(True))


@pytest.mark.parametrize(
    "body",
    [normalized, Functional, spectral, mixed, lambda: Counter(True), lambda: Counter(False), Remembering],
    ids=["batch-norm", "functional", "spectral-norm", "mixed", "in-place", "new-tensor", "attributes"],
)
@pytest.mark.parametrize("nested", [False, True], ids=["once", "nested"])
def test_buffers_and_gradients_equal_the_unmodified_model(body: Callable[[], nn.Module], nested: bool) -> None:
    torch.manual_seed(0)
    before = nn.Sequential(nn.Linear(4, 4), body(), nn.Linear(4, 4))
    after = copy.deepcopy(before)
    sch = create_schedule(after)
    sch["1"].checkpoint()
    if nested:
        sch.checkpoint()
    for _ in range(2):
        x = torch.randn(8, 4)
        for model in (before, after):
            model(x).square().sum().backward()
    for (name, expected), found in zip(before.state_dict().items(), after.state_dict().values(), strict=True):
        assert torch.equal(expected, found), name
    for expected, found in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def attributes(module: Remembering) -> tuple[object, ...]:
    return module.calls, module.sums, module.total, module.recent, module.seen, module.last


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        lambda module: module,
        lambda module: module.forward,
        lambda module: partial(module.forward),
        lambda module: lambda x: module(x),
        lambda module: partial(nn.Module.__call__, module),
    ],
    ids=["module", "method", "partial", "closure", "argument"],
)
def test_the_function_advances_state_once(call: Callable[[nn.Module], Callable[..., Any]], use_reentrant: bool) -> None:
    before = nn.ModuleList([Counter(True), Remembering(), nn.BatchNorm1d(4)])
    after = copy.deepcopy(before)
    for _ in range(2):
        x = torch.randn(8, 4, requires_grad=True)
        y, z = x, x
        for module, again in zip(before, after, strict=True):
            y, z = module(y), checkpoint(call(again), z, use_reentrant=use_reentrant)
        y.square().sum().backward()
        z.square().sum().backward()
    assert attributes(before[1]) == attributes(after[1])
    for expected, found in zip(before.buffers(), after.buffers(), strict=True):
        assert torch.equal(expected, found)
    for expected, found in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def test_attributes_advance_once_and_stay_the_same_objects() -> None:
    before = Remembering()
    after = copy.deepcopy(before)
    create_schedule(after).checkpoint()
    held = after.sums, after.total, after.recent
    for model in (before, after):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    assert attributes(before) == attributes(after)
    assert all(one is other for one, other in zip(held, (after.sums, after.total, after.recent), strict=True))


def test_the_buffers_stay_the_same_tensors() -> None:
    module = nn.BatchNorm1d(4)
    held = dict(module.named_buffers())
    create_schedule(module).checkpoint()
    module(torch.randn(8, 4, requires_grad=True)).sum().backward()
    assert all(buffer is held[name] for name, buffer in module.named_buffers())
    assert module.num_batches_tracked == 1


class Noting(nn.Module):
    """As in DeepSpeed's ZeRO, the first forward records state that the recomputation must find."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)
        self.inside._external_params = {}
        self.found: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noted = self.inside._external_params
        self.found.append([*noted])
        noted[id(self.inside.weight)] = self.inside.weight
        return self.inside(x).sin()


def test_the_recompute_finds_what_the_forward_noted_for_zero() -> None:
    module = Noting()
    seen: list[int] = []
    module.inside.register_forward_pre_hook(lambda inside, args: seen.append(len(inside._external_params)))
    before = copy.deepcopy(module.inside._external_params)
    create_schedule(module).checkpoint()
    module(torch.ones(2, 4)).sum().backward()
    assert (before, seen) == ({}, [1, 1])
    assert [*module.inside._external_params] == [id(module.inside.weight)]


def test_two_forwards_before_their_backwards() -> None:
    """As micro-batches in a pipeline: each recompute sees the buffers of its own forward."""
    before = Counter(False)
    after = copy.deepcopy(before)
    create_schedule(after).checkpoint()
    x = torch.randn(3, 4)
    for model in (before, after):
        first, second = model(x), model(2 * x)
        first.sum().backward()
        second.sum().backward()
    assert torch.equal(before.runs, after.runs)
    assert torch.equal(before.fc.weight.grad, after.fc.weight.grad)


class LayerDrop(nn.Module):
    """Skips a layer at random, as a number of Python's or NumPy's says."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.draw() < 0.5:
                x = layer(x).tanh()
        return x * self.draw()


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["python", "numpy"])
def test_the_recompute_draws_the_same_and_leaves_the_state_alone(draw: Callable[[], float]) -> None:
    before = LayerDrop(draw)
    after = LayerDrop(draw)
    after.load_state_dict(before.state_dict())
    create_schedule(after).checkpoint()
    following: list[float] = []
    for model in (before, after):
        random.seed(5)
        numpy.random.seed(5)
        for scale in (1.0, 2.0):
            model(scale * torch.ones(2, 4, requires_grad=True)).square().sum().backward()
        following.append(draw())
    assert following[0] == following[1]
    for expected, found in zip(before.parameters(), after.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None)
        assert expected.grad is None or torch.equal(expected.grad, found.grad)


class Shifting(nn.Module):
    """Scales by attributes and buffers that are not there, or are of another class, in another call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.state: Any = None
        self.pair: Any = (1, (2, 3))
        self.scale = torch.ones((), requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is None:
            self.state = [1.0]
        elif isinstance(self.state, list):
            self.state.append(2.0 * len(self.state))
            self.state = {"sum": torch.tensor(sum(self.state))} if len(self.state) > 2 else self.state
        else:
            self.state["sum"] += 1
        if "runs" not in self._buffers:
            self.register_buffer("runs", torch.zeros(()))
        self.runs += 1
        self.pair = (*self.pair, self.runs.item())
        self.scale = (self.scale + 1).detach()
        held = self.state["sum"] if isinstance(self.state, dict) else sum(self.state, 0.0)
        return self.fc(x * self.runs + held + len(self.pair)).tanh() * self.scale


def test_attributes_that_change_their_class_and_new_buffers_advance_once() -> None:
    before = nn.Sequential(nn.Linear(4, 4), Shifting())
    after = copy.deepcopy(before)
    create_schedule(after)["1"].checkpoint()
    for _ in range(5):
        for model in (before, after):
            model(torch.ones(2, 4)).square().sum().backward()
    assert before[1].state == after[1].state
    assert before[1].pair == after[1].pair
    assert torch.equal(before[1].runs, after[1].runs)
    for expected, found in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def test_a_tensor_that_is_switched_to_no_gradients_is_kept_from_then_on() -> None:
    """The same tensor in the same attribute: only what it requires is another."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.held = [torch.ones((), requires_grad=True)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.held[0].requires_grad:
                self.held[0] += 1
            return self.fc(x * self.held[0].detach()).tanh()

    before = Counting()
    after = copy.deepcopy(before)
    create_schedule(after).checkpoint()
    for run in range(3):
        for model in (before, after):
            model.held[0].requires_grad_(run < 1)
            model(torch.ones(2, 4)).square().sum().backward()
    assert before.held[0].item() == after.held[0].item() == 3
    assert torch.equal(before.fc.weight.grad, after.fc.weight.grad)
