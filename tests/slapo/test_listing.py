"""The command line around ``slapo train``: what is installed, commands of plugins, and errors in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from slapo.cli.app import create_app, main
from slapo_core import ScheduleError, hookimpl
from slapo_core.testing import isolated_plugins
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
    "command", ["primitives", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plugins", "train --help"))]
)
def test_a_plugin_that_fails_is_told_of_once(command: str, tmp_path: Path) -> None:
    write_distribution(tmp_path, "slapo-broken", "raise RuntimeError('no luck')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    script = "from slapo.cli.app import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", script, *command.split()], env=environ, capture_output=True, text=True, timeout=60
    )
    assert (result.stdout + result.stderr).count("RuntimeError: no luck") == 1


@pytest.mark.multiproc
def test_a_plugin_to_disable_that_is_not_installed_is_told_of() -> None:
    environ = {**os.environ, "SLAPO_DISABLE_PLUGINS": "memmory"}
    script = "from slapo.cli.app import main; main()"
    result = subprocess.run([sys.executable, "-c", script, "plugins"], env=environ, capture_output=True, text=True, timeout=60)
    assert result.stderr.count("no plugin 'memmory'; did you mean 'memory'?") == 1


def test_primitives_are_listed_with_their_providers() -> None:
    with isolated_plugins():
        result = CliRunner().invoke(create_app(), ["primitives", "--json"])
    listed = json.loads(result.output)
    row = next(row for row in listed["primitives"] if row["name"] == "replace")
    assert row["distribution"] == "slapo-core"
    assert row["version"] == "0.1.0"
    assert row["summary"].startswith("Put a module in the place of")
    assert listed["problems"] == []


def test_a_table_shows_every_name() -> None:
    with isolated_plugins():
        output = CliRunner().invoke(create_app(), ["primitives"]).output
    assert [line.split()[0] for line in output.splitlines() if line and not line.startswith(" ")] == [
        "name",
        "annotate",
        "replace",
        "replace_all",
        "trace",
        "trace_until",
    ]


def test_plugins_shows_state_and_hooks() -> None:
    with isolated_plugins(PLUGIN):
        (core, ours) = json.loads(CliRunner().invoke(create_app(), ["plugins", "--json"]).output)["plugins"]
    assert core["state"] == ours["state"] == "loaded"
    assert "trace" in core["provides"]["primitives"]
    assert ours["provides"]["hooks"] == ["slapo_commands"]


def test_no_dialect_is_an_empty_list() -> None:
    with isolated_plugins():
        result = CliRunner().invoke(create_app(), ["dialects", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output) == {"dialects": [], "problems": []}
