"""The command line around ``slapo train``: what is installed, commands of plugins, and errors in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from slapo.cli.app import create_app, main
from slapo.run_data.versions import PACKAGES, versions
from slapo_core import Registry, ScheduleError, hookimpl, use_registry
from slapo_testing import isolated_plugins
from tests.distributions import write_distribution


@hookimpl
def slapo_commands(app: typer.Typer) -> None:
    @app.command()
    def hello(fail: bool = False) -> None:
        if fail:
            raise ScheduleError("no such greeting", path="h.0", primitive="hello")
        typer.echo("hello")


PLUGIN = SimpleNamespace(slapo_commands=slapo_commands)


def test_a_plugin_adds_a_command() -> None:
    with isolated_plugins(PLUGIN):
        assert CliRunner().invoke(create_app(), ["hello"]).output == "hello\n"


def test_an_error_made_on_purpose_is_one_sentence_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slapo", "hello", "--fail"])
    with isolated_plugins(PLUGIN), pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    assert capsys.readouterr().err == "slapo: hello('h.0'): no such greeting\n"


def test_version_names_the_distributions() -> None:
    lines = CliRunner().invoke(create_app(), ["--version"]).output.splitlines()
    assert {"slapo 0.1.0", "slapo-core 0.1.0", "slapo-torch 0.1.0"} < set(lines)
    assert [line.split()[0] for line in lines][:2] == ["python", "platform"]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "command", ["plugins", *(pytest.param(name, marks=pytest.mark.slow) for name in ("primitives", "train --help"))]
)
def test_a_plugin_that_fails_and_one_to_disable_that_is_not_installed_are_told_of_once(command: str, tmp_path: Path) -> None:
    write_distribution(tmp_path, "slapo-broken", "raise RuntimeError('no luck')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "SLAPO_DISABLE_PLUGINS": "memmory"}
    run = [sys.executable, "-m", "slapo", *command.split()]
    result = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=60)
    assert (result.stdout + result.stderr).count("RuntimeError: no luck") == 1
    assert result.stderr.count("no plugin 'memmory'; did you mean 'memory'?") == 1


def test_primitives_are_listed_with_their_providers() -> None:
    with isolated_plugins():
        result = CliRunner().invoke(create_app(), ["primitives", "--json"])
    listed = json.loads(result.output)
    row = next(row for row in listed["primitives"] if row["name"] == "replace")
    assert row["distribution"] == "slapo-core"
    assert row["version"] == "0.1.0"
    assert row["summary"].startswith("Replace this module")
    assert listed["problems"] == []


def test_a_table_shows_every_name() -> None:
    with isolated_plugins():
        output = CliRunner().invoke(create_app(), ["primitives"]).output
    assert [line.split()[0] for line in output.splitlines() if line and not line.startswith(" ")] == [
        "name",
        "annotate",
        "replace",
        "replace_all",
    ]


def test_plugins_shows_state_and_hooks() -> None:
    with isolated_plugins(PLUGIN):
        (core, ours) = json.loads(CliRunner().invoke(create_app(), ["plugins", "--json"]).output)["plugins"]
    assert core["state"] == ours["state"] == "loaded"
    assert "replace" in core["provides"]["primitives"]
    assert ours["provides"]["hooks"] == ["slapo_commands"]


DIALECT = """
from slapo_core import Dialect, hookimpl

class Limit:
    asked, instead = "flying", "walk"

class Good(Dialect):
    name = "good"
    distribution, tested, limits = "an-engine", "1.0", (Limit,)
    @classmethod
    def build(cls, program, **config): raise NotImplementedError

class Absent(Good):
    name, distribution = "absent", "an-engine-that-is-not-there"

class Plain(Dialect):
    name = "plain"
    build = Good.build

@hookimpl
def slapo_dialects():
    module = "slapo_engines_plugin"
    names = {"good": "Good", "absent": "Absent", "plain": "Plain", "broken": "Missing"}
    return {name: f"{module}:{target}" for name, target in names.items()}
"""


@pytest.fixture
def dialects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An engine of version 1.0 and dialects for it, for one that is not there, for none, and one that does not import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    write_distribution(tmp_path, "slapo-engines", DIALECT)
    write_distribution(tmp_path, "an-engine", "", entry_points="")
    with use_registry(Registry()):
        yield tmp_path
    del sys.modules["slapo_engines_plugin"]


def _rows(*arguments: str) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(create_app(), ["dialects", *arguments, "--json"], catch_exceptions=False)
    return {row["name"]: row for row in json.loads(result.output)["dialects"]}


@pytest.mark.usefixtures("dialects")
def test_dialects_say_which_engine_there_is_and_why_one_is_not_usable() -> None:
    rows = _rows()
    facts = ("engine", "installed", "tested", "usable", "note")
    assert [rows["good"][key] for key in facts] == ["an-engine", "1.0", "1.0", True, ""]
    note = "an-engine-that-is-not-there is not installed; pip install an-engine-that-is-not-there==1.0"
    assert [rows["absent"][key] for key in facts] == ["an-engine-that-is-not-there", "", "1.0", False, note]
    assert [rows["plain"][key] for key in facts] == ["", "", "", True, ""]
    assert not rows["broken"]["usable"]
    assert "'broken'" in rows["broken"]["note"]
    assert "has no attribute 'Missing'" in rows["broken"]["note"]
    assert rows["good"]["limits"] == [{"asked": "flying", "instead": "walk"}]
    output = CliRunner().invoke(create_app(), ["dialects"]).output
    assert output.count("has no attribute 'Missing'") == 1
    assert f"! absent: {note}\n" in output


def test_another_version_than_the_tested_one_is_a_note(dialects: Path) -> None:
    (dialects / "an_engine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: an-engine\nVersion: 2.0\n")
    row = _rows("good")["good"]
    assert (row["usable"], row["installed"]) == (True, "2.0")
    assert row["note"] == "tested with an-engine 1.0, and 2.0 is installed"


@pytest.mark.usefixtures("dialects")
def test_one_dialect_says_what_its_engine_cannot_do() -> None:
    output = CliRunner().invoke(create_app(), ["dialects", "good"]).output
    assert "absent" not in output
    assert [line.rstrip() for line in output.splitlines()[-2:]] == ["cannot do  instead", "flying     walk"]
    assert "plain declares nothing that its engine cannot do" in CliRunner().invoke(create_app(), ["dialects", "plain"]).output
    result = CliRunner().invoke(create_app(), ["dialects", "god"])
    assert "did you mean 'good'" in str(result.exception)


def test_engines_are_among_the_versions_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions()["deepspeed"] == metadata.version("deepspeed")
    monkeypatch.setattr("slapo.run_data.versions.ENGINES", ("an-engine-that-is-not-there",))
    assert set(versions()) == {"python", "platform", *PACKAGES}


def test_no_dialect_is_an_empty_list() -> None:
    with isolated_plugins():
        result = CliRunner().invoke(create_app(), ["dialects", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output) == {"dialects": [], "problems": []}
