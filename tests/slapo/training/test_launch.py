"""Starting ranks: they meet on the loopback address, and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slapo.launch.elastic_launch import _listen, launch_ranks
from slapo.launch.errors import RankError
from slapo.run_data.settings import Settings
from tests.slapo import launched

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("launcher_state")]
SETTINGS = Settings(tp=3)


def test_all_ranks_run_and_meet(tmp_path: Path):
    launch_ranks(launched.add, replace(SETTINGS, report=str(tmp_path)))
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(3)] == ["3 1"] * 3


@pytest.mark.parametrize(
    ("work", "message", "traceback"),
    [
        (launched.fail_by_rule, r"^rank 1: shard\('h.0'\): no such thing$", ""),
        (launched.fail_by_bug, r"^rank 1: ZeroDivisionError: division by zero$", "launched.py"),
        (launched.die, r"^rank 1 was ended by SIGKILL; all ranks have ended$", ""),
    ],
    ids=["rule", "bug", "killed"],
)
def test_one_failing_rank_ends_all_with_its_message(work: Callable[[Settings], None], message: str, traceback: str):
    start = time.monotonic()
    with pytest.raises(RankError, match=message) as caught:
        launch_ranks(work, SETTINGS)
    assert traceback in caught.value.traceback
    assert bool(traceback) == bool(caught.value.traceback)
    assert time.monotonic() - start < 30, "gloo's own timeout is 30 minutes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
    ids=["ctrl-c", "terminate"],
)
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals, code: int):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.slapo.launched", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = _started(tmp_path, 2)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as the terminal does
    else:
        process.send_signal(number)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert output == f"interrupted by {number.name}; all ranks have ended\n"
    assert errors == ""
    assert not [pid for pid in pids if _alive(pid)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "stage"),
    [
        (signal.SIGINT, lambda pid: "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()),
        pytest.param(signal.SIGINT, lambda pid: len(_session(pid)) > 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGQUIT, lambda pid: len(_session(pid)) > 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, lambda pid: len(_session(pid)) > 3, marks=pytest.mark.slow),
    ],
    ids=["imports", "fork-server", "fork-server-quit", "first-rank"],
)
def test_a_signal_while_it_starts_is_one_line(number: signal.Signals, stage: Callable[[int], bool]):
    heard = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)"  # the tests may run where it is ignored, as by nohup
    command = [sys.executable, "-c", f"{heard}; from slapo.cli.app import main; main()"]
    command += "train --tp 2 --layers 1 --steps 500".split()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not stage(process.pid):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, number)  # as the terminal does
    try:
        _, errors = process.communicate(timeout=90)  # a loaded machine imports slowly
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert errors.startswith(f"slapo: interrupted by {number.name}")
    assert errors.count("\n") == 1, errors
    deadline = time.monotonic() + 10
    while _session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _session(process.pid) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_the_ranks_and_the_fork_server_end_when_the_launcher_is_killed(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-m", "tests.slapo.launched", str(tmp_path)], start_new_session=True)
    _started(tmp_path, 2)
    assert len(_session(process.pid)) > 3, "the launcher, its fork server and two ranks"
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while _session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _session(process.pid) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_rendezvous_listens_on_the_loopback_address_alone():
    _store, port = _listen()
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F:{port:04X}"]


def _started(folder: Path, number: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pids = [int(path.name[3:]) for path in folder.glob("pid*")]
        if len(pids) == number:
            return pids
        time.sleep(0.1)
    raise TimeoutError(f"{number} ranks did not start")


def _session(leader: int) -> list[int]:
    """The processes of a session that run."""
    running = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, _group, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == leader and state != "Z":
            running.append(int(stat.parent.name))
    return running


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
