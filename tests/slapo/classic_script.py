"""A classic script of ``examples/``: its page's commands, and its functions."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[2]
_LOSS = re.compile(r"step \d+: loss (\d+\.\d+), unmodified \d+\.\d+")
_FURTHEST = re.compile(r"largest difference: (\S+)")


class Classic:
    """A folder of ``examples/`` with ``README.md`` and ``train.py``.

    Args:
        name: Of the folder.
    """

    def __init__(self, name: str) -> None:
        self.folder = TOP / "examples" / name
        self.page = (self.folder / "README.md").read_text(encoding="utf-8")
        self.code = (self.folder / "train.py").read_text(encoding="utf-8")
        (console,) = re.findall(r"```console\n(.*?)```", self.page, re.DOTALL)
        change, *lines = console.splitlines()
        assert change == f"$ cd examples/{name}"
        self.commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        self.shown = [line for line in lines if not line.startswith(("$ ", "...", "step ", "largest "))]

    def functions(self) -> dict[str, Any]:
        """The script's names; it is not run."""
        return runpy.run_path(str(self.folder / "train.py"))

    def snippets(self) -> list[str]:
        """Return the parts of the script that the page shows."""
        return re.findall(r"```py\n(.*?)```", self.page, re.DOTALL)

    def run(self, command: str) -> None:
        """Run a command of the page as it stands; it says what the page shows, and trains as the unmodified model."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        run = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert run.returncode == 0, run.stderr
        printed = run.stdout.splitlines()
        assert [line for line in self.shown if line not in printed] == []
        losses = [float(found[1]) for line in printed if (found := _LOSS.fullmatch(line))]
        assert len(losses) == 5
        assert losses[-1] < losses[0] - 0.1
        (furthest,) = (float(found[1]) for line in printed if (found := _FURTHEST.fullmatch(line)))
        assert furthest < 1e-5
