"""``trace`` and ``trace_until`` on a schedule."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import ScheduleError, TraceError, UnknownNameError, create_schedule
from slapo_tracing import trace, trace_module
from slapo_tracing.graphs import TracedModule
from slapo_verify.comparison import assert_equivalent
from tests.slapo_tracing.comparison import assert_same
from tests.zoo.families import FAMILIES

X = torch.randn(2, 4)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.fc(x).relu() * scale


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()
        self.second = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x), scale=2.0).sin()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle = Middle()
        self.unused = nn.Linear(4, 4)
        self.again = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.middle(x)) + self.again(x)


def traced_paths(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if isinstance(module, TracedModule)}


def calls(model: Any) -> list[str]:
    return [str(node.target) for node in model.graph.find_nodes(op="call_module")]


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        ({}, {"", "middle", "middle.first", "middle.second", "again"}),
        ({"recursive": False}, {""}),
        ({"flatten": True}, {""}),
        ({"leaf_modules": ["Inner"]}, {"", "middle"}),
        ({"leaf_modules": [Inner]}, {"", "middle"}),
        ({"leaf_modules": ["middle.*", "again"]}, {"", "middle"}),
    ],
)
def test_what_gets_a_graph(options: dict[str, Any], paths: set[str]) -> None:
    model = Outer()
    sch = create_schedule(model, example_inputs={"x": X})
    assert sch.trace(**options).mod is sch.root_module
    assert traced_paths(sch.mod) == paths
    assert_same(model, sch.mod, {"x": X})  # type: ignore[arg-type]
    sch.undo()
    assert sch.mod is model
    assert traced_paths(model) == set()


def test_a_part_gets_the_inputs_of_the_run() -> None:
    model = Outer()
    plain = copy.deepcopy(model)
    sch = create_schedule(model, example_inputs=(X,))
    sch["middle.second"].trace()
    assert traced_paths(model) == {"middle.second"}
    torch.testing.assert_close(model(X), plain(X))
    torch.testing.assert_close(model.middle.second(X, scale=3.0), plain.middle.second(X, scale=3.0))
    sch["middle"].trace()
    assert traced_paths(model.middle) == {"", "first", "second"}
    sch["again"].trace(example_inputs=(torch.randn(7, 4),))
    assert model.again(torch.randn(7, 4)).shape == (7, 4)


def test_a_module_called_in_two_ways() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.inner(x[:1], scale=3.0)

    model = Two()
    traced = trace(model, example_inputs=(X,))
    assert traced_paths(traced) == {"", "inner"}
    torch.testing.assert_close(traced(X), model(X))


def test_hooks_survive() -> None:
    model = Outer()
    model.again.register_forward_hook(lambda module, args, out: out * 3)
    expected = model(X)
    sch = create_schedule(model, example_inputs=(X,))
    sch.trace(flatten=True)
    torch.testing.assert_close(sch.mod(X), expected)
    assert "again" in calls(sch.mod)


def test_what_the_schedule_knows_stays_known() -> None:
    model = Outer()
    sch = create_schedule(model, example_inputs=(X,))
    sch["middle.first"].metadata.primitives["mine"] = 1
    names = sch.original_names
    sch.trace()
    assert sch["middle.first"].metadata.primitives == {"mine": 1}
    assert sch.original_names == names
    assert "unused" in sch


def test_trace_until() -> None:
    model = Outer()
    sch = create_schedule(model, example_inputs=(X,))
    sch.trace_until("middle.*")
    assert calls(sch.mod) == ["middle.first", "middle.second", "again", "again"]
    assert_same(model, sch.mod, {"x": X})  # type: ignore[arg-type]


def test_trace_until_the_layers_of_a_transformer() -> None:
    model, batch = FAMILIES["gpt2"].model(), FAMILIES["gpt2"].batch()
    sch = create_schedule(model, example_inputs=batch)
    sch.trace_until(["transformer.h.*", "lm_head"])
    assert calls(sch.mod)[-2:] == ["transformer.ln_f", "lm_head"]
    assert_same(model, sch.mod, batch)  # type: ignore[arg-type]


@functools.lru_cache
def positions(size: int) -> torch.Tensor:
    return torch.arange(size).float()


@pytest.mark.parametrize("names", [["first"], ["second"], ["first", "second"]])
def test_a_cached_function_that_several_graphs_call(names: list[str]) -> None:
    class Adds(Inner):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return self.fc(x) + positions(4)

    class Net(Middle):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x + positions(4))) * positions(4)

    model = Net()
    for name in names:
        setattr(model, name, Adds())
    assert_same(model, trace(model, example_inputs=(X,)), {"x": X})


class Placeholder:
    """Stands for what is not installed, as in MONAI."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("not installed")


missing = Placeholder()


def test_a_placeholder_among_the_globals_is_not_touched() -> None:
    model = Outer()
    assert_same(model, trace(model, example_inputs={"x": X}), {"x": X})


@pytest.mark.parametrize("tracer", ["fx", "export"])
def test_the_other_tracers(tracer: str) -> None:
    model = Outer()
    sch = create_schedule(model, example_inputs={"x": X})
    sch.trace(tracer=tracer, flatten=True)
    assert_same(model, sch.mod, {"x": X})  # type: ignore[arg-type]
    torch.testing.assert_close(sch.mod(torch.ones(3, 4)), model(torch.ones(3, 4)))


def test_export_of_structures_and_a_transformer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.plain = torch.ones(4)

        def forward(self, x: dict[str, Any], n: int = 1) -> Any:
            return {"out": self.inner(x["a"][0]) * n + x["a"][1] + self.plain, "n": n}

    model, inputs = Net(), {"x": {"a": [X, X + 1]}, "n": 3}
    traced = trace(model, example_inputs=inputs, tracer="export")
    assert_same(model, traced, inputs)
    bert, batch = FAMILIES["bert"].model(), FAMILIES["bert"].batch()
    assert_same(bert, trace(bert, example_inputs=batch, tracer="export"), batch)


@pytest.mark.parametrize(
    ("path", "options", "error", "what"),
    [
        ("", {"leaf_modules": ["Outer2"]}, ScheduleError, "leaf_modules: 'Outer2' is neither a class nor the path"),
        ("", {"tracer": "symbolic"}, UnknownNameError, "no tracer 'symbolic'"),
        ("unused", {}, TraceError, "'unused' is not called when the model runs"),
        ("middle", {"tracer": "export"}, ScheduleError, "tracer 'export' runs the module; give its example_inputs"),
        ("", {"leaf_modules": "Outer2"}, ScheduleError, "leaf_modules: 'Outer2' is neither a class nor the path"),
        ("middle", {"leaf_modules": "Outer2"}, ScheduleError, r"trace\('middle'\): leaf_modules: 'Outer2' is neither a class"),
        ("", {"leaf_modules": [3]}, ScheduleError, "leaf_modules: 3 is neither a class nor a name"),
        ("", {"concrete_args": {"y": 1}}, TraceError, "the forward of Outer takes no 'y'; it takes x"),
        ("", {"tracer": "fx", "concrete_args": {"y": 1}}, TraceError, "the forward of Outer takes no 'y'; it takes x"),
    ],
)
def test_refusals_change_nothing(path: str, options: dict[str, Any], error: type[Exception], what: str) -> None:
    model = Outer()
    sch = create_schedule(model, example_inputs=(X,))
    schedule = sch[path] if path else sch
    with pytest.raises(error, match=what):
        schedule.trace(**options)
    assert sch.mod is model
    assert traced_paths(model) == set()
    assert len(sch.journal) == 0


@pytest.mark.parametrize("leaves", ["Inner", Inner, {Inner}])
def test_one_leaf_needs_no_list(leaves: Any) -> None:
    sch = create_schedule(Outer(), example_inputs=(X,))
    sch.trace(leaf_modules=leaves)
    assert traced_paths(sch.mod) == {"", "middle"}
    sch = create_schedule(Outer(), example_inputs=(X,))
    sch.trace_until("middle", leaf_modules=leaves)
    assert traced_paths(sch.mod) == {""}


@pytest.mark.parametrize("container", ["list", "dict"])
def test_each_member_of_a_list_is_traced(container: str) -> None:
    members = {"a": Middle(), "b": Middle()}

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(members.values()) if container == "list" else nn.ModuleDict(members)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts.children():
                x = x + part(x)
            return x

    holder = Holder()
    sch = create_schedule(copy.deepcopy(holder), example_inputs=(X,))
    sch["parts"].trace(flatten=True)
    assert traced_paths(sch.mod) == {f"parts.{name}" for name, _ in holder.parts.named_children()}
    assert_equivalent(holder, sch.mod, X)
    sch.undo()
    assert traced_paths(sch.mod) == set()
    with pytest.raises(ScheduleError, match=r"trace\('parts'\): the Module(List|Dict) is not called; its members are"):
        sch["parts"].trace(example_inputs=(X,))


def test_no_example_inputs() -> None:
    for traced in (create_schedule(Outer()).trace().mod, trace(Outer()), trace_module(Outer())):
        assert traced_paths(traced) == {"", "middle", "middle.first", "middle.second", "again"}
    assert traced_paths(create_schedule(Outer()).trace(tracer="value").mod) == traced_paths(trace(Outer()))
    with pytest.raises(TraceError, match="tracer 'fx' cannot trace Branch: symbolically traced .*; give example_inputs"):
        create_schedule(Branch()).trace()


def test_trace_until_refusals() -> None:
    sch = create_schedule(Outer(), example_inputs=(X,))
    with pytest.raises(ScheduleError, match=r"trace_until\(''\): no module at 'midle'"):
        sch.trace_until("midle")
    for paths in (3, [3], None):
        with pytest.raises(ScheduleError, match=r"trace_until\(''\): paths is .*; give one, or a list"):
            sch.trace_until(paths)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="3 cannot be traced; give an nn.Module"):
        trace(3)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="does not call 'unused'"):
        sch.trace_until(["middle.first", "unused"])


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_untraceable_code_in_a_part() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Branch())
    sch = create_schedule(model, example_inputs=(X,))
    with pytest.raises(TraceError, match=r"1: the forward asks for the values of a tensor \(bool\).*test_trace.py"):
        sch.trace()
    assert sch.mod is model
    sch.trace(leaf_modules=["Branch"])
    torch.testing.assert_close(sch.mod(X), model(X))


def test_the_journal_replays(tmp_path: Any) -> None:
    sch = create_schedule(Outer(), example_inputs=(X,))
    sch.trace(leaf_modules=["Inner"])
    assert "trace(leaf_modules=['Inner'])" in str(sch.journal)
