"""A trial: a process of its own, its output, its time limit, and the end of everything that it started."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slapo_tune import TuneError
from slapo_tune.trial import process
from slapo_tune.trial.process import Interruption, TrialOutput, check_variables, run_trial, signal_name, trial_environment

FAMILY = """
import os, subprocess, sys, time
child = "import subprocess, sys, time; subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(60)"
for session in (False, True):
    subprocess.Popen([sys.executable, "-c", child], start_new_session=session)
while len(started := [pid for pid in os.listdir("/proc") if pid.isdigit() and MARK in environment(pid)]) < 5:
    time.sleep(0.02)
print(*started, flush=True)
"""
"""A script with two children, one in a session of its own, and two grandchildren in sessions of their own."""

ENVIRONMENT = """
import os
MARK = os.environ["SLAPO_TUNE_TRIAL"]
def environment(pid):
    try:
        return open(f"/proc/{pid}/environ").read()
    except OSError:
        return ""
"""


def run(script: str, *, timeout: float | None = 30.0, interruption: Interruption | None = None, **values: Any) -> Any:
    return run_trial([sys.executable, "-c", script], values, timeout, interruption or Interruption())


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_trial_has_an_output_and_an_exit_code() -> None:
    output: TrialOutput = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (output.stdout, output.stderr, output.exit_code, output.timed_out) == ("out\n", "err\n", 3, False)
    assert output.text == "err\n"
    assert 0 < output.seconds < 30


def test_a_trial_has_a_session_of_its_own_and_no_input() -> None:
    output: TrialOutput = run("import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))")
    assert output.stdout == "True ''\n"
    assert output.text == output.stdout


def test_values_are_in_the_environment_under_three_names() -> None:
    names = "SLAPO_TUNE_BATCH_SIZE BATCH_SIZE batch_size SLAPO_TUNE_USE_KERNELS"
    output: TrialOutput = run(
        f"import os; print(*[os.environ[name] for name in {names.split()}])", batch_size=8, **{"use-kernels": True}
    )
    assert output.stdout == "8 8 8 True\n"
    assert trial_environment({}, "x").items() >= {**os.environ, "SLAPO_TUNE_TRIAL": "x"}.items()


def test_a_symbol_that_would_replace_a_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCH_SIZE", raising=False)
    check_variables({"batch_size": 8})
    with pytest.raises(TuneError, match=r"symbol\('path'\): the environment has a variable 'PATH' already"):
        check_variables({"path": 8})
    with pytest.raises(TuneError, match=r"symbol\('trial'\): the environment has a variable 'SLAPO_TUNE_TRIAL' already"):
        check_variables({"trial": 8})


@pytest.mark.parametrize("names", [("a-b", "a_b"), ("size", "SIZE")])
def test_symbols_of_one_variable_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(TuneError, match=rf"symbol\('{names[1]}'\): its variable '\w+' is that of '{names[0]}' too"):
        check_variables(dict.fromkeys(names, 8))


@pytest.mark.parametrize("value", ["a\0b", "\ud800", ["\0"]])
def test_a_value_that_no_variable_can_have_is_refused(value: object) -> None:
    check_variables({"x": "\udc80"})  # a byte of a path that is not a text
    if isinstance(value, list):
        check_variables({"x": value})  # as text it has no such letter
    else:
        with pytest.raises(TuneError, match=r"symbol\('x'\): neither arguments nor the environment of a program can hold"):
            check_variables({"x": value})


def test_the_end_of_a_long_output_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "OUTPUT_BYTES", 5)
    assert run("print('x' * 100000); print('last')").stdout == "last\n"


def test_output_that_is_no_text_does_no_harm() -> None:
    output: TrialOutput = run("import os; os.write(1, b'a\\xff\\n')")
    assert output.stdout == "a\N{REPLACEMENT CHARACTER}\n"


@pytest.mark.multiproc
def test_at_the_time_limit_everything_ends_that_the_trial_started() -> None:
    start = time.monotonic()
    output: TrialOutput = run(ENVIRONMENT + FAMILY + "time.sleep(60)", timeout=3.0)
    assert time.monotonic() - start < 15
    assert output.timed_out
    assert output.exit_code is None
    started = output.stdout.split()
    assert len(started) == 5
    assert not any(map(alive, started))


@pytest.mark.multiproc
def test_what_a_trial_leaves_behind_is_ended_before_the_next() -> None:
    output: TrialOutput = run(ENVIRONMENT + FAMILY)
    assert (output.exit_code, output.timed_out) == (0, False)
    assert len(output.stdout.split()) == 5
    assert not any(map(alive, output.stdout.split()))


@pytest.mark.multiproc
def test_a_signal_ends_the_trial_and_the_second_waits(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt() -> None:
        while not file.exists() or not file.read_text():
            time.sleep(0.02)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        thread = threading.Thread(target=interrupt)
        thread.start()
        assert run(script, interruption=interruption) is None
        thread.join()
        assert interruption.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
    assert not alive(file.read_text())


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGHUP)
        assert interruption.number is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_have_names() -> None:
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    assert signal_name(200) == "signal 200"
