"""Who may import whom."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import TOP, folders

HEAVY = ["deepspeed", "megatron", "rich", "transformers", "triton", "typer"]


def test_import_linter_contracts() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=TOP)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_distribution_is_under_the_contracts() -> None:
    (packages,) = re.findall(r"^root_packages = \[(.*?)\]", (TOP / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r'"(.+?)"', packages)) == {name.replace("-", "_") for name in folders()}


@pytest.mark.parametrize("module", ["slapo_core", "slapo_core.testing", "slapo"])
def test_importing_pulls_in_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; {module.partition('.')[0]}.list_primitives(); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(result.stdout.split())
    assert loaded.isdisjoint(HEAVY)
    if module == "slapo_core":
        assert "slapo_core.testing" not in loaded


def test_something_heavy_would_be_seen() -> None:
    """The test above could not fail if a module that is imported were not seen."""
    result = subprocess.run(
        [sys.executable, "-c", "import sys, transformers; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "transformers" in result.stdout.split()
