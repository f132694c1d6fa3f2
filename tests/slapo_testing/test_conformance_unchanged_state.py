"""The conformance kit: faults in what a step keeps, arguments, hooks and memory, or refuses."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Primitive, Schedule, ScheduleError, hookimpl, successor
from slapo_testing.conformance import ConformanceError, Example, primitive_checks
from slapo_tracing.nodes import wrap_forward

HERE = __name__
X = torch.linspace(-1, 1, 8).view(2, 4)
Wrapper = Callable[..., torch.Tensor]
PLANTED: dict[str, Any] = {}


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def as_it_was(call: Wrapper, x: torch.Tensor) -> torch.Tensor:
    return call(x)


class UsesUp:
    """A list, when it runs."""

    def __init__(self, given: list[int]) -> None:
        self.given = given

    def __call__(self, call: Wrapper, x: torch.Tensor) -> torch.Tensor:
        self.given and self.given.pop()
        return call(x)


class Averages:
    """Keeps numbers of its own, which copies share."""

    def __init__(self) -> None:
        self.average = torch.zeros(1)

    def __deepcopy__(self, _: Any) -> Averages:
        return self

    def __call__(self, call: Wrapper, x: torch.Tensor) -> torch.Tensor:
        self.average += 1
        return call(x)


class SharesBuffers(nn.Linear):
    """Copies all but these."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharesBuffers:
        new = type(self).__new__(type(self))
        state = {key: value if key == "_buffers" else copy.deepcopy(value, memo) for key, value in self.__dict__.items()}
        new.__dict__.update(state)
        return new


class Another(nn.Linear):
    """Computes what a Linear does."""


def planted(function: Any) -> Any:
    """Make a primitive of a function of a schedule, which is for a Linear."""
    name = function.__name__
    body = {"name": name, "__doc__": function.__doc__ or "Is broken.", "apply": staticmethod(function), "__module__": HERE}
    PLANTED[name] = f"{HERE}:{name}"
    check = _takes_given if len(inspect.signature(function).parameters) > 1 else _is_linear
    return type(name, (Primitive,), {"check": staticmethod(check), **body})


def _takes_given(schedule: Schedule, given: Any) -> None:
    _is_linear(schedule)


def _is_linear(schedule: Schedule) -> None:
    if type(schedule.mod) is not nn.Linear:
        raise ScheduleError(f"a {type(schedule.mod).__name__}; name a Linear", path=schedule.path)


@planted
def uses_up_later(schedule: Schedule, given: list[int]) -> None:
    wrap_forward(schedule.mod, UsesUp(given))


@planted
def uses_up_in_a_dict(schedule: Schedule, given: dict[str, list[int]]) -> None:
    given["rows"].clear()


@planted
def changes_a_tensor(schedule: Schedule, given: torch.Tensor) -> None:
    given.zero_()


@planted
def averages(schedule: Schedule) -> None:
    wrap_forward(schedule.mod, Averages())


@planted
def shares_a_buffer(schedule: Schedule) -> None:
    schedule.mod.__class__ = SharesBuffers
    schedule.mod.register_buffer("seen", torch.zeros(1), persistent=False)


@planted
def drops_flags(schedule: Schedule) -> None:
    _replaced(schedule, "_forward_hooks", "_forward_pre_hooks")


@planted
def drops_backward_hooks(schedule: Schedule) -> None:
    kinds = ("hooks", "hooks_with_kwargs", "pre_hooks", "pre_hooks_with_kwargs")
    _replaced(schedule, *(f"_forward_{kind}" for kind in kinds))


def _replaced(schedule: Schedule, *tables: str) -> None:
    old = schedule.mod
    new = nn.utils.skip_init(Another, 4, 4)
    new._parameters, new.training = old._parameters, old.training
    for table in tables:
        getattr(new, table).update(getattr(old, table))
    schedule.replace_module(new)


@planted
def reads_values(schedule: Schedule) -> None:
    if float(schedule.mod.weight.detach().abs().max()) > 1e9:
        schedule.mod.large = True


@planted
def works_once(schedule: Schedule) -> None:
    if hasattr(schedule.mod, "worked"):
        raise KeyError("worked")
    schedule.mod.worked = True


class Anywhere(Primitive):
    """Takes every module for a Linear."""

    name = "anywhere"

    @staticmethod
    def apply(schedule: Schedule) -> None:
        old = schedule.mod.weight
        schedule.set_parameter("weight", successor(old, old.detach().clone()))


class Renames(Primitive):
    """Train a scaled weight under another name."""

    name = "renames"
    check = staticmethod(_is_linear)

    @staticmethod
    def apply(schedule: Schedule) -> None:
        weight = schedule.mod.weight
        del schedule.mod.weight
        schedule.mod.__class__ = Scaled
        schedule.mod.scaled = nn.Parameter(weight.detach() * 2)


class Scaled(nn.Linear):
    """Has its weight under another name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.scaled / 2, self.bias)


@hookimpl
def slapo_primitives() -> dict[str, Any]:
    return {**PLANTED, "anywhere": f"{HERE}:Anywhere", "renames": f"{HERE}:Renames"}


def example(**options: Any) -> Example:
    return Example(Model, (X,), "2", **{"plugins": (HERE,), **options})


def told(name: str, check: str, **options: Any) -> str:
    """Return the error message of a check, or ''."""
    (found,) = [each for each in primitive_checks(name, [example(**options)]) if each.name == check]
    try:
        found()
    except ConformanceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "options", "check", "sentence"),
    [
        ("uses_up_later", {"args": ([1, 2, 3],)}, "journal", "a run of the model changes the journal from"),
        (
            "uses_up_in_a_dict",
            {"args": ({"rows": [1]},)},
            "journal",
            "the step changes its argument {'rows': [1]} to {'rows': []}",
        ),
        (
            "changes_a_tensor",
            {"args": lambda sch: (torch.ones(1),)},
            "journal",
            "changes its argument tensor([1.]) to tensor([0.])",
        ),
        ("averages", {}, "deepcopy", "a deep copy shares average of a wrapper of '2' with the model"),
        ("shares_a_buffer", {}, "deepcopy", "a deep copy shares '2.seen' with the model"),
        ("drops_flags", {}, "hooks", "the forward pre-hook with keyword arguments of the module fires 0 times"),
        (
            "drops_backward_hooks",
            {},
            "hooks",
            "the backward pre-hook of the module fires 0 times in a step of training, 1 before",
        ),
        ("reads_values", {}, "refusals", "the step on a model on the meta device raises RuntimeError, not a ScheduleError"),
        ("works_once", {}, "refusals", "the same call once more raises KeyError, not a ScheduleError"),
        ("anywhere", {}, "refusals", "the same call on the whole model raises AttributeError, not a ScheduleError"),
        ("renames", {"changes": ["names"]}, "numerics", 'for a step that changes names, numerics="outputs" is meant'),
    ],
)
def test_a_fault_is_caught_by_its_check(name: str, options: dict[str, Any], check: str, sentence: str) -> None:
    assert sentence in told(name, check, **options)


def test_an_author_s_arguments_are_not_used_up() -> None:
    given = {"rows": [1]}
    told("uses_up_in_a_dict", "undo", args=(given,))
    assert given == {"rows": [1]}
