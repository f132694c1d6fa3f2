"""The one apply path: events, contracts, and a model that is as it was after any failure."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import (
    Primitive,
    Schedule,
    ScheduleError,
    SlapoError,
    Step,
    UnknownNameError,
    create_schedule,
    hookimpl,
    parameter_facts,
    savepoint,
    successor,
)
from slapo_testing import isolated_plugins
from slapo_tracing.nodes import wrap_forward


class Mark(Primitive):
    """Change everything there is to change about a Linear, then maybe fail."""

    name = "mark"

    @staticmethod
    def apply(schedule: Schedule, fail: bool = False) -> None:
        mod = schedule.mod
        weight = mod.weight
        weight.colour = "red"
        parameter_facts(weight).tags.add("marked")
        weight.requires_grad_(False)
        mod.register_forward_hook(double)
        mod.register_buffer("extra", torch.ones(1))
        mod.out_features = 99
        schedule.metadata.primitives["mark"] = "done"
        schedule.set_parameter("weight", successor(weight, weight.detach()[:1].clone()))
        wrap_forward(mod, plus_one)
        mod.__class__ = nn.Identity
        if fail:
            raise RuntimeError("half-way")


class After(Primitive):
    """Needs mark."""

    name = "after"
    requires = ("mark",)

    @staticmethod
    def apply(schedule: Schedule) -> str:
        return "a value"


class Never(Primitive):
    """Conflicts with mark."""

    name = "never"
    conflicts = ("mark",)

    @staticmethod
    def apply(schedule: Schedule) -> None: ...


class Twice(Primitive):
    """Takes two steps."""

    name = "twice"

    @staticmethod
    def apply(schedule: Schedule, fail: bool = False) -> None:
        schedule["0"].mark()
        schedule["1"].mark(fail=fail)


class InPlace(Primitive):
    """Breaks the rule that values are never written."""

    name = "in_place"

    @staticmethod
    def apply(schedule: Schedule) -> None:
        with torch.no_grad():
            schedule.mod.weight.zero_()
        raise RuntimeError("too late")


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def plus_one(call: Any, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs) + 1


class Plugin:
    def __init__(self) -> None:
        self.events: list[str] = []

    @hookimpl
    def slapo_primitives(self) -> dict[str, type[Primitive]]:
        return {cls.name: cls for cls in (Mark, After, Never, Twice, InPlace)}

    @hookimpl
    def slapo_before_apply(self, schedule: Schedule, name: str) -> None:
        self.events.append(f"before {name} {schedule.path}")
        if schedule.path == "2":
            raise ScheduleError("refused by a plugin", path=schedule.path, primitive=name)

    @hookimpl
    def slapo_after_apply(self, step: Step) -> None:
        self.events.append(f"after {step}")


@pytest.fixture
def plugin() -> Any:
    plugin = Plugin()
    with isolated_plugins(plugin):
        yield plugin


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def state(module: nn.Module) -> Any:
    """Everything about a module that can be compared."""
    return [
        (
            path,
            type(sub),
            {key: value for key, value in sub.__dict__.items() if key not in ("_parameters", "_buffers", "_modules")},
            {
                name: (id(p), p.requires_grad, dict(p.__dict__), set(parameter_facts(p).tags))
                for name, p in sub._parameters.items()
                if p is not None
            },
            dict(sub._buffers),
            {name: id(child) for name, child in sub._modules.items()},
        )
        for path, sub in module.named_modules()
    ]


def snapshot(module: nn.Module) -> Any:
    return [
        (p, t, {k: v.copy() if isinstance(v, dict) else v for k, v in d.items()}, *rest) for p, t, d, *rest in state(module)
    ]


@pytest.mark.usefixtures("plugin")
def test_a_step_that_fails_half_way_changes_nothing() -> None:
    top = model()
    sch = create_schedule(top)
    x = torch.randn(2, 4)
    before, output = snapshot(top), top(x)
    with pytest.raises(RuntimeError, match="half-way"):
        sch["1"].mark(fail=True)
    assert snapshot(top) == before
    assert torch.equal(top(x), output)
    assert len(sch.journal) == 0
    assert sch["1"].metadata.primitives == {}


@pytest.mark.usefixtures("plugin")
def test_undo_takes_everything_back() -> None:
    top = model()
    sch = create_schedule(top)
    before = snapshot(top)
    sch["1"].mark()
    assert snapshot(top) != before
    assert sch.undo().name == "mark"
    assert snapshot(top) == before
    with pytest.raises(ScheduleError, match="nothing to undo"):
        sch.undo()


@pytest.mark.usefixtures("plugin")
def test_steps_inside_a_step_are_one_step() -> None:
    top = model()
    sch = create_schedule(top)
    before = snapshot(top)
    sch.twice()
    (step,) = sch.journal
    assert [(child.path, child.name) for child in step.children] == [("0", "mark"), ("1", "mark")]
    assert str(sch.journal).splitlines() == ["sch.twice()", "#   sch['0'].mark()", "#   sch['1'].mark(fail=False)"]
    assert Step("2", "outer", children=(step,)).lines()[2:] == ["#      sch['0'].mark()", "#      sch['1'].mark(fail=False)"]
    assert len(sch.journal) == len(list(sch.journal)) == 1
    sch.undo()
    assert snapshot(top) == before
    with pytest.raises(RuntimeError, match="half-way"):
        sch.twice(fail=True)
    assert snapshot(top) == before


@pytest.mark.usefixtures("plugin")
def test_calls_chain_or_give_the_primitives_value() -> None:
    sch = create_schedule(model())
    assert sch["0"].mark() == sch["0"]
    assert sch["0"].after() == "a value"
    assert sch["1"].apply("mark").apply("after") == "a value"


def test_plugins_see_and_may_refuse_each_step(plugin: Plugin) -> None:
    sch = create_schedule(model())
    sch["0"].mark()
    with pytest.raises(ScheduleError, match="refused by a plugin"):
        sch["2"].mark()
    assert plugin.events == ["before mark 0", "after sch['0'].mark()", "before mark 2"]


@pytest.mark.usefixtures("plugin")
def test_contracts_are_checked_before_anything_changes() -> None:
    sch = create_schedule(model())
    with pytest.raises(ScheduleError, match=r"after\('0'\): needs 'mark' on this module first"):
        sch["0"].after()
    sch["0"].mark()
    with pytest.raises(ScheduleError, match=r"never\('0'\): cannot follow 'mark' on this module"):
        sch["0"].never()
    with pytest.raises(ScheduleError, match=r"never\(''\): cannot follow 'mark' on '0'"):
        sch.never()
    sch["1"].never()


@pytest.mark.usefixtures("plugin")
def test_wrong_arguments_say_what_is_taken() -> None:
    with pytest.raises(ScheduleError, match=r"mark\('0'\): got an unexpected keyword argument 'loud'; it takes \(fail: .*\)"):
        create_schedule(model())["0"].mark(loud=True)


@pytest.mark.usefixtures("plugin")
def test_an_unknown_primitive_is_named_with_its_neighbour() -> None:
    sch = create_schedule(model())
    for call in (lambda: sch.makr(), lambda: sch.apply("makr")):
        with pytest.raises(UnknownNameError, match=r"no primitive 'makr'; did you mean 'mark'\?"):
            call()


@pytest.mark.usefixtures("plugin")
def test_values_written_in_place_cannot_be_undone_and_that_is_said() -> None:
    with pytest.raises(Exception, match="wrote into a parameter in place, which cannot be undone"):
        create_schedule(model())["0"].in_place()


class Quiet(Primitive):
    """Writes in place and says nothing."""

    name = "quiet"

    @staticmethod
    def apply(schedule: Schedule) -> None:
        with torch.no_grad():
            schedule.mod.weight.add_(1)


class QuietPlugin:
    @hookimpl
    def slapo_primitives(self) -> dict[str, type[Primitive]]:
        return {"quiet": Quiet}


def test_a_step_that_writes_in_place_is_refused_at_once() -> None:
    with isolated_plugins(QuietPlugin()):
        sch = create_schedule(model())
        with pytest.raises(SlapoError, match="wrote into a parameter in place, which cannot be undone"):
            sch["0"].quiet()
        assert len(sch.journal) == 0


def test_only_a_step_may_change_the_model() -> None:
    sch = create_schedule(model())
    with pytest.raises(AssertionError, match="only a primitive's apply"):
        sch["0"].set_parameter("weight", nn.Parameter(torch.ones(4, 4)))


class Rewire(Primitive):
    """Edit a traced module's graph by hand, then maybe fail."""

    name = "rewire"

    @staticmethod
    def apply(schedule: Schedule, fail: bool = False) -> None:
        for node in schedule.mod.graph.find_nodes(op="call_module", target="0"):
            node.replace_all_uses_with(node.args[0])
            schedule.mod.graph.erase_node(node)
        schedule.mod.recompile()
        if fail:
            raise RuntimeError("half-way")


class Around(Primitive):
    """Takes a step inside that edits a graph, and fails then."""

    name = "around"
    scope = "module"

    @staticmethod
    def apply(schedule: Schedule) -> None:
        schedule.rewire()
        raise RuntimeError("half-way")


def test_a_graph_edited_by_hand_is_put_back() -> None:
    x = torch.randn(2, 4)
    plugin = type("P", (), {"slapo_primitives": hookimpl(lambda self: {"rewire": Rewire, "around": Around})})()
    with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, plugin):
        sch = create_schedule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), example_inputs=(x,)).trace()
        (handle,) = sch.find("0")
        expected, before = sch.mod(x), str(sch.mod.graph)
        for failing in (lambda: sch.rewire(fail=True), sch.around):
            with pytest.raises(RuntimeError, match="half-way"):
                failing()
            assert str(sch.mod.graph) == before
            torch.testing.assert_close(sch.mod(x), expected)
        sch.rewire()
        assert not torch.equal(sch.mod(x), expected)
        sch.undo()
        torch.testing.assert_close(sch.mod(x), expected)
        sch.replace(nn.Identity(), [handle])
        torch.testing.assert_close(sch.mod(x), x.relu())


class Meddling(Primitive):
    """Changes the module where it should only look."""

    name = "meddling"

    @staticmethod
    def check(schedule: Schedule, refuse: bool) -> None:
        schedule.mod.out_features = 99
        schedule.mod.weight.requires_grad_(False)
        schedule.set_parameter("bias", successor(schedule.mod.bias, torch.zeros(3)))
        if refuse:
            raise ScheduleError("refused", path=schedule.path, primitive="meddling")

    @staticmethod
    def apply(schedule: Schedule, refuse: bool) -> None:
        """Nothing more."""


class Planned(Primitive):
    """Works out in its check what it applies, around another step of the kind."""

    name = "planned"

    @staticmethod
    def check(schedule: Schedule, depth: int) -> list[int]:
        return [depth]

    @staticmethod
    def apply(schedule: Schedule, depth: int, *, checked: list[int]) -> list[int]:
        inner = schedule.planned(depth - 1) if depth else []
        return [*checked, *inner]


class Flagged(Primitive):
    """Has an argument of its own called ``checked``."""

    name = "flagged"

    @staticmethod
    def check(schedule: Schedule, *, checked: bool = False) -> str:
        return "of the check"

    @staticmethod
    def apply(schedule: Schedule, *, checked: bool = False) -> bool:
        return checked


class Open(Primitive):
    """Takes the result of its check and any keyword."""

    name = "open"

    @staticmethod
    def apply(schedule: Schedule, *, checked: None, **kwargs: Any) -> list[Any]:
        return [checked, kwargs]


def test_what_a_check_returns_is_its_own_steps() -> None:
    class Plugin:
        @hookimpl
        def slapo_primitives(self) -> dict[str, type[Primitive]]:
            return {"planned": Planned, "flagged": Flagged, "open": Open}

    with isolated_plugins(Plugin()) as registry:
        schedule = create_schedule(nn.Linear(2, 2), plugins=registry)
        assert schedule.planned(2) == [2, 1, 0]
        assert str(inspect.signature(schedule.planned)) == "(depth: 'int') -> 'list[int]'"
        assert schedule.flagged(checked=True) is True
        assert schedule.open(more=1) == [None, {"more": 1}]
        for name in ("planned", "open"):
            with pytest.raises(ScheduleError, match="'checked'"):
                schedule.apply(name, *[0][: name == "planned"], checked=1)


def test_what_a_check_changes_is_taken_back() -> None:
    class Plugin:
        @hookimpl
        def slapo_primitives(self) -> dict[str, type]:
            return {"meddling": Meddling}

    with isolated_plugins(Plugin()):
        model = nn.Linear(2, 3)
        bias, sch = model.bias, create_schedule(model)
        with pytest.raises(ScheduleError, match="refused"):
            sch.meddling(refuse=True)
        assert (model.out_features, model.weight.requires_grad, model.bias is bias) == (3, True, True)
        sch.meddling(refuse=False)
        assert (model.out_features, model.weight.requires_grad, model.bias is bias) == (99, False, False)
        sch.undo()
        assert (model.out_features, model.weight.requires_grad, model.bias is bias) == (3, True, True)


class TwoWays(Primitive):
    """Mark the second child, after an attempt to mark both that fails half-way."""

    name = "two_ways"

    @staticmethod
    def apply(schedule: Schedule, *, again: bool = True) -> None:
        try:
            with savepoint(schedule):
                schedule["0"].mark()
                schedule["1"].mark(fail=True)
        except RuntimeError:
            again = again or schedule["0"].mod.out_features != 2
        if again:
            with savepoint(schedule):
                schedule["1"].mark()


class TwoWaysPlugin:
    @staticmethod
    @hookimpl
    def slapo_primitives() -> dict[str, Any]:
        return {"mark": Mark, "two_ways": TwoWays}


@pytest.mark.parametrize("again", [True, False])
def test_a_step_goes_on_after_an_attempt_that_failed(again: bool) -> None:
    with isolated_plugins(TwoWaysPlugin()):
        first, second = model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        kept = [first.weight, second.weight]
        sch = create_schedule(model)
        sch.two_ways(again=again)
        assert [step.path for step in sch.journal.steps[0].children] == ["1"] * again
        assert type(first) is nn.Linear
        assert first.weight is kept[0]
        assert not first._forward_hooks
        assert (type(second) is nn.Identity) == again
        sch.undo()
        assert type(second) is nn.Linear
        assert second.weight is kept[1]
