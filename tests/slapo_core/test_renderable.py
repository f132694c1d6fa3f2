"""``print`` of a schedule, program or engine: a plugin's text, and without one what core knows by itself."""

from __future__ import annotations

import pytest
from torch import nn

from slapo_core import PlainEngine, PluginError, Registry, build_program, create_schedule, hookimpl
from slapo_testing import isolated_plugins


class Words:
    """Shows anything, in its own words."""

    @hookimpl
    def slapo_render(self, subject: object, html: bool) -> str:
        return f"<b>{type(subject).__name__}</b>" if html else f"a {type(subject).__name__}"


class Nothing:
    """Shows nothing."""

    @hookimpl
    def slapo_render(self, subject: object, html: bool) -> None:
        return None


class Broken:
    """Fails."""

    @hookimpl
    def slapo_render(self, subject: object, html: bool) -> str:
        raise ZeroDivisionError("no room")


def test_a_plugin_of_the_schedule_shows_it() -> None:
    sch = create_schedule(nn.Sequential(nn.ReLU()), plugins=Registry([Nothing(), Words()]))
    assert str(sch["0"]) == "a Schedule"
    assert sch["0"]._repr_html_() == "<b>Schedule</b>"
    assert repr(sch["0"]) == "Schedule('0': ReLU)"


def test_programs_and_engines_go_by_the_default_registry() -> None:
    with isolated_plugins(Words()):
        sch = create_schedule(nn.ReLU())
        assert str(build_program(sch)) == "a Program"
        assert f"{PlainEngine(sch.mod)}" == "a PlainEngine"


@pytest.mark.parametrize("plugins", [(), (Nothing(),)])
def test_without_a_plugin_it_is_the_repr_and_of_a_schedule_the_steps(plugins: tuple[object, ...]) -> None:
    with isolated_plugins(*plugins):
        sch = create_schedule(nn.Sequential(nn.ReLU()))
        assert str(sch) == repr(sch) == "Schedule('': Sequential)"
        sch["0"].replace(nn.Identity())
        assert str(sch) == f"Schedule('': Sequential)\n{sch.journal}"
        assert sch._repr_html_() is None
        program, engine = build_program(sch), PlainEngine(sch.mod)
        assert str(program) == repr(program) == "Program(Sequential: 1 stage)"
        assert str(engine) == repr(engine)


def test_a_plugin_that_fails_is_named() -> None:
    sch = create_schedule(nn.ReLU(), plugins=Registry([Broken()]))
    with pytest.raises(PluginError, match="slapo_render of plugin 'Broken#0' .* failed: ZeroDivisionError: no room"):
        str(sch)
