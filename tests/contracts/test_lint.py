"""``make lint`` looks at the repository's own code, and not at what somebody saves beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import TOP


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
