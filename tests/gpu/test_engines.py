"""The comparison of engines that is made for a GPU, run without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.engines import ENGINES, STEPS, TINY, Trained, report

TOP = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_trains_through_every_engine() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.engines", "--cpu"]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if line[:1] == "|"]
    assert table[0] == ["", *ENGINES]
    losses = [[float(cell) for cell in row[1:]] for row in table if row[0].startswith("loss")]
    assert len(losses) == STEPS
    assert all(last < first for first, last in zip(losses[0], losses[-1], strict=True))
    assert table[-1][0] == "tokens/s"


def test_an_engine_with_other_losses_is_named() -> None:
    found = {name: Trained([4.0] * STEPS, 1.0, "cpu") for name in ENGINES}
    assert "| loss of step 1 | 4.0000 | 4.0000 | 4.0000 |" in report(found, TINY)
    found["megatron"].losses[-1] = 4.1
    with pytest.raises(AssertionError, match="losses of megatron differ from those of torch by 2.5 %"):
        report(found, TINY)
