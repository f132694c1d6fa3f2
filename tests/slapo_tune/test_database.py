"""The database: one file, which no crash and no other tuner damages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slapo_tune import Database, TuneError


def test_results_come_back(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    database = Database(str(file))
    database.load()
    assert database.db == {}
    assert not file.exists()
    database.commit("(batch_size: 8)", {"throughput": 1.5, "sizes": (1, 2)})
    database.commit("(batch_size: 16)", None)
    database.commit("(batch_size: 16)", {"throughput": 2})
    again = Database(file)
    again.load()
    assert again.db == database.db == {
        "(batch_size: 8)": {"throughput": 1.5, "sizes": [1, 2]},
        "(batch_size: 16)": {"throughput": 2},
    }  # fmt: skip


def test_without_a_file_results_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    database = Database()
    database.commit("a", 1)
    database.load()
    assert database.db == {"a": 1}
    assert list(tmp_path.iterdir()) == []


def test_a_commit_without_a_load_keeps_what_is_there(tmp_path: Path) -> None:
    first, second = Database(tmp_path / "results.json"), Database(tmp_path / "results.json")
    first.commit("a", 1)
    second.commit("b", 2)
    first.commit("c", 3)
    assert first.db == json.loads((tmp_path / "results.json").read_text()) == {"a": 1, "b": 2, "c": 3}


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    database = Database(tmp_path / "results.json")
    database.commit("a", {"batch_size": np.int64(8), "throughput": np.float32(0.5)})
    assert database.db["a"] == {"batch_size": 8, "throughput": 0.5}


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "results.json").symlink_to(tmp_path / "shared" / "results.json")
    Database(tmp_path / "results.json").commit("a", 1)
    assert (tmp_path / "results.json").is_symlink()
    assert json.loads((tmp_path / "shared" / "results.json").read_text()) == {"a": 1}


DAMAGED = {
    "empty": b"",
    "cut": b'{"a": {"throughput": 1',
    "garbage": b"\x00\xff\xfe",
    "list": b"[1, 2]",
    "number": b"3",
    "deep": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_an_error_and_stays(name: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(DAMAGED[name])
    database = Database(file)
    for use in (database.load, lambda: database.commit("b", 1)):
        with pytest.raises(
            TuneError, match=r"database\('.*results.json'\): the file (is damaged|holds).*; put a copy"
        ) as raised:
            use()
        assert "\n" not in str(raised.value)
    assert file.read_bytes() == DAMAGED[name]
    assert database.db == {}


@pytest.mark.parametrize(
    "data", [object(), float("nan"), float("inf"), {"a": {1, 2}}, {(1, 2): 3}], ids=["object", "nan", "inf", "set", "key"]
)
def test_data_that_json_cannot_hold_changes_nothing(data: Any, tmp_path: Path) -> None:
    database = Database(tmp_path / "results.json")
    database.commit("a", 1)
    with pytest.raises(TuneError, match=r"commit\('b'\): JSON cannot hold"):
        database.commit("b", data)
    assert database.db == json.loads((tmp_path / "results.json").read_text()) == {"a": 1}


def test_a_key_is_text() -> None:
    with pytest.raises(TuneError, match=r"commit\(8\): the key is a int; give a str"):
        Database().commit(8, {})  # type: ignore[arg-type]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    database = Database(tmp_path / "missing" / "results.json")
    with pytest.raises(TuneError, match=r"missing/results.json'\): it cannot be written: .*; choose another file"):
        database.commit("a", 1)
    assert database.db == {}
    with pytest.raises(TuneError, match="it cannot be read"):
        Database(tmp_path).load()


def run(script: str, *arguments: str) -> str:
    """Run a script, which forks, in a process without threads."""
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


KILLED = """
import os, random, signal, sys, time
from slapo_tune import Database

def write(told, number):
    database = Database(sys.argv[1])
    while True:
        number += 1
        database.commit(f"trial {number}", {"throughput": number, "output": "x" * 20_000})
        os.write(told, b"%d\\n" % number)

random.seed(0)
last = 0
for _ in range(12):
    heard, told = os.pipe()
    if (pid := os.fork()) == 0:
        write(told, last)
    os.close(told)
    time.sleep(random.uniform(0.005, 0.06))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    committed = os.fdopen(heard).read().split()
    last = int(committed[-1]) if committed else last
    database = Database(sys.argv[1])
    database.load()
    assert len(database.db) in (last, last + 1), (len(database.db), last)
    last = len(database.db)
print(last)
"""


@pytest.mark.multiproc
def test_a_writer_that_is_killed_loses_nothing_that_it_committed(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    count = int(run(KILLED, str(file)))
    assert count > 12
    assert list(json.loads(file.read_text())) == [f"trial {number}" for number in range(1, count + 1)]


CRASH = """
import os, signal, sys
from slapo_tune import Database
Database(sys.argv[1]).commit("a", 1)
for moment in ("fsync", "replace"):
    if (pid := os.fork()) == 0:
        setattr(os, moment, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
        Database(sys.argv[1]).commit("b", 2)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    Database(sys.argv[1]).commit(moment, 3)
"""


@pytest.mark.multiproc
def test_a_crash_before_the_file_is_in_place_leaves_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    run(CRASH, str(file))
    assert json.loads(file.read_text()) == {"a": 1, "fsync": 3, "replace": 3}
    assert sorted(os.listdir(tmp_path)) == ["results.json", "results.json.lock"]


TWO = """
import os, sys
from slapo_tune import Database
writers = []
for writer in range(3):
    if (pid := os.fork()) == 0:
        database = Database(sys.argv[1])
        for number in range(15):
            database.commit(f"{writer} {number}", number)
        os._exit(0)
    writers.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in writers] == [0, 0, 0]
"""


@pytest.mark.multiproc
def test_several_writers_lose_nothing_of_each_other(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    run(TWO, str(file))
    expected = {f"{writer} {number}": number for writer in range(3) for number in range(15)}
    assert json.loads(file.read_text()) == expected


def test_a_full_disk_is_an_error_and_is_not_fuller_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(tmp_path / "db.json")
    database.commit("a", 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TuneError, match="it cannot be written: .* No space left on device; choose another file"):
        database.commit("b", 2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["db.json", "db.json.lock"]
    assert database.db == {"a": 1}
