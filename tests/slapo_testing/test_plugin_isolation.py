"""``isolated_plugins`` shows core and the given plugins, and nothing else."""

from __future__ import annotations

import pytest

from slapo_core import PluginError, Primitive, default_registry, hookimpl, list_primitives
from slapo_testing import isolated_plugins


class MarkPrimitive(Primitive):
    """Does nothing."""

    name = "mark"

    @staticmethod
    def apply(schedule: object) -> None: ...


class Plugin:
    @hookimpl
    def slapo_primitives(self) -> dict[str, type[Primitive]]:
        return {"mark": MarkPrimitive}


class Misspelt:
    @hookimpl
    def slapo_primitivs(self) -> dict[str, type[Primitive]]:
        return {}


def test_only_core_and_the_given_plugin_are_there() -> None:
    with isolated_plugins(Plugin()) as registry:
        assert "mark" in list_primitives()
        assert "replace" in list_primitives()
        assert "checkpoint" not in list_primitives()
        assert default_registry() is registry
    assert default_registry() is not registry
    assert "mark" not in list_primitives()


def test_it_nests() -> None:
    with isolated_plugins(Plugin()) as outer:
        with isolated_plugins():
            assert "mark" not in list_primitives()
        assert default_registry() is outer


def test_a_broken_plugin_is_an_error_and_the_registry_is_put_back() -> None:
    before = default_registry()
    with pytest.raises(PluginError, match="slapo_primitivs"), isolated_plugins(Misspelt()):
        pass
    assert default_registry() is before
