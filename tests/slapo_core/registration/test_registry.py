"""Names to classes: lazily imported, checked, and never silently another's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from slapo_core import (
    Entry,
    PluginError,
    Primitive,
    Registry,
    UnknownNameError,
    create_schedule,
    default_registry,
    hookimpl,
    list_primitives,
    register_primitive,
)
from slapo_testing import isolated_plugins


def providing(**primitives: object) -> SimpleNamespace:
    return SimpleNamespace(slapo_primitives=hookimpl(lambda: primitives))


class DoublePrimitive(Primitive):
    """Doubles the bias."""

    name = "double"

    @staticmethod
    def apply(schedule: object) -> None: ...


class ClassicPrimitive(Primitive):
    """Named the classic way."""

    @staticmethod
    def name() -> str:
        return "classic"

    @staticmethod
    def apply(schedule: object) -> str:
        return "applied"


def test_class_objects_and_classic_names_are_accepted() -> None:
    registry = Registry([providing(double=DoublePrimitive, classic=ClassicPrimitive)])
    assert registry.primitive("double") is DoublePrimitive
    sch = create_schedule(nn.Linear(1, 1), plugins=registry)
    assert sch.classic() == "applied"


def test_a_lazy_name_is_imported_on_first_use_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slapo_lazy.py").write_text(
        "from slapo_core import Primitive\n"
        "class Lazy(Primitive):\n    name = 'lazy'\n    @staticmethod\n    def apply(schedule): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry([providing(lazy="slapo_lazy:Lazy")])
    assert "lazy" in registry.names("primitive")
    assert "slapo_lazy" not in sys.modules
    assert registry.primitive("lazy") is registry.primitive("lazy") is sys.modules["slapo_lazy"].Lazy
    del sys.modules["slapo_lazy"]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("module_of_nobody:Class", "No module named 'module_of_nobody'"),
        ("collections:Clas", "has no attribute 'Clas'"),
        ("collections:OrderedDict", "is not a subclass of Primitive"),
        ("slapo_core.interfaces.primitive:Primitive", "Primitive does not define apply"),
    ],
)
def test_what_a_lazy_name_stands_for_is_checked_when_used(target: str, why: str) -> None:
    registry = Registry([providing(lazy=target)])
    with pytest.raises(PluginError, match=rf"primitive 'lazy' of SimpleNamespace#0 cannot be used: .*{why}") as error:
        registry.primitive("lazy")
    assert error.value.owner == "SimpleNamespace#0"


def test_register_primitive_in_this_process() -> None:
    with isolated_plugins():

        @register_primitive()
        class Triple(Primitive):
            name = "triple"

            @staticmethod
            def apply(schedule: object) -> int:
                return 3

        assert create_schedule(nn.Linear(1, 1)).triple() == 3
        assert "triple" in list_primitives()
        assert list_primitives(name_only=False)["triple"] is Triple
        assert default_registry().provider("primitive", "triple") == __name__


def test_defining_a_registered_class_again_replaces_it() -> None:
    with isolated_plugins():
        for value in (1, 2):

            @register_primitive()
            class Again(Primitive):
                name = "again"
                number = value

                @staticmethod
                def apply(schedule: object) -> None: ...

        assert default_registry().primitive("again").number == 2


def test_registering_a_name_that_is_taken_is_an_error() -> None:
    with isolated_plugins(), pytest.raises(PluginError, match=f"'replace' is provided by slapo-core 0.1.0 and {__name__}"):

        @register_primitive()
        class Mine(Primitive):
            name = "replace"

            @staticmethod
            def apply(schedule: object) -> None: ...


@pytest.mark.parametrize("name", ["mod", "parent", "select", "apply", "undo", "save", "_hidden", "not a word", "class", ""])
def test_names_users_could_not_call_are_refused(name: str) -> None:
    primitive = type("Odd", (DoublePrimitive,), {"name": name})
    with isolated_plugins(), pytest.raises(PluginError, match="cannot be used"):
        register_primitive()(primitive)


def test_a_query_s_name_is_taken_too() -> None:
    class Queries:
        @hookimpl
        def slapo_queries(self) -> dict[str, object]:
            return {"count": lambda schedule: 1}

    primitive = type("Count", (DoublePrimitive,), {"name": "count"})
    with isolated_plugins(Queries()), pytest.raises(PluginError, match="'count' is provided by .* and "):
        register_primitive()(primitive)


@pytest.mark.parametrize("kind", ["dialect", "model"])
def test_unknown_dialects_and_models(kind: str) -> None:
    with pytest.raises(UnknownNameError, match=f"no {kind} 'torhc'"):
        Registry([]).get(kind, "torhc")


def test_dialects_and_models_are_registered_like_primitives() -> None:
    plugin = SimpleNamespace(
        slapo_dialects=hookimpl(lambda: {"odd": "collections:OrderedDict"}),
        slapo_models=hookimpl(lambda: {"gpt2": "collections:OrderedDict", "none": "string:digits"}),
    )
    registry = Registry([plugin])
    assert registry.names("dialect") == ["odd"]
    with pytest.raises(PluginError, match="is not a subclass of Dialect"):
        registry.get("dialect", "odd")
    assert callable(registry.get("model", "gpt2"))
    with pytest.raises(PluginError, match="'0123456789' is not a function"):
        registry.get("model", "none")


def test_what_no_plugin_recorded_and_cannot_be_imported_names_its_module() -> None:
    with pytest.raises(PluginError, match="'gpt2' of no_such_module cannot be used: No module named 'no_such_module'"):
        Entry("model", "gpt2", "no_such_module:schedule").load()


def test_listing_names_imports_no_primitive() -> None:
    script = (
        "import sys, slapo_core; names = slapo_core.list_primitives(); assert 'replace' in names, names;"
        "print([m for m in sys.modules if m.startswith('slapo_core.primitives.')])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
