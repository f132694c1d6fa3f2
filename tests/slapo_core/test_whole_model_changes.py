"""Changes that a primitive makes to the whole model: modules in the places of others, metadata, example inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import Primitive, Registry, Schedule, create_schedule, hookimpl


class WrapAllPrimitive(Primitive):
    """Put a sequence of one around every module; raise afterwards if told to."""

    name = "wrap_all"
    scope = "module"

    @staticmethod
    def apply(schedule: Schedule, fail: bool = False) -> None:
        replacements: dict[nn.Module, nn.Module] = {}
        for module in schedule.root_module.modules():
            replacements[module] = nn.Sequential(module)
            schedule.share_metadata(module, replacements[module])
        schedule.example_inputs = (torch.ones(1, 2),)
        schedule.replace_modules(replacements)
        if fail:
            raise RuntimeError("after the changes")


class Plugin:
    @hookimpl
    def slapo_primitives(self) -> dict[str, type[Primitive]]:
        return {"wrap_all": WrapAllPrimitive}


@pytest.fixture
def sch() -> Schedule:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    schedule = create_schedule(model, plugins=Registry([Plugin()]))
    schedule["0"].annotate("weight", "lr_scale", 0.5)
    return schedule


def places(sch: Schedule) -> list[tuple[str, nn.Module]]:
    return list(sch.mod.named_modules(remove_duplicate=False))


def facts(sch: Schedule) -> Any:
    return places(sch), sch.example_inputs, {name: set(it.metadata.param_tags) for name, it in sch.named_schedules()}


def test_every_place_of_a_module_holds_the_other(sch: Schedule) -> None:
    model, shared = sch.mod, sch["0"].mod
    x = torch.randn(3, 2)
    expected = model(x)
    sch.wrap_all()
    assert type(sch.mod) is nn.Sequential
    assert sch["0"].mod is model
    assert sch["0.0"].mod is sch["0.1.0.1"].mod
    assert sch["0.0.0"].mod is shared
    assert torch.equal(sch.mod(x), expected)


def test_both_modules_have_the_same_metadata(sch: Schedule) -> None:
    sch.wrap_all()
    assert sch["0.0"].metadata is sch["0.0.0"].metadata
    assert sch["0.0"].metadata.param_tags == {"lr_scale"}


def test_an_undo_brings_back_modules_and_inputs(sch: Schedule) -> None:
    before = facts(sch)
    sch.wrap_all()
    assert sch.example_inputs is not None
    sch.undo()
    assert facts(sch) == before


def test_a_failure_afterwards_changes_nothing(sch: Schedule) -> None:
    before = facts(sch)
    with pytest.raises(RuntimeError, match="after the changes"):
        sch.wrap_all(fail=True)
    assert facts(sch) == before


def test_a_later_step_finds_the_new_places(sch: Schedule) -> None:
    sch.wrap_all()
    sch["0.0"].replace(nn.Linear(2, 2))
    assert sch["0.1.0.1"].mod is sch["0.0"].mod
