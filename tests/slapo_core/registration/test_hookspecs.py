"""Every hook is documented, and the example in its docstring is a plugin that loads and can be called."""

from __future__ import annotations

import doctest
import inspect
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
import typer
from torch import nn

from slapo_core import PlainEngine, Registry, ScheduleError, Step, create_schedule, hookimpl, hookspec, hookspecs
from slapo_core.hookspecs import NAME
from slapo_core.registration.entries import HOOKS

SPECS = [value for name, value in vars(hookspecs).items() if hasattr(value, f"{NAME}_spec")]


def run_example(spec: Any) -> SimpleNamespace:
    """Run the docstring's example; what it defines is the plugin."""
    names = {"hookimpl": hookimpl, "hookspec": hookspec, "ScheduleError": ScheduleError, "__name__": __name__}
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(spec), dict(names), spec.__name__, None, None)
    assert test.examples, f"{spec.__name__} has no example"
    runner = doctest.DocTestRunner()
    runner.run(test, clear_globs=False)
    assert runner.failures == 0
    return SimpleNamespace(**{name: value for name, value in test.globs.items() if name not in names})


def arguments() -> dict[str, Any]:
    sch = create_schedule(nn.ModuleDict({"lm_head": nn.Linear(1, 1)}))
    return {
        "schedule": sch["lm_head"],
        "name": "replace",
        "args": (),
        "kwargs": {},
        "step": Step("lm_head", "replace", (), {}, "slapo-core 0.1.0"),
        "target": "torch",
        "group": None,
        "config": {},
        "engine": PlainEngine(sch.mod),
        "app": typer.Typer(),
        "subject": sch,
        "namespace": {"schedule": lambda sch, bits: None},
        "html": False,
        "manager": pluggy.PluginManager(NAME),
    }


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.__name__)
def test_the_example_loads_and_runs(spec: Any) -> None:
    plugin = run_example(spec)
    name = spec.__name__
    if name in HOOKS.values():
        (provided,) = getattr(plugin, name)().items()
        assert all(isinstance(value, str) for value in provided)
    registry = Registry([plugin])
    assert registry.hooks_of(registry.records[-1]) == [name]
    if name == "slapo_before_apply":
        with pytest.raises(ScheduleError, match=r"replace\('lm_head'\): the head is not to be replaced"):
            registry.hook.slapo_before_apply(**{key: arguments()[key] for key in inspect.signature(spec).parameters})
    else:
        getattr(registry.hook, name)(**{key: arguments()[key] for key in inspect.signature(spec).parameters})


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.__name__)
def test_every_hook_is_typed_and_documented(spec: Any) -> None:
    assert spec.__name__.startswith("slapo_")
    assert inspect.getdoc(spec)
    annotations = inspect.get_annotations(spec)
    assert set(annotations) == {*inspect.signature(spec).parameters, "return"}


def test_the_specs_are_all_there() -> None:
    assert len(SPECS) >= 10
