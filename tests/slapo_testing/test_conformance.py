"""The conformance kit: what is right passes, and each planted fault is caught by the check that is there for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from slapo_core import Primitive, Schedule, ScheduleError, hookimpl, successor
from slapo_testing.conformance import ConformanceError, Example, Refused, check_primitive, primitive_checks
from slapo_tracing.nodes import forward_wrappers, wrap_forward

HERE = __name__


class Model(nn.Module):
    """A residual block with a dropout, and an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x + self.block(x))


IDS = torch.tensor([0, 3, 5, 1])


# ---- a plugin


class Renew(Primitive):
    """Give a parameter memory of its own.

    Args:
        name: Of the parameter, e.g. ``"weight"``.

    Raises:
        ScheduleError: no such parameter.
    """

    name = "renew"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, name: str) -> None:
        if name not in schedule.mod._parameters:
            raise ScheduleError(f"no parameter {name!r}; it has others", path=schedule.path, primitive="renew")

    @staticmethod
    def apply(schedule: Schedule, name: str) -> None:
        old: Any = schedule.mod._parameters[name]
        schedule.set_parameter(name, successor(old, old.detach().clone()))


RENEW = Example(Model, (IDS,), "block.0", ("weight",), refused=[Refused("no parameter 'w'", ("w",))], plugins=(HERE,))
AT_LINEAR = Example(Model, (IDS,), "block.0", plugins=(HERE,))
PLANTED: dict[str, Any] = {}


def planted(*, scope: str = "subtree", at: type[nn.Module] = nn.Linear) -> Callable[[Any], Any]:
    """Make a primitive of a function of a schedule, which is for modules of one class."""

    def made(function: Any) -> Any:
        name = function.__name__
        body = {"name": name, "scope": scope, "__doc__": "Is broken.", "apply": staticmethod(function)}
        body["check"] = staticmethod(partial(_is_for, at, name))
        PLANTED[name] = f"{HERE}:{name}"
        return type(name, (Primitive,), {**body, "__module__": HERE})

    return made


def _is_for(at: type[nn.Module], name: str, schedule: Schedule) -> None:
    if at not in (type(schedule.mod), nn.Module):
        found = type(schedule.mod).__name__
        raise ScheduleError(f"a {found}; name a {at.__name__}", path=schedule.path, primitive=name)


@planted()
def forgets_the_facts(schedule: Schedule) -> None:
    schedule.mod.weight = nn.Parameter(schedule.mod.weight.detach().clone())


@planted()
def freezes(schedule: Schedule) -> None:
    old = schedule.mod.weight
    schedule.set_parameter("weight", successor(old, old.detach()))
    schedule.mod.weight.requires_grad_(False)


@planted()
def unties(schedule: Schedule) -> None:
    old = schedule.mod.weight
    schedule.mod.weight = successor(old, old.detach().clone())


@planted()
def unties_and_doubles(schedule: Schedule) -> None:
    old = schedule.mod.weight
    schedule.mod.weight = successor(old, old.detach() * 2)


@planted(at=nn.Module)
def hides_an_error(schedule: Schedule) -> None:
    try:
        wrap_forward(schedule.mod, _as_it_was)
    except Exception:
        return


def _as_it_was(call: Any, *args: Any) -> Any:
    return call(*args)


@planted()
def doubles(schedule: Schedule) -> None:
    old = schedule.mod.weight
    schedule.set_parameter("weight", successor(old, old.detach() * 2))


@planted()
def keeps_a_buffer(schedule: Schedule) -> None:
    schedule.mod.register_buffer("calls", torch.zeros(1))


@planted(at=nn.Dropout)
def trains_the_new(schedule: Schedule) -> None:
    schedule.replace_module(nn.Dropout(schedule.mod.p))


@planted(scope="module", at=nn.Sequential)
def touches_nothing(schedule: Schedule) -> None:
    schedule.mod.get_submodule("0").seen = True


@planted(scope="module", at=nn.Sequential)
def tells_late(schedule: Schedule) -> None:
    child = schedule.mod.get_submodule("0")
    child.seen = True
    forward_wrappers(child)  # anything that may fail
    schedule.on_undo(partial(delattr, child, "seen"))


@planted()
def drops_hooks(schedule: Schedule) -> None:
    old = schedule.mod
    new = nn.Linear(4, 4)
    new._parameters = old._parameters
    new.training = old.training
    schedule.replace_module(new)


@planted()
def closes_over_the_module(schedule: Schedule) -> None:
    module = schedule.mod
    module.forward = lambda x: nn.functional.linear(x, module.weight, module.bias)


@planted(at=nn.Module)
def is_otherwise_traced(schedule: Schedule) -> None:
    schedule.mod.__class__ = _OtherwiseTraced


class _OtherwiseTraced(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if type(x) is torch.Tensor else 2)


@planted(at=nn.Module)
def expects_a_sequential(schedule: Schedule) -> None:
    if isinstance(schedule.mod, fx.GraphModule):
        raise TypeError("a Sequential is wanted")


@planted(at=nn.Module)
def expects_no_wrapper(schedule: Schedule) -> None:
    if forward_wrappers(schedule.mod):
        raise TypeError("a plain module is wanted")


class _Counted:
    """A wrapper that counts its calls, where no recompute puts the number back."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Any, *args: Any) -> Any:
        self.calls += 1
        return call(*args) * torch.full((1,), self.calls)  # which the backward reads


@planted()
def counts_its_calls(schedule: Schedule) -> None:
    wrap_forward(schedule.mod, _Counted())


def _a_little_more(call: Any, *args: Any) -> Any:
    return call(*args) * 1.01


@planted()
def computes_a_little_more(schedule: Schedule) -> None:
    wrap_forward(schedule.mod, _a_little_more)


def _more_by_rank(call: Any, *args: Any) -> Any:
    return call(*args) + (dist.get_rank() if dist.is_initialized() else 0)


@planted()
def computes_more_on_rank_1(schedule: Schedule) -> None:
    wrap_forward(schedule.mod, _more_by_rank)


@planted(at=nn.Dropout)
def drops_more(schedule: Schedule) -> None:
    schedule.mod.p = 0.2


class Consumes(Primitive):
    """Use up its list, which is an argument and stands in the journal.

    Args:
        names: Of parameters.
    """

    name = "consumes"

    @staticmethod
    def apply(schedule: Schedule, names: list[str]) -> None:
        while names:
            schedule.mod.register_buffer(f"copy_of_{names.pop()}", torch.zeros(1), persistent=False)


_TURNS = [0]


@planted()
def goes_by_turns(schedule: Schedule) -> None:
    _TURNS[0] += 1
    schedule.mod.register_buffer("odd" if _TURNS[0] % 2 else "even", torch.zeros(1), persistent=False)


class Careless(Primitive):
    """Refuse nothing well.

    Args:
        how: In which way.
    """

    name = "careless"

    @staticmethod
    def check(schedule: Schedule, how: str) -> None:
        if how == "another error":
            raise KeyError(how)
        if how == "two lines":
            raise ScheduleError("this is\nwrong", primitive="careless")
        if how == "no name":
            raise ScheduleError("this is wrong")
        if how == "another sentence":
            raise ScheduleError("no", primitive="careless")
        if how == "in place":
            with torch.no_grad():
                schedule.mod.weight.add_(1)
            raise ScheduleError("this is wrong", primitive="careless")

    @staticmethod
    def apply(schedule: Schedule, how: str) -> None:
        pass


class Undocumented(Primitive):
    """Says too little and too much.

    Args:
        nmae: Of the parameter.
    """

    name = "undocumented"

    @staticmethod
    def apply(schedule: Schedule, name: str) -> None:
        pass


class Misnamed(Primitive):
    """Has another name."""

    name = "mis_named"

    @staticmethod
    def apply(schedule: Schedule) -> None:
        pass


class Eager(Primitive):
    """Is imported with its plugin."""

    name = "eager"

    @staticmethod
    def apply(schedule: Schedule) -> None:
        pass


@hookimpl
def slapo_primitives() -> dict[str, Any]:
    named = {
        "renew": "Renew",
        "consumes": "Consumes",
        "careless": "Careless",
        "undocumented": "Undocumented",
        "misnamed": "Misnamed",
    }
    return {**PLANTED, **{name: f"{HERE}:{cls}" for name, cls in named.items()}, "eager": Eager}


def failing(name: str, example: Example, only: Collection[str] = ()) -> dict[str, str]:
    """Check to message, of those that fail."""
    found = {}
    for check in primitive_checks(name, [example]):
        try:
            if not only or check.name in only:
                check()
        except ConformanceError as error:
            found[check.name] = str(error)
    return found


def test_a_right_primitive_of_somebody_else_conforms() -> None:
    check_primitive("renew", [RENEW])


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_right_primitive_conforms_on_two_ranks() -> None:
    check_primitive("renew", [replace(RENEW, ranks=2)])


DROPOUT = replace(AT_LINEAR, path="block.2", numerics="distribution", because="the masks are other ones")
FROZEN = replace(RENEW, changes=["requires_grad"])


FAULTS = [
    (
        "forgets_the_facts",
        AT_LINEAR,
        {"contracts", "hooks"},
        "no parameter has the original name 'block.0.weight' any more",
    ),
    ("freezes", AT_LINEAR, {"contracts", "hooks", "numerics"}, "requires_grad of 'block.0.weight' is False"),
    (
        "unties",
        replace(AT_LINEAR, path="head"),
        {"contracts", "hooks", "numerics"},
        "embed.weight and head.weight are no longer one parameter",
    ),
    (
        "unties_and_doubles",
        replace(AT_LINEAR, path="head", changes=["ties"]),
        {"contracts", "hooks", "numerics"},
        "the full parameter 'embed.weight' is",
    ),
    ("hides_an_error", AT_LINEAR, {"transactional"}, "failed, and does another thing: module 'block.0' is"),
    ("doubles", AT_LINEAR, {"contracts", "numerics"}, "the full parameter 'block.0.weight' is"),
    ("keeps_a_buffer", AT_LINEAR, {"contracts"}, "the key 'block.0.calls' of the state_dict is new"),
    (
        "trains_the_new",
        replace(AT_LINEAR, path="block.2"),
        {"contracts", "hooks", "numerics"},
        "'block.2' is in training mode",
    ),
    ("renew", FROZEN, {"contracts"}, "says that the step changes requires_grad, which it does not"),
    ("touches_nothing", replace(AT_LINEAR, path="block"), {"undo", "transactional"}, "seen of module 'block.0' is new"),
    ("tells_late", replace(AT_LINEAR, path="block"), {"transactional"}, "after forward_wrappers() called at"),
    (
        "drops_hooks",
        AT_LINEAR,
        {"hooks", "process"},  # a new layer draws its weights
        "the forward pre-hook of the module fires 0 times in a step of training, 1 before",
    ),
    ("closes_over_the_module", AT_LINEAR, {"deepcopy"}, "a deep copy of the model, in"),
    ("is_otherwise_traced", replace(AT_LINEAR, path="block"), {"trace after"}, "with trace() after the step"),
    ("expects_a_sequential", replace(AT_LINEAR, path="block"), {"trace before"}, "raises TypeError, not a ScheduleError"),
    ("expects_no_wrapper", AT_LINEAR, {"checkpoint before"}, "raises TypeError, not a ScheduleError"),
    ("counts_its_calls", AT_LINEAR, {"checkpoint after", "numerics"}, "with checkpoint() after the step"),
    ("computes_a_little_more", AT_LINEAR, {"numerics"}, "beside the unmodified model, in evaluation: output: "),
    ("drops_more", DROPOUT, {"means"}, "standard errors off"),
]
"""Primitive, example, the checks that fail, and what one of them says."""


@pytest.mark.parametrize(
    ("name", "example", "checks", "sentence"), FAULTS, ids=[f"{name}-{min(of)}" for name, _, of, _ in FAULTS]
)
def test_a_fault_is_caught_by_its_check(name: str, example: Example, checks: set[str], sentence: str) -> None:
    found = failing(name, example, checks)
    assert {*found} == checks
    assert any(sentence in message for message in found.values()), found
    assert all(message.startswith(f"{name}, {check}, {example}: ") for check, message in found.items())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "example", "checks"), [fault[:3] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_and_by_no_other(name: str, example: Example, checks: set[str]) -> None:
    found = {*failing(name, example)}
    if "numerics" in found:
        found -= {"autocast", "bfloat16"}  # what is wrong in float32 is wrong there, too
    assert found == checks


CONSUMES = replace(RENEW, path="block", args=lambda sch: (["a"],), refused=[Refused("too many", ([], 1))])


@pytest.mark.parametrize(
    ("name", "example", "check", "sentence"),
    [
        (
            "consumes",
            CONSUMES,
            "journal",
            "the step changes its argument ['a'] to [], which changes the journal's entry as well",
        ),
        ("goes_by_turns", AT_LINEAR, "journal", "the model made from .json differs: buffer 'block.0.odd' is"),
        ("undocumented", RENEW, "documented", "does not say under Args what 'name' is"),
        ("misnamed", AT_LINEAR, "registered", "Misnamed says its name is 'mis_named'"),
        ("missing", AT_LINEAR, "registered", "no primitive 'missing'"),
        ("eager", AT_LINEAR, "lazy", "registers the class Eager; give its import path, 'module:Class'"),
        ("renew", replace(RENEW, refused=()), "examples", "no example has refused="),
        ("careless", replace(AT_LINEAR, args=(lambda: 0,)), "journal", "save() refuses the step"),
        ("renew", replace(RENEW, writable=False, because="of this test"), "journal", "cannot be written down, but save() does"),
    ],
)
def test_a_fault_of_the_registration_or_the_example_is_caught(name: str, example: Example, check: str, sentence: str) -> None:
    (found,) = [each for each in primitive_checks(name, [example]) if each.name == check]
    with pytest.raises(ConformanceError, match=re.escape(sentence)):
        found()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("nothing", "careless('nothing') is accepted; it should be refused with 'wrong'"),
        ("another error", "careless('another error') raises KeyError, not a ScheduleError: 'another error'"),
        ("two lines", "careless('two lines') is refused by 2 lines, not by one sentence"),
        ("no name", "which does not read 'careless(<path>): <what is wrong>; <what would work>'"),
        ("another sentence", "is refused by \"careless(''): no\", without 'wrong'"),
        ("in place", "careless('in place') is refused by"),
    ],
)
def test_a_bad_refusal_is_caught(how: str, sentence: str) -> None:
    example = replace(AT_LINEAR, args=("right",), refused=[Refused("wrong", (how,))])
    found = failing("careless", example, ["refusals"])
    assert sentence in found["refusals"]


def test_without_examples_there_is_nothing_to_conform_to() -> None:
    (check,) = [each for each in primitive_checks("freeze", []) if each.name == "examples"]
    with pytest.raises(ConformanceError, match="freeze, examples: there is no example"):
        check()


@pytest.mark.multiproc
def test_a_fault_of_one_rank_is_caught() -> None:
    (check,) = [
        it for it in primitive_checks("computes_more_on_rank_1", [replace(AT_LINEAR, ranks=2)]) if it.name == "numerics"
    ]
    sentence = "computes_more_on_rank_1, numerics, 'block.0' of Model on 2 ranks: rank 1 of 2: beside the unmodified model"
    with pytest.raises(ConformanceError, match=re.escape(sentence)):
        check()


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_primitive("doubles", [AT_LINEAR])
    assert [line.split(", ")[1] for line in str(caught.value).splitlines()] == [
        "numerics",
        "autocast",
        "bfloat16",
        "contracts",
    ]
