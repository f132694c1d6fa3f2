"""A folder with a configuration and a training script in it, and the tuner run there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slapo_tune.command import main

UPDATE_SPACE = """
def update_space(args, space):
    batch_size = space.create_symbol("batch_size", [4, 8, 16])
    ckpt_ratio_cand = [1.0, 0.5]
    if batch_size >= 8:
        ckpt_ratio_cand += [0.0]
    space.create_symbol("ckpt_ratio", ckpt_ratio_cand)
    return space
"""
"""A space of 2 + 3 + 3 configurations."""

ARGUMENTS = ("--batch-size", "batch_size", "--ratio=ckpt_ratio")

READ = """
import json, os, sys, time
batch_size, ratio = int(sys.argv[2]), float(sys.argv[3].partition("=")[2])
with open("runs.txt", "a") as runs:
    runs.write(f"{batch_size} {ratio}\\n")
"""
"""How a script reads ``ARGUMENTS``; each run is a line of ``runs.txt``."""

PRINT = 'print(json.dumps({"throughput": batch_size * (2 - ratio)}))\n'


class Folder:
    """A working folder of the tuner."""

    def __init__(self, path: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.path, self.capture = path, capture
        self.out = self.err = ""

    def write(self, script: str, config: str = UPDATE_SPACE) -> None:
        """Write ``train.py``, behind what reads its arguments, and ``config.py``."""
        (self.path / "config.py").write_text(config)
        (self.path / "train.py").write_text(READ + script)

    def tune(self, *flags: str, arguments: Sequence[str] = ARGUMENTS) -> int:
        """Run the tuner in this process, and keep its output."""
        self.capture.readouterr()
        status = main(["--config", "config.py", *flags, "train.py", *arguments])
        self.out, self.err = self.capture.readouterr()
        return status

    def start(self, *flags: str, arguments: Sequence[str] = ARGUMENTS) -> subprocess.Popen[str]:
        """Start the tuner in a process of its own."""
        command = [sys.executable, "-m", "slapo.autotune.tune", "--config", "config.py", *flags, "train.py", *arguments]
        return subprocess.Popen(command, cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @property
    def runs(self) -> list[str]:
        """The values of each trial that was started."""
        file = self.path / "runs.txt"
        return file.read_text().splitlines() if file.exists() else []

    def results(self, name: str = "results.json") -> dict[str, Any]:
        """The database."""
        found: dict[str, Any] = json.loads((self.path / name).read_text())
        return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path, capsys)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Signals end programs here even where the tests run in the background, which has them ignored, as its processes would."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGQUIT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
