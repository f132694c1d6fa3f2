"""``undo`` takes back what the step did, and leaves what others have done to the same module since."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slapo_core import Primitive, Registry, Schedule, create_schedule, hookimpl


def mark(module: nn.Module, args: Any, output: Any) -> None:
    """A hook of the step's."""


def ours(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """A hook of the user's, with keyword inputs."""


class Busy(Primitive):
    """Changes every kind of table a module has."""

    name = "busy"
    scope = "module"

    @staticmethod
    def apply(schedule: Schedule) -> None:
        module = schedule.mod
        module.register_forward_hook(mark, with_kwargs=False)
        module.register_buffer("step", torch.zeros(1), persistent=False)
        module.size = 8
        module.order.append("step")
        del module.first
        module.first = nn.Tanh()


class Plugin:
    @hookimpl
    def slapo_primitives(self) -> dict[str, type[Primitive]]:
        return {"busy": Busy}


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.ReLU()
        self.size, self.order = 4, ["before"]
        self.before = self.register_forward_pre_hook(lambda module, args: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _scheduled() -> tuple[Held, Schedule, nn.Module]:
    model = Held()
    first = model.first
    return model, create_schedule(model, plugins=Registry([Plugin()])).busy(), first


def test_hooks_registered_since_stay_and_can_be_removed():
    model, sch, _ = _scheduled()
    handle = model.register_forward_hook(ours, with_kwargs=True)
    sch.undo()
    assert list(model._forward_hooks.values()) == [ours]
    assert list(model._forward_hooks_with_kwargs) == list(model._forward_hooks)
    handle.remove()
    assert not model._forward_hooks
    assert not model._forward_hooks_with_kwargs


def test_hooks_removed_since_stay_removed():
    model, sch, _ = _scheduled()
    model.before.remove()
    sch.undo()
    assert not model._forward_pre_hooks


def test_parameters_buffers_modules_and_attributes_added_since_stay():
    model, sch, first = _scheduled()
    model.scale = nn.Parameter(torch.ones(2))
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    model.third = nn.Linear(2, 2)
    model.note = "mine"
    sch.undo()
    assert model.first is first
    assert list(model._modules) == ["first", "second", "third"], "the order of before, new ones behind"
    assert [name for name, _ in model.named_buffers()] == ["cache"]
    assert "cache" not in model.state_dict()
    assert "scale" in model.state_dict()
    assert (model.size, model.note, model.order) == (4, "mine", ["before"])


def test_steps_are_taken_back_one_by_one_around_what_others_did():
    model, sch, _ = _scheduled()
    between = model.register_forward_hook(ours, with_kwargs=True)
    sch["second"].replace(nn.Tanh())
    sch.undo()
    sch.undo()
    assert list(model._forward_hooks) == [between.id]
    assert [type(module) for module in model.children()] == [nn.Linear, nn.ReLU]
