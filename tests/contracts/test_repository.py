"""The files a newcomer and a release need, and the lint of these files alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import TOP


@pytest.mark.parametrize(
    "path",
    ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "LICENSE", "Makefile", ".ci/run", "changelog.d", "constraints.txt"],
)
def test_it_is_there(path: str) -> None:
    assert (TOP / path).exists()


def test_ci_runs_lint_and_then_the_readmes_test_command() -> None:
    script = (TOP / ".ci/run").read_text()
    assert re.findall(r"^make .*$", script, re.MULTILINE) == ["make lint", "make test"]
    assert "make test" in (TOP / "README.md").read_text()


def test_torch_is_pinned() -> None:
    assert "torch==2.13.0\n" in (TOP / "constraints.txt").read_text()


def test_setup_is_one_pip_call_and_done_once() -> None:
    dry = subprocess.run(["make", "-n", "-W", "constraints.txt", "setup"], capture_output=True, text=True, timeout=60, cwd=TOP)
    assert dry.stdout.count("pip install") == 1


def test_every_changelog_entry_says_what_kind_it_is() -> None:
    names = [path.name for path in (TOP / "changelog.d").iterdir()]
    assert names
    assert [name for name in names if not re.fullmatch(r"\d+\.(feature|bugfix|removal)(\.\d+)?\.md", name)] == []


def ruff(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", "."]
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("train.py", False),
        ("runs/mine.py", False),
        ("slapo_core/src/a.py", True),
        ("plugins/a/b.py", True),
        ("slapo/a.py", True),
    ],
)
def test_a_script_of_a_user_s_is_not_linted(tmp_path: Path, path: str, refused: bool) -> None:
    shutil.copy(TOP / "pyproject.toml", tmp_path)
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("import transformers\nprint( transformers )\n")
    linted = ruff(tmp_path, "check")
    assert ("TID253" in linted.stdout, linted.returncode) == (refused, int(refused)), linted.stdout
    assert ruff(tmp_path, "format --check").returncode == int(refused)
