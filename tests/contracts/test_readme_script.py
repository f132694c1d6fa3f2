"""The training script in the README runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.multiproc
def test_the_readmes_script_trains_under_torchrun(tmp_path: Path) -> None:
    scripts = [
        code
        for code in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
        if "init_process_group" in code
    ]
    assert len(scripts) == 1
    (tmp_path / "train.py").write_text(scripts[0], encoding="utf-8")
    run = torchrun(tmp_path, "--nproc-per-node", "4", "train.py")
    assert run.returncode == 0, run.stderr
    losses = [float(line.split()[1]) for line in run.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


FAILING = """
import os
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
import slapo

@record
def main():
    sch = slapo.create_schedule(nn.Linear(4, 4))
    if os.environ["RANK"] == "1":
        sch["weigth"]

main()
"""


@pytest.mark.multiproc
def test_an_error_is_the_last_that_torchrun_says(tmp_path: Path) -> None:
    assert "`torchrun --local-ranks-filter 0`" in README.read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(FAILING, encoding="utf-8")
    run = torchrun(tmp_path, "--local-ranks-filter", "0", "--nproc-per-node", "2", "train.py")
    *_, sentence, _empty, _rule = run.stderr.splitlines()
    assert sentence.strip().startswith("slapo_core.errors.UnknownNameError: no module 'weigth'"), run.stderr
    assert run.stderr.count("no module 'weigth'") == 1
