"""How jobs end: a rank that raises or is killed takes the job down with its message, and one that trained right ends well."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from ..failing import MESSAGE

pytestmark = pytest.mark.multiproc

TOP = Path(__file__).resolve().parents[3]
TARGETS = ("deepspeed", pytest.param("megatron", marks=pytest.mark.slow))
MESSAGES = {"raises": f"ValueError: {MESSAGE}", "killed": "SIGKILL"}
LIMIT = 30
"""Seconds that a job may take to end; gloo's own timeout is 30 minutes."""


def running(session: int) -> list[int]:
    """Its processes."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _parent, _group, own = stat.read_text().rpartition(")")[2].split()[:4]
            if int(own) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def job(*command: str) -> tuple[int, str, float]:
    """Status and output of a job that a rank ends, and how many seconds later it ended; no process of it is left."""
    environment = {**os.environ, "PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=100)
            ended = time.time()
            while running(process.pid) and time.time() < ended + 10:
                time.sleep(0.1)
            assert running(process.pid) == []
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    *_, began = re.findall(r"ending at ([\d.]+)", output)  # a run of the first step's checks may end first
    return process.returncode, output, ended - float(began)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("axis", "end", "rank"),
    [
        ("pp", "raises", 1),
        pytest.param("dp", "killed", 1, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("pp", "killed", 1), ("dp", "raises", 1), ("pp", "raises", 0), ("pp", "killed", 0)]
        ),
    ],
)
def test_a_rank_that_ends_takes_the_job_down_with_its_message(target: str, axis: str, end: str, rank: int) -> None:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    status, output, seconds = job(*ranks, "-m", "tests.slapo.failing", target, axis, end, str(rank))
    assert status != 0
    assert seconds < LIMIT
    assert MESSAGES[end] in output
    assert len(re.findall(r"rank [01] took step 0", output)) == 2, output
    assert "took step 1" not in output


SCHEDULE = f"""
import os, signal, time
import torch

calls = 0

def fail(module, args):
    global calls
    calls += type(args[0]) is torch.Tensor and module.training and os.environ.get("RANK") == "1"
    if calls > 2:
        print(f"ending at {{time.time()}}", flush=True)
        if os.environ["ENDS"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError({MESSAGE!r})

def schedule(sch):
    sch["transformer.h.1.mlp"].mod.register_forward_pre_hook(fail)
    if sch.mesh["pp"].size() > 1:
        sch["transformer.h.0"].cut_pipeline_stage()
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("axis", "end"), [("pp", "raises"), ("pp", "killed"), ("dp", "raises"), ("dp", "killed")])
def test_the_command_line_says_which_rank_it_was(
    target: str, axis: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text(SCHEDULE)
    monkeypatch.setenv("ENDS", end)
    flags = f"train --target {target} --{axis} 2 --layers 2 --hidden 16 --seq 16 --microbatches 2 --batch 8 --steps 4".split()
    status, output, seconds = job("-m", "slapo", *flags, "--schedule", str(tmp_path / "failing.py"))
    assert status != 0
    assert seconds < LIMIT
    expected = "slapo: rank 1: ValueError: no such luck" if end == "raises" else "slapo: rank 1 was ended by SIGKILL"
    assert expected in output, output


ENDINGS = {"": 0, "close": 0, "destroy": 0, "close destroy": 0, "destroy close": 0, "keep destroy": 0, "cycle": 0, "save": 0}
ENDINGS |= {"exit": 3, "raise": 1, "keep raise_on_one": 1}
"""How the script ends, and the status of the second rank then."""


def endings(axis: str, end: str, folder: Path) -> tuple[list[int], str]:
    """The statuses of both ranks of a job without a launcher, and what they wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    paths = {"PYTHONPATH": os.pathsep.join([str(TOP), *sys.path]), "CHECKPOINT": str(folder / "checkpoint")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.slapo.ending", axis, *end.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **world, **paths, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        written = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], "\n".join(written)


@pytest.mark.parametrize(
    ("axis", "end", "times"),
    [
        ("pp", "cycle", 1),
        pytest.param("fsdp", "close", 1, marks=pytest.mark.slow),
        *(pytest.param(axis, end, 7, marks=pytest.mark.slow) for axis, end in product(("pp", "dp", "fsdp"), ENDINGS)),
    ],
)
@pytest.mark.timeout(900)
def test_a_job_that_trained_right_never_aborts(axis: str, end: str, times: int, tmp_path: Path) -> None:
    """233 jobs with the slow ones; without the wait for gloo's threads those abort that do not destroy their groups."""
    for time_ in range(times):
        statuses, output = endings(axis, end, tmp_path / str(time_))
        assert output.count("trained") == 2, output
        assert "terminate called" not in output
        assert statuses[1] == ENDINGS[end], output
        assert statuses[0] in (ENDINGS[end], 0), output
