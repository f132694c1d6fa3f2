"""One broken plugin distribution leaves the rest working, in the library and on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributions import write_distribution

BROKEN = {
    "slapo-missing": "import an_engine_that_is_not_installed",
    "slapo-misspelt": "from slapo_core import hookimpl\n@hookimpl\ndef slapo_primitve(): return {}",
    "slapo-raising": "from slapo_core import hookimpl\n@hookimpl\ndef slapo_primitives(): raise RuntimeError('no luck')",
    "slapo-commands": "from slapo_core import hookimpl\n@hookimpl\ndef slapo_commands(app): raise RuntimeError('no command')",
    "slapo-thief": "from slapo_core import hookimpl\n@hookimpl\ndef slapo_primitives(): return {'annotate': 'a:B'}",
    "slapo-markup": "raise RuntimeError('[bold]\\x1b[31mred')",
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    for name, source in BROKEN.items():
        write_distribution(tmp_path, name, source)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def run(environ: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=60)


def slapo(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(environ, "-c", "from slapo.cli.app import main; main()", *arguments)


WORKS = """
import torch, slapo_core
from slapo.cli.app import main

sch = slapo_core.create_schedule(torch.nn.Sequential(torch.nn.Linear(1, 1)))
sch["0"].freeze()
print(sch.journal, "shard" in slapo_core.list_primitives(), end="END")
main()
"""


def test_the_rest_work_and_plugins_says_why_each_did_not_load(environ: dict[str, str]) -> None:
    result = run(environ, "-c", WORKS, "plugins", "--json")
    assert result.returncode == 0, result.stderr
    journal, _, table = result.stdout.partition("END")
    assert "freeze" in journal
    assert journal.endswith("True")
    plugins = {row["distribution"]: row for row in json.loads(table)["plugins"]}
    assert {name: plugins[name]["state"] for name in BROKEN} == {
        **dict.fromkeys(BROKEN, "failed"),
        "slapo-commands": "loaded",
        "slapo-thief": "loaded",
    }
    problems = {name: " ".join(plugins[name]["problems"]) for name in BROKEN}
    assert "No module named 'an_engine_that_is_not_installed'" in problems["slapo-missing"]
    assert "did you mean 'slapo_primitives'?" in problems["slapo-misspelt"]
    assert "RuntimeError: no luck" in problems["slapo-raising"]
    assert "RuntimeError: no command" in problems["slapo-commands"]
    assert "'annotate' is provided by slapo-core 0.1.0 and slapo-thief 1.0" in problems["slapo-thief"]
    assert plugins["slapo-sharding"]["state"] == "loaded"


TABLES = """
import sys
from slapo.cli.app import main
for command in ("plugins", "primitives", "dialects"):
    sys.argv[1:] = [command]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    print("END")
"""


@pytest.mark.slow
def test_tables_show_it_and_obey_nothing_a_plugin_says(environ: dict[str, str]) -> None:
    result = run(environ, "-c", TABLES)
    assert result.returncode == 0, result.stderr
    *tables, rest = result.stdout.split("END\n")
    assert (len(tables), rest) == (3, "")
    for table in tables:
        assert "plugin 'missing' (slapo-missing 1.0) did not load" in table
        assert "[bold]" in table
    assert "\x1b" not in result.stdout + result.stderr


@pytest.mark.slow
def test_strict_is_one_sentence_and_status_2(environ: dict[str, str]) -> None:
    result = slapo({**environ, "SLAPO_STRICT_PLUGINS": "1"}, "plugins")
    assert result.returncode == 2
    assert result.stderr.startswith("slapo: plugin ")
    assert result.stderr.count("\n") == 1


def test_disabling_them_all_leaves_no_trace(environ: dict[str, str]) -> None:
    names = ",".join(name.removeprefix("slapo-") for name in BROKEN)
    result = slapo({**environ, "SLAPO_DISABLE_PLUGINS": names}, "primitives", "--json")
    assert "annotate" in {row["name"] for row in json.loads(result.stdout)["primitives"]}
