"""``slapo models``, and the examples on the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import slapo_tracing.plugin
import slapo_training.plugin
from slapo.cli.app import create_app
from slapo_core import Registry, use_registry
from slapo_models.apply import REGISTERED_SCHEDULES
from slapo_models.families import TESTED_FAMILIES
from tests.contracts.conftest import TOP
from tests.slapo_models.cases import CASES


def test_it_lists_what_is_installed() -> None:
    data = json.loads(CliRunner().invoke(create_app(), ["models", "--json"]).output)
    rows = data["models"]
    assert {row["name"] for row in rows} == {*CASES, "gpt", "auto"}
    assert all(
        row["distribution"] == "slapo-models" and row["version"] and row["summary"].startswith("Schedule ") for row in rows
    )
    lines = CliRunner().invoke(create_app(), ["models"]).output.splitlines()
    assert lines[0].split() == ["name", "summary", "distribution", "version"]
    assert len(lines) == 3 + len(rows) + len(data["families"])
    schedules = {row["model_type"]: row["schedule"] for row in data["families"]}
    assert schedules.keys() >= set(TESTED_FAMILIES)
    assert (schedules["llama"], schedules["gpt2"]) == ("auto", "gpt2")


def test_it_prints_published_sizes() -> None:
    printed = CliRunner().invoke(create_app(), ["models", "llama-3-8b"]).output
    assert printed.startswith("llama-3-8b: 8,030,261,248 parameters, llama, https://huggingface.co/meta-llama/")
    data = json.loads(CliRunner().invoke(create_app(), ["models", "mixtral", "--json"]).output)
    assert [size["name"] for size in data["sizes"]] == ["mixtral-8x7b", "mixtral-8x22b"]
    error = CliRunner().invoke(create_app(), ["models", "lama-3-8b"]).exception
    assert str(error).startswith("no published size 'lama-3-8b'; did you mean 'llama-3-8b'")


def test_it_says_what_did_not_load() -> None:
    import slapo_models.plugin

    registry = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_models.plugin])
    registry.records[-1].problems.append("model 'x' of y cannot be used: gone")
    with use_registry(registry):
        assert "! model 'x' of y cannot be used: gone" in CliRunner().invoke(create_app(), ["models"]).output
        data = json.loads(CliRunner().invoke(create_app(), ["models", "--json"]).output)
    assert data["problems"] == ["model 'x' of y cannot be used: gone"]


def test_listing_and_applying_import_no_model_library() -> None:
    code = (
        "import sys, torch, slapo_models, slapo_core\n"
        "from slapo_models.commands import model_rows\n"
        "assert len(model_rows(slapo_core.default_registry())) > 8\n"
        "print('transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"


def test_the_examples_on_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (TOP / "docs/guides/models.md").read_text()
    space: dict[str, Any] = {"__name__": "page"}
    try:
        for source in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(source, space)  # noqa: S102  the page is ours
    finally:
        REGISTERED_SCHEDULES.clear()
    printed = ["sch['transformer.h.1'].checkpoint()", "sch['transformer.h.3'].checkpoint()", "sch['0'].checkpoint()"]
    assert capsys.readouterr().out.splitlines() == [*printed, "sch['1'].checkpoint()"]
    assert [step.path for step in space["sch"].journal] == ["transformer.h"]
