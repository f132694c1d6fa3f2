"""The files a newcomer and a release need."""

from __future__ import annotations

import re
import subprocess

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
