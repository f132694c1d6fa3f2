"""Odd models, odd orders: nothing is changed by what fails, and undo gives back exactly what was there."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slapo_core import (
    PluginError,
    Primitive,
    Registry,
    Schedule,
    ScheduleError,
    Step,
    UnknownNameError,
    create_schedule,
    hookimpl,
    parameter_facts,
    successor,
)
from slapo_testing import isolated_plugins
from slapo_tracing.nodes import forward_wrappers, wrap_forward

Picture = dict[str, Any]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


class Odd(nn.Module):
    """A list, a dict, a module at two places, a tied weight, an empty place, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])
        self.named = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ReLU()})
        self.again = self.parts[0]
        self.named["a"].weight = self.parts[1].fc.weight
        self.nothing = None
        self.register_module("empty", None)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return self.named["b"](self.named["a"](self.again(x))) * self.scale + self.shift


def picture(root: nn.Module) -> Picture:
    """Everything about a model but its numbers, by identity."""
    seen: Picture = {}
    for path, module in root.named_modules(remove_duplicate=False):
        seen[path] = (id(module), type(module), {name: _shown(value) for name, value in module.__dict__.items()})
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                known = parameter_facts(tensor)
                attributes = {key: value for key, value in tensor.__dict__.items() if value is not known}
                marks = (known.names, known.spec, frozenset(known.tags))
                shown = (id(tensor), tuple(tensor.shape), tensor.requires_grad, id(tensor.grad), attributes, marks)
                seen[f"{path}:{name}"] = (*shown, tensor.data_ptr())
    return seen


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: id(item) for key, item in value.items()}
    if isinstance(value, (list, set)):
        return [id(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else id(value)


def set_parameter(sch: Schedule) -> None:
    name, old = next(iter(sch.mod._parameters.items()), (None, None))
    if name and old is not None:
        sch.set_parameter(name, successor(old, torch.zeros(3, 3), tags={"new"}))


def change_facts(sch: Schedule) -> None:
    for tensor in sch.mod.parameters(recurse=False):
        parameter_facts(tensor).tags.add("mark")
        parameter_facts(tensor).names = ("another",)
        tensor.colour = "red"
        tensor.requires_grad_(False)


def change_outside(sch: Schedule) -> None:
    other = sch.get_top_schedule()["named.a"].mod if "named.a" in sch.get_top_schedule() else sch.root_module
    sch.touch(other)
    other.in_features = 77
    other.register_forward_pre_hook(lambda module, args: None)


def drop_children(sch: Schedule) -> None:
    sch.mod._modules.clear()
    sch.mod._buffers.clear()


def change_hooks(sch: Schedule) -> None:
    sch.mod.register_forward_hook(lambda module, args, out: out)
    sch.mod.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    sch.mod.register_state_dict_post_hook(lambda *args: None)


def change_itself(sch: Schedule) -> None:
    sch.mod.__class__ = nn.Identity
    sch.mod.__dict__.pop("forward", None)
    sch.mod.mode = "odd"


MUTATIONS: dict[str, Callable[[Schedule], Any]] = {
    "replace": lambda sch: sch.replace_module(nn.Sequential(nn.Linear(2, 2))),
    "wrap": lambda sch: sch.replace_module(nn.Sequential(sch.mod)),
    "set_parameter": set_parameter,
    "facts": change_facts,
    "outside": change_outside,
    "drop_children": drop_children,
    "hooks": change_hooks,
    "itself": change_itself,
    "train": lambda sch: sch.mod.train(not sch.mod.training),
    "wrap_forward": lambda sch: wrap_forward(sch.mod, lambda call, *args: call(*args)),
    "add": lambda sch: sch.mod.add_module("extra", nn.Linear(2, 2)),
    "no_grad": lambda sch: sch.mod.requires_grad_(False),
    "inner": lambda sch: sch.edit([("facts", ""), ("hooks", "")]),
    "metadata": lambda sch: setattr(sch.metadata, "param_tags", sch.metadata.param_tags | {"mark"}),
}

PATHS = [
    "extra",
    "parts.0.extra",
    "0",
    "",
    "parts",
    "parts.0",
    "parts.0.fc",
    "parts.1.fc",
    "parts.1.norm",
    "named",
    "named.a",
    "named.b",
    "again",
]


class EditPrimitive(Primitive):
    """Make the listed changes, then maybe fail."""

    name = "edit"

    @staticmethod
    def apply(schedule: Schedule, changes: list[tuple[str, str]], fail: type[BaseException] | None = None) -> None:
        for kind, path in changes:
            if path in schedule:
                MUTATIONS[kind](schedule[path] if path else schedule)
        if fail:
            raise fail("half-way")


class Plugin:
    """May refuse a step when all of it is done."""

    refuse = False

    @hookimpl
    def slapo_primitives(self) -> dict[str, type[Primitive]]:
        return {"edit": EditPrimitive}

    @hookimpl
    def slapo_after_apply(self, schedule: Schedule, step: Step) -> None:
        if self.refuse:
            raise RuntimeError("an observer fails")


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with isolated_plugins(Plugin()) as registry:
        yield registry


changes = st.lists(st.tuples(st.sampled_from(sorted(MUTATIONS)), st.sampled_from(PATHS)), min_size=1, max_size=5)


@given(made=changes, at=st.sampled_from(["", "parts", "parts.0"]), fail=st.sampled_from([RuntimeError, KeyboardInterrupt]))
def test_whatever_fails_leaves_the_model_as_it_was(
    registry: Registry, made: list[tuple[str, str]], at: str, fail: type[BaseException]
) -> None:
    model = Odd()
    sch = create_schedule(model, plugins=registry)
    handle = sch[at] if at else sch
    inside = [(kind, path[len(at) :].lstrip(".")) for kind, path in made if path.startswith(at)]
    before, tags = picture(model), set(handle.metadata.param_tags)
    with pytest.raises(fail, match="half-way"):
        handle.edit(inside, fail=fail)
    assert sch.root_module is model
    assert picture(model) == before
    assert (len(sch.journal), handle.metadata.primitives, handle.metadata.param_tags) == (0, {}, tags)


@given(steps=st.lists(st.tuples(st.sampled_from(sorted(MUTATIONS)), st.sampled_from(PATHS)), min_size=1, max_size=6))
def test_undo_goes_back_through_every_state(registry: Registry, steps: list[tuple[str, str]]) -> None:
    sch = create_schedule(Odd(), plugins=registry)
    states = [(sch.root_module, picture(sch.root_module))]
    for kind, path in steps:
        if path in sch:
            (sch[path] if path else sch).edit([(kind, "")])
            states.append((sch.root_module, picture(sch.root_module)))
    while len(states) > 1:
        states.pop()
        sch.undo()
        root, before = states[-1]
        assert sch.root_module is root
        assert picture(root) == before
    with pytest.raises(ScheduleError, match="nothing to undo"):
        sch.undo()


def test_an_observer_that_fails_takes_the_step_with_it() -> None:
    plugin = Plugin()
    with isolated_plugins(plugin) as registry:
        sch = create_schedule(Odd(), plugins=registry)
        before = picture(sch.mod)
        plugin.refuse = True
        with pytest.raises(PluginError, match="an observer fails"):
            sch["parts.0"].edit([("facts", "fc"), ("replace", "norm")])
        assert picture(sch.mod) == before
        assert len(sch.journal) == 0


def test_a_nested_step_that_fails_and_is_caught_leaves_only_its_own_work_undone(registry: Registry) -> None:
    sch = create_schedule(Odd(), plugins=registry)

    def try_inner(handle: Schedule) -> None:
        handle.mod.before = 1
        with pytest.raises(RuntimeError, match="half-way"):
            handle.edit([("facts", ""), ("replace", "")], fail=RuntimeError)
        handle.mod.after = 2

    MUTATIONS["try_inner"] = try_inner
    try:
        sch["parts.0.fc"].edit([("try_inner", "")])
    finally:
        del MUTATIONS["try_inner"]
    fc = sch.mod.parts[0].fc
    assert (fc.before, fc.after, fc.weight.requires_grad) == (1, 2, True)
    assert [step.children for step in sch.journal] == [()]
    sch.undo()
    assert not hasattr(fc, "before")
    assert not hasattr(fc, "after")


# ---- handles


def test_a_handle_works_again_after_its_module_comes_back(registry: Registry) -> None:
    sch = create_schedule(Odd(), plugins=registry)
    fc = sch["parts.0.fc"]
    sch["parts.0"].edit([("drop_children", "")])
    for use in (lambda: fc.mod, lambda: fc.metadata, lambda: fc.edit([]), lambda: fc["x"], lambda: "x" in fc):
        with pytest.raises(ScheduleError, match="'parts.0.fc' is gone"):
            use()
    assert repr(fc) == "Schedule('parts.0.fc': gone)"
    sch.undo()
    assert fc.mod is sch.mod.parts[0].fc


def test_a_handle_sees_the_module_that_took_the_place(registry: Registry) -> None:
    sch = create_schedule(Odd(), plugins=registry)
    handle = sch["named.a"]
    handle.edit([("replace", "")])
    assert type(handle.mod) is nn.Sequential
    assert handle["0"].parent == handle
    assert handle.metadata.primitives == {}


def test_handles_are_equal_by_place(registry: Registry) -> None:
    sch, other = create_schedule(Odd(), plugins=registry), create_schedule(Odd(), plugins=registry)
    assert sch["parts"]["0"]["fc"] == sch["parts.0.fc"]
    assert sch["parts.0"] != sch["again"]
    assert sch["parts.0"] != other["parts.0"]
    assert len({sch["parts.0"], sch["parts"]["0"]}) == 1


def test_an_empty_place_is_no_module(registry: Registry) -> None:
    sch = create_schedule(Odd(), plugins=registry)
    assert "empty" not in sch
    assert "nothing" not in sch
    assert "empty" not in sch.child
    for path in ("empty", "nothing", "parts.2", "parts.-1", "parts.0.fc.weight", "scale", ".", "parts.", ".parts"):
        with pytest.raises(UnknownNameError):
            sch[path]


@pytest.mark.parametrize("name", ["_hidden", "__fspath__", "_ipython_display_"])
def test_private_names_are_never_primitives(registry: Registry, name: str) -> None:
    assert not hasattr(create_schedule(Odd(), plugins=registry), name)


# ---- lists, dicts, shared modules, ties


def test_lists_and_dicts_are_walked_like_modules(registry: Registry) -> None:
    sch = create_schedule(Odd(), plugins=registry)
    assert [handle.path for handle in sch.select("parts.*")] == ["parts.0", "parts.1"]
    assert list(sch["named"].child) == ["a", "b"]
    assert sch["parts"].child["1"].mod is sch.mod.parts[1]


def test_an_element_of_a_list_or_dict_is_replaced(registry: Registry) -> None:
    model = Odd()
    sch = create_schedule(model, plugins=registry)
    one, other = Part(), nn.Tanh()
    sch["parts.1"].replace(one)
    sch["named.b"].replace(other)
    assert (model.parts[1], model.named["b"]) == (one, other)
    assert (len(model.parts), list(model.named)) == (2, ["a", "b"])


def test_a_shared_module_is_one_module_with_one_metadata(registry: Registry) -> None:
    sch = create_schedule(Odd(), plugins=registry)
    sch["again"].edit([("metadata", "")])
    assert sch["parts.0"].metadata.param_tags == {"mark"}
    sch["again.fc"].replace(nn.Linear(2, 2))
    assert sch["parts.0.fc"].mod is sch["again.fc"].mod


def test_a_tied_weight_is_set_at_both_places_and_put_back(registry: Registry) -> None:
    model = Odd()
    sch = create_schedule(model, plugins=registry)
    old = model.named["a"].weight
    assert parameter_facts(old).names == ("parts.1.fc.weight", "named.a.weight")
    sch["named.a"].edit([("set_parameter", "")])
    assert model.parts[1].fc.weight is model.named["a"].weight
    assert model.named["a"].weight is not old
    assert parameter_facts(model.parts[1].fc.weight).names == parameter_facts(old).names
    sch.undo()
    assert model.parts[1].fc.weight is old
    assert model.named["a"].weight is old


class AdaptPrimitive(Primitive):
    """Adds and drops children directly, as a primitive may do with its own module."""

    name = "adapt"
    scope = "module"

    @staticmethod
    def apply(schedule: Schedule) -> None:
        schedule.mod.adapter = nn.Linear(2, 2)
        schedule.mod.tied = schedule.mod.adapter.weight
        schedule["adapter"].replace(nn.Sequential(nn.Linear(2, 2)))


def test_places_that_a_primitive_made_itself_are_found(registry: Registry) -> None:
    registry.add_primitive(AdaptPrimitive)
    model = Odd()
    sch = create_schedule(model, plugins=registry)
    sch["parts.0"].replace(Part())  # the places are known from here on
    sch["parts.1"].adapt()
    assert type(model.parts[1].adapter) is nn.Sequential
    sch["parts.1.adapter.0"].replace(nn.ReLU())
    sch["parts.1"].edit([("set_parameter", "")])
    assert type(model.parts[1].adapter[0]) is nn.ReLU
    assert model.parts[1].tied.shape == (3, 3)
    sch["parts"].replace(nn.ModuleList())
    assert len(model.parts) == 0


def test_replacing_one_holder_of_a_tie_leaves_the_other(registry: Registry) -> None:
    model = Odd()
    sch = create_schedule(model, plugins=registry)
    kept = model.parts[1].fc.weight
    sch["named.a"].replace(nn.Linear(2, 2))
    assert model.parts[1].fc.weight is kept
    assert model.named["a"].weight is not kept


def test_a_name_held_twice_in_one_module_is_two_names(registry: Registry) -> None:
    model = nn.Module()
    model.a = model.b = nn.Parameter(torch.ones(2))
    sch = create_schedule(model, plugins=registry)
    assert parameter_facts(model.a).names == ("a", "b")
    sch.edit([("set_parameter", "")])
    assert model.a is model.b


# ---- after training, copies, the life of objects


def test_undo_after_training_keeps_the_trained_weights(registry: Registry) -> None:
    """Weights change in place between a step and its undo: by an optimizer, or by ``load_state_dict``."""
    model = Odd()
    sch = create_schedule(model, plugins=registry)
    sch["parts.0"].edit([("wrap_forward", "")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    model.load_state_dict(model.state_dict())
    trained = copy.deepcopy(model.state_dict())
    sch.undo()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    assert forward_wrappers(model.parts[0]) == ()


def test_undo_leaves_the_training_mode_that_was_set_since(registry: Registry) -> None:
    model = Odd()
    sch = create_schedule(model, plugins=registry)
    sch.edit([("metadata", "")])
    model.eval()
    sch.undo()
    assert not any(module.training for module in model.modules())


def test_a_deep_copy_is_independent(registry: Registry) -> None:
    sch = create_schedule(Odd(), plugins=registry)
    sch["named.a"].edit([("facts", "")])
    twin = copy.deepcopy(sch)
    assert twin.mod is not sch.mod
    assert parameter_facts(twin.mod.named["a"].weight).tags == {"mark"}
    assert twin.mod.named["a"].weight is twin.mod.parts[1].fc.weight
    twin["parts.0"].replace(Part())
    twin["named.a"].edit([("facts", "")])
    assert (len(sch.journal), len(twin.journal)) == (1, 3)
    assert sch.mod.again is sch.mod.parts[0]
    assert twin.mod.again is twin.mod.parts[0]


def test_a_step_does_not_keep_a_replaced_model_alive_after_undo(registry: Registry) -> None:
    sch = create_schedule(Odd(), plugins=registry)
    new = nn.Linear(2, 2)
    alive = weakref.ref(new)
    sch["named.a"].replace(new)
    sch.undo()
    del new
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("model", [nn.Identity(), nn.ModuleList(), nn.Sequential(), nn.Linear(1, 1)])
def test_models_without_children_can_be_scheduled(registry: Registry, model: nn.Module) -> None:
    sch = create_schedule(model, plugins=registry)
    sch.edit([("hooks", ""), ("train", "")])
    sch.undo()
    assert list(sch.named_schedules()) == [("", sch)]


def test_a_lazy_module_can_be_scheduled(registry: Registry) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    sch = create_schedule(model, plugins=registry)
    sch["1"].edit([("hooks", "")])
    sch.edit([("hooks", "")])
    sch.undo()
    assert model(torch.ones(1, 2)).shape == (1, 3)


def test_a_model_made_in_inference_mode_can_be_scheduled(registry: Registry) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(2, 2))
    sch = create_schedule(model, plugins=registry)
    sch.edit([("hooks", "")])
    sch.undo()


def test_modules_in_a_circle_are_an_error(registry: Registry) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].owner = model
    with pytest.raises(ScheduleError, match="contains itself"):
        create_schedule(model, plugins=registry)
