"""The training script in the README runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.multiproc
def test_the_readmes_script_trains_under_torchrun(tmp_path: Path) -> None:
    scripts = [
        code
        for code in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
        if "init_process_group" in code
    ]
    assert len(scripts) == 1
    (tmp_path / "train.py").write_text(scripts[0], encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    losses = [float(line.split()[1]) for line in run.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
