"""Plugin loading: whatever is wrong with one plugin is recorded with its owner, and the rest work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from slapo_core import BuildError, PluginError, PluginRecord, Registry, UnknownNameError, build, create_schedule, hookimpl
from tests.distributions import write_distribution

PLUGIN = """
from slapo_core import Primitive, hookimpl

class Quantize(Primitive):
    name = "quantize"

    @staticmethod
    def apply(schedule): ...

@hookimpl
def slapo_primitives():
    return {provided}
"""
GOOD = PLUGIN.format(provided='{"quantize": Quantize}')
MISSPELT = "from slapo_core import hookimpl\n@hookimpl\ndef slapo_primitive(): return {}"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of ``sys.path`` where distributions can be put."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for module in set(sys.modules) - before:
        if module.endswith("_plugin"):
            del sys.modules[module]


def record_of(registry: Registry, name: str) -> PluginRecord:
    return next(record for record in registry.records if record.name == name)


def test_an_installed_plugin_is_found_with_its_provider(site: Path) -> None:
    write_distribution(site, "slapo-quant", GOOD, version="2.3")
    registry = Registry()
    assert registry.primitive("quantize").__name__ == "Quantize"
    assert registry.provider("primitive", "quantize") == "slapo-quant 2.3"


def test_plugins_are_sorted_by_name(site: Path) -> None:
    for name in ("slapo-zeta", "slapo-alpha", "slapo-mid"):
        write_distribution(site, name, "")
    names = [record.name for record in Registry().records]
    assert names == sorted(names)
    assert {"alpha", "core", "mid", "zeta"} <= set(names)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import megatron_of_nobody", "No module named 'megatron_of_nobody'"),
        ("raise RuntimeError('no\\nluck')", "RuntimeError: no luck"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError: "),
        (MISSPELT, "no hook 'slapo_primitive'; did you mean 'slapo_primitives'?"),
        (MISSPELT.replace("slapo_primitive", "primitives"), "no hook 'primitives'"),
        ("def slapo_primitives(): return {}", "slapo_primitives is not marked with @hookimpl"),
        (
            MISSPELT.replace("slapo_primitive()", "slapo_before_apply(where)"),
            "Argument(s) {'where'} are declared in the hookimpl",
        ),
        (MISSPELT.replace("slapo_primitive()", "slapo_add_hookspecs()"), "TypeError: slapo_add_hookspecs() takes 0 positional"),
        (PLUGIN.format(provided="1 / 0"), "ZeroDivisionError: division by zero"),
        (PLUGIN.format(provided="None"), "returned None; return {name: primitive}"),
        (PLUGIN.format(provided='{"quantize": "slapo_quant"}'), "'slapo_quant' is not of the form 'module:Class'"),
        (PLUGIN.format(provided='{"quantize": "slapo quant:Class"}'), "'slapo quant:Class' is not of the form 'module:Class'"),
        (PLUGIN.format(provided='{"quantize": dict}'), "<class 'dict'> is not a subclass of Primitive"),
        (PLUGIN.format(provided='{"quantise": Quantize}'), "Quantize says its name is 'quantize'"),
        (PLUGIN.format(provided="{3: Quantize}"), "its name is not a word"),
        (GOOD.replace('"quantize"', '"mod"'), "Schedule has an attribute of this name"),
        (GOOD.replace('"quantize"', '"_quantize"'), "its name cannot be called as sch.<name>(...)"),
        (GOOD.replace("def apply", "def apple"), "Quantize does not define apply"),
    ],
)
def test_a_broken_plugin_is_recorded_and_the_rest_work(site: Path, source: str, why: str) -> None:
    write_distribution(site, "slapo-broken", source, version="0.7")
    write_distribution(site, "slapo-quant", GOOD)
    registry = Registry()
    broken = record_of(registry, "broken")
    assert not broken.loaded
    assert broken.failure is not None
    assert broken.failure.startswith("plugin 'broken' (slapo-broken 0.7) did not load: ")
    assert why in broken.failure
    assert "\n" not in broken.failure
    assert {"quantize", "replace"} <= set(registry.names("primitive"))


@pytest.mark.parametrize("source", ["x = 1\nraise RuntimeError('no luck')", "\nimport megatron_of_nobody", "\nx = 1 / 0"])
def test_a_failing_import_tells_file_and_line(site: Path, source: str) -> None:
    module = write_distribution(site, "slapo-broken", source)
    assert str(record_of(Registry(), "broken").failure).endswith(f" ({site / module}.py:2)")


def test_a_lazy_name_that_fails_tells_file_and_line(site: Path) -> None:
    write_distribution(site, "slapo-lazy", PLUGIN.format(provided='{"quantize": "late_plugin:Quantize"}'))
    (site / "late_plugin.py").write_text("\n\nraise RuntimeError('too late')")
    with pytest.raises(PluginError, match=r"cannot be used: RuntimeError: too late \(.*late_plugin.py:3\)"):
        Registry().primitive("quantize")


BREAKS = "from slapo_core import BuildError, hookimpl\n@hookimpl\ndef {hook}(): raise {error}"


@pytest.mark.parametrize("hook", ["slapo_before_build", "slapo_partition", "slapo_after_build"])
def test_a_hook_that_breaks_down_names_its_plugin(site: Path, hook: str) -> None:
    module = write_distribution(site, "slapo-shaky", BREAKS.format(hook=hook, error="KeyError('colour')"), version="0.3")
    message = rf"^{hook} of plugin 'shaky' \(slapo-shaky 0.3\) failed: KeyError: 'colour' \(.*{module}.py:3\)$"
    with pytest.raises(PluginError, match=message) as caught:
        build(create_schedule(nn.Linear(2, 2), plugins=Registry()))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_hook_that_refuses_speaks_for_itself(site: Path) -> None:
    write_distribution(site, "slapo-strict", BREAKS.format(hook="slapo_before_build", error="BuildError('not on a Monday')"))
    with pytest.raises(BuildError, match="^not on a Monday$"):
        build(create_schedule(nn.Linear(2, 2), plugins=Registry()))


def test_hooks_of_a_refused_plugin_are_not_called(site: Path) -> None:
    source = MISSPELT + "\n@hookimpl\ndef slapo_after_build(engine): raise RuntimeError('called')"
    write_distribution(site, "slapo-broken", source)
    registry = Registry()
    assert registry.hooks_of(record_of(registry, "broken")) == []
    assert "broken" not in [impl.plugin_name for impl in registry.hook.slapo_after_build.get_hookimpls()]


def test_a_broken_plugin_is_logged_once(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_distribution(site, "slapo-broken", "import megatron_of_nobody")
    Registry()
    assert capsys.readouterr().err.count("WARNING Slapo: plugin 'broken' (slapo-broken 1.0) did not load") == 1


def test_one_primitive_that_cannot_be_imported_is_noted_and_the_rest_listed(site: Path) -> None:
    write_distribution(site, "slapo-half", PLUGIN.format(provided='{"quantize": Quantize, "lazy": "module_of_nobody:Class"}'))
    registry = Registry()
    usable = registry.load_all("primitive")
    assert {"quantize", "replace"} <= set(usable)
    assert "lazy" not in usable
    assert record_of(registry, "half").problems == [
        "primitive 'lazy' of slapo-half 1.0 cannot be used: No module named 'module_of_nobody'"
    ]


def test_an_unknown_name_says_what_is_installed_and_what_failed(site: Path) -> None:
    write_distribution(site, "slapo-megatron", "import megatron_of_nobody", version="0.1")
    with pytest.raises(UnknownNameError) as error:
        Registry().primitive("replac")
    assert "no primitive 'replac'; did you mean 'replace'?; available: annotate, " in str(error.value)
    assert "plugin 'megatron' (slapo-megatron 0.1) did not load: No module named 'megatron_of_nobody'" in str(error.value)


def test_two_distributions_with_one_primitive_are_both_named_and_neither_wins(site: Path) -> None:
    write_distribution(site, "slapo-one", GOOD, version="1.0")
    write_distribution(site, "slapo-two", GOOD, version="2.0")
    registry = Registry()
    with pytest.raises(
        PluginError, match=r"primitive 'quantize' is provided by slapo-one 1\.0 and slapo-two 2\.0; uninstall one"
    ):
        registry.primitive("quantize")
    assert "quantize" not in registry.names("primitive")
    assert "replace" in registry.names("primitive")
    assert "slapo-two 2.0" in record_of(registry, "one").problems[0]


def test_a_plugin_cannot_take_over_a_primitive_of_core(site: Path) -> None:
    write_distribution(site, "slapo-quant", GOOD.replace('"quantize"', '"replace"'))
    with pytest.raises(PluginError, match="'replace' is provided by slapo-core .* and slapo-quant 1.0"):
        Registry().primitive("replace")


def test_two_distributions_with_one_plugin_name_are_both_refused(site: Path) -> None:
    write_distribution(site, "slapo-one", GOOD, entry_points="[slapo]\nquant = slapo_one_plugin\n")
    write_distribution(site, "slapo-two", GOOD, entry_points="[slapo]\nquant = slapo_two_plugin\n")
    registry = Registry()
    same = [record for record in registry.records if record.name == "quant"]
    assert [record.loaded for record in same] == [False, False]
    assert all("slapo-one 1.0 and slapo-two 1.0 have the same plugin name" in str(record.failure) for record in same)


def test_disabled_plugins_are_not_imported(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLAPO_DISABLE_PLUGINS", "other, quant")
    module = write_distribution(site, "slapo-quant", GOOD)
    registry = Registry()
    assert module not in sys.modules
    assert record_of(registry, "quant").disabled
    with pytest.raises(UnknownNameError, match=r"plugin 'quant' \(slapo-quant 1.0\) is disabled by SLAPO_DISABLE_PLUGINS"):
        registry.primitive("quantize")


def test_a_name_to_disable_that_is_not_installed_is_told(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_distribution(site, "slapo-quant", GOOD)
    monkeypatch.setenv("SLAPO_DISABLE_PLUGINS", "quantt,")
    assert record_of(Registry(), "quant").loaded
    told = [line for line in capsys.readouterr().err.splitlines() if "no plugin 'quantt'; did you mean 'quant'?" in line]
    assert len(told) == 1
    assert "WARNING" in told[0]
    assert told[0].endswith("SLAPO_DISABLE_PLUGINS names it")


@pytest.mark.parametrize("source", ["import megatron_of_nobody", PLUGIN.format(provided="3"), MISSPELT])
def test_strict_turns_a_broken_plugin_into_an_error(site: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setenv("SLAPO_STRICT_PLUGINS", "1")
    write_distribution(site, "slapo-broken", source)
    with pytest.raises(PluginError, match=r"plugin 'broken' \(slapo-broken 1.0\) did not load") as error:
        Registry()
    assert "slapo-broken 1.0" in error.value.owner


def test_strict_turns_a_conflict_into_an_error(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLAPO_STRICT_PLUGINS", "1")
    write_distribution(site, "slapo-one", GOOD)
    write_distribution(site, "slapo-two", GOOD)
    with pytest.raises(PluginError, match="'quantize' is provided by slapo-one 1.0 and slapo-two 1.0"):
        Registry()


def test_a_plugin_may_use_hooks_that_a_later_one_specifies(site: Path) -> None:
    user = "from slapo_core import hookimpl\n@hookimpl\ndef slapo_greet(): return 'hello'"
    owner = """
from slapo_core import hookimpl, hookspec
class Specs:
    @hookspec
    def slapo_greet(self): ...
@hookimpl
def slapo_add_hookspecs(manager):
    manager.add_hookspecs(Specs)
"""
    write_distribution(site, "slapo-a-user", user)
    write_distribution(site, "slapo-z-owner", owner)
    registry = Registry()
    assert record_of(registry, "a-user").loaded
    assert registry.hook.slapo_greet() == ["hello"]


def test_given_plugins_are_used_with_core_alone_and_must_work() -> None:
    class Observer:
        @hookimpl
        def slapo_after_build(self, engine: object) -> None: ...

    registry = Registry([Observer(), Observer()])
    assert [record.name for record in registry.records] == ["core", "Observer#0", "Observer#1"]
    with pytest.raises(PluginError, match="Misspelt#0.* did not load: no hook 'slapo_after_builds'"):
        Registry([type("Misspelt", (), {"slapo_after_builds": hookimpl(lambda self: None)})()])


def test_a_plugin_that_asks_for_the_registry_while_it_is_imported_loses_only_itself(site: Path) -> None:
    write_distribution(site, "slapo-eager", "import slapo_core\nslapo_core.list_primitives()")
    script = (
        "import slapo_core as s; registry = s.default_registry(); assert registry is s.default_registry();"
        "print(s.list_primitives(), *[record.failure for record in registry.records])"
    )
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {script}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "'replace'" in result.stdout
    assert "plugin 'eager' (slapo-eager 1.0) did not load: the registry is used while plugins are" in result.stdout


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entry_points=st.binary(max_size=60), metadata=st.binary(max_size=60))
def test_no_metadata_of_a_stranger_stops_loading(site: Path, entry_points: bytes, metadata: bytes) -> None:
    if not (info := site / "slapo_odd-1.0.dist-info").exists():
        write_distribution(site, "slapo-odd", "")
    (info / "entry_points.txt").write_bytes(b"[slapo]\n" + entry_points)
    (info / "METADATA").write_bytes(metadata)
    registry = Registry()
    assert "replace" in registry.names("primitive")
    assert all(record.loaded or record.failure for record in registry.records)
