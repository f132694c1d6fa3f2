"""Checkpoints that are damaged, that a crash broke off, and that are written while training goes on."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from slapo_core import BuildError
from slapo_testing import run_distributed
from slapo_training.checkpoint.manifest import content_of
from tests.engines import reseal

from ..counting_engine import BATCH, engine_of
from ..layouts import message_of

# ---- damage


def flip(file: Path, others: list[Path]) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path, others: list[Path]) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def remove(file: Path, others: list[Path]) -> None:
    file.unlink()


def swap(file: Path, others: list[Path]) -> None:
    """With the file of the same kind that another rank wrote."""
    (other,) = (each for each in others if each.name[:2] == file.name[:2] and each != file)
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def from_another(file: Path, others: list[Path]) -> None:
    """The same file of a checkpoint of a later step."""
    later = next(each for each in file.parents[2].glob("later/data-*"))
    file.write_bytes((later / file.name).read_bytes())


DAMAGES = [flip, cut, remove, swap, from_another]


def damaged(rank: int, folder: str) -> dict[str, tuple[str, bool]]:
    """Return the message of a load for each damage of each file, and whether the engine is unchanged."""
    engine = engine_of(tp=2)
    engine.train_batch(**BATCH)
    engine.save(f"{folder}/whole")
    engine.train_batch(**BATCH)
    torch.rand(1)  # else the random states are the same
    engine.save(f"{folder}/later")
    before = [tensor.detach().clone() for tensor in engine.module.state_dict().values()]
    state = pickle.dumps(engine.optimizer.state_dict())
    found = {}
    files = sorted(file.name for file in next(Path(folder, "whole").glob("data-*")).iterdir())
    for damage in DAMAGES:
        for name in files:
            if damage is swap and name in ("common.pt", ".metadata"):
                continue
            torn = Path(folder, "torn")
            dist.barrier()
            if rank == 0:
                shutil.rmtree(torn, ignore_errors=True)
                shutil.copytree(Path(folder, "whole"), torn)
                (data,) = torn.glob("data-*")
                damage(data / name, [*data.iterdir()])
            dist.barrier()
            message = message_of(lambda torn=torn: engine.load(torn))
            same = all(map(torch.equal, before, engine.module.state_dict().values()))
            found[f"{damage.__name__} {name}"] = message, same and pickle.dumps(engine.optimizer.state_dict()) == state
    engine.load(f"{folder}/whole")
    return found


@pytest.mark.multiproc
def test_no_damaged_file_is_read_and_all_ranks_say_the_same(tmp_path: Path) -> None:
    first, second = run_distributed(damaged, 2, str(tmp_path))
    assert first == second
    assert {name.split()[1] for name in first} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "common.pt",
        "place-0.pt",
        "place-1.pt",
    }
    said = {"flip": "has other bytes than were written", "remove": "is missing"}
    for case, (message, same) in first.items():
        damage, name = case.split()
        assert message.startswith("BuildError: the checkpoint "), case
        assert f" is damaged: '{name if damage != 'swap' else name[:2]}" in message
        assert f"'{name}' {said.get(damage, 'has ')}" in message
        assert message.endswith("; load another one")
        assert same, case


@pytest.mark.parametrize("place", range(0, 1000, 83))
def test_no_byte_of_the_manifest_is_read_that_was_not_written(place: int, tmp_path: Path) -> None:
    engine = engine_of()
    engine.save(tmp_path)
    file = tmp_path / "slapo.json"
    content = bytearray(file.read_bytes())
    content[place * len(content) // 1000] ^= 2
    file.write_bytes(content)
    try:
        same = content_of(file.read_text()) == content_of(bytes(content).decode())
    except (ValueError, KeyError, TypeError):
        with pytest.raises(BuildError):
            engine.load(tmp_path)
    else:  # a space for a tab, say
        assert same
        engine.load(tmp_path)
    engine.save(tmp_path)
    engine.load(tmp_path)


class Calls:
    """A pickle that calls something."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_what_a_file_of_the_checkpoint_would_run_is_not_run(tmp_path: Path) -> None:
    engine = engine_of()
    engine.save(tmp_path)
    (data,) = tmp_path.glob("data-*")
    for name in (".metadata", "common.pt", "place-0.pt"):
        kept = (data / name).read_bytes()
        (data / name).write_bytes(pickle.dumps(Calls(), 2))
        reseal(tmp_path)
        with pytest.raises(BuildError, match="load another one"):
            engine.load(tmp_path)
        (data / name).write_bytes(kept)
    reseal(tmp_path)
    engine.load(tmp_path)


def test_torchs_own_loader_reads_the_tensors(tmp_path: Path) -> None:
    engine = engine_of()
    engine.train_batch(**BATCH)
    engine.save(tmp_path)
    (data,) = tmp_path.glob("data-*")
    weight, state = torch.zeros(16, 8), torch.zeros(16, 8)
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load({"model.up.weight": weight, "optimizer.exp_avg.up.weight": state}, checkpoint_id=data, no_dist=True)
    assert torch.equal(weight, engine.module.up.weight)
    assert torch.equal(state, engine.optimizer.state[engine.module.up.weight]["exp_avg"])


# ---- crashes

_WRITER = """
import sys
from tests.slapo_torch.counting_engine import engine_of
engine = engine_of(width=512)
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    number += 1
    engine.module.fill(number)
    engine.steps = number
    engine.save(sys.argv[1], extra=number, wait=number % 2 == 0).wait()
    print(number, flush=True)
"""


def killed(folder: Path, number: int, seconds: float) -> int:
    """Save in a loop from a number on, until killed; the last number that was saved to its end."""
    command = [sys.executable, "-c", _WRITER, str(folder), str(number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        numbers = process.stdout.read().split()
    assert process.returncode == -signal.SIGKILL
    return int(numbers[-1]) if numbers else number


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    seed = int(os.environ.get("SLAPO_TEST_SEED", time.time_ns() % 10**6))
    print(f"SLAPO_TEST_SEED={seed}")
    moments, folder, engine, broken_off = random.Random(seed), tmp_path / "checkpoint", engine_of(width=512), 0
    engine.save(folder, extra=0)
    number = 0
    for _ in range(24):
        last = killed(folder, number, moments.uniform(0.0, 0.25))
        broken_off += len([*folder.glob("data-*")]) > 1
        number = engine.load(folder)
        assert number in (last, last + 1)
        if number:
            assert engine.module.numbers() == {float(number)}
            assert engine.steps == number
    assert broken_off >= 3  # else the moments are none within a save
    engine.save(folder, extra=number)
    (data,) = folder.glob("data-*")
    assert sorted(file.name for file in folder.iterdir()) == sorted([data.name, "slapo.json", "slapo.lock"])


_RANK = """
import os, sys, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
from tests.slapo_torch.counting_engine import engine_of
engine = engine_of(width=512, tp=2)
dist.barrier()
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    number += 1
    engine.module.fill(number)
    engine.save(sys.argv[1], extra=number, wait=number % 2 == 0).wait()
    print(number, flush=True)
"""


def one_killed(folder: Path, number: int, seconds: float, victim: int) -> int:
    """The same on two ranks of which one is killed; the other must end by itself."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    command, root = [sys.executable, "-c", _RANK, str(folder), str(number)], Path(__file__).parents[3]
    with ExitStack() as stack:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": root}
        ranks = [
            stack.enter_context(subprocess.Popen(command, env={**common, "RANK": str(rank)}, **pipes)) for rank in range(2)
        ]
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        time.sleep(seconds)
        ranks[victim].send_signal(signal.SIGKILL)
        told = [rank.communicate(timeout=100) for rank in ranks]
    assert ranks[1 - victim].returncode == 1, told[1 - victim]
    return max([number, *(int(line) for out, _ in told for line in out.split())])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rank_that_is_killed_leaves_a_whole_checkpoint_and_ends_the_others(tmp_path: Path) -> None:
    """It is read by one process then."""
    seed = int(os.environ.get("SLAPO_TEST_SEED", time.time_ns() % 10**6))
    print(f"SLAPO_TEST_SEED={seed}")
    moments, folder, engine, number = random.Random(seed), tmp_path / "checkpoint", engine_of(width=512), 0
    engine.save(folder, extra=0)
    for _ in range(8):
        last = one_killed(folder, number, moments.uniform(0.0, 0.4), moments.randrange(2))
        number = engine.load(folder)
        assert number in (last, last + 1)
        assert not number or engine.module.numbers() == {float(number)}


# ---- in the background


def behind(rank: int, folder: str, tp: int) -> list[Any]:
    """Return the state saved during a step, and the buffers of its copies."""
    engine = engine_of(tp=tp)
    if tp > 1 and rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # the group of a save is found by ranks that have others besides
    engine.train_batch(**BATCH)
    expected = [tensor.detach().clone() for tensor in engine.module.state_dict().values()]
    state = [value["exp_avg"].clone() for value in engine.optimizer.state.values()]
    saving = engine.save(folder, wait=False)
    engine.train_batch(**BATCH)
    engine.module.down.weight.data.fill_(7)
    saving.wait()
    assert saving.done()
    losses = [engine.train_batch(**BATCH).item() for _ in range(2)]
    engine.save(f"{folder}/second", wait=False)
    engine.save(f"{folder}/third", wait=False)  # waits for the second
    done = Path(folder, "second", "slapo.json").exists()
    engine.close()
    done = done and Path(folder, "third", "slapo.json").exists()
    other = engine_of(tp=tp)
    other.load(folder)
    same = all(map(torch.equal, expected, other.module.state_dict().values()))
    same = same and all(map(torch.equal, state, (value["exp_avg"] for value in other.optimizer.state.values())))
    return [same, done, other.steps, len(losses)]


@pytest.mark.multiproc
@pytest.mark.parametrize("tp", [1, 2])
def test_a_save_in_the_background_has_what_was_there_when_it_was_asked_for(tp: int, tmp_path: Path) -> None:
    assert run_distributed(behind, tp, str(tmp_path), tp) == [[True, True, 1, 2]] * tp


def in_vain(rank: int, folder: str) -> list[Any]:
    """Return the errors of background saves to a folder that became a file, their times, and the result of a later save."""
    engine = engine_of(tp=2)
    engine.save(f"{folder}/kept", extra=1)
    messages = []
    for ask in ("wait", "save", "load", "close"):
        blocked = Path(folder, ask)
        engine.save(blocked / "within", wait=False).wait()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(blocked)
            blocked.write_text("")
        dist.barrier()
        saving = engine.save(blocked / "within", wait=False)
        actions = {
            "wait": saving.wait,
            "save": lambda: engine.save(f"{folder}/kept", extra=2),
            "load": lambda: engine.load(f"{folder}/kept"),
            "close": engine.close,
        }
        messages += [message_of(actions[ask]), message_of(actions[ask])]
    return [*messages, engine.load(f"{folder}/kept")]


@pytest.mark.multiproc
def test_a_save_in_the_background_that_fails_is_told_once_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_distributed(in_vain, 2, str(tmp_path))
    for found in (first, second):
        *messages, extra = found
        assert extra == 2
        for said, again in zip(messages[::2], messages[1::2], strict=True):
            assert "Not a directory" in said or "File exists" in said
            assert again == "no error"
    assert all("rank 0 failed: the checkpoint " in said for said in second[:-1:2])


def other_extra(rank: int, folder: str) -> list[str]:
    engine = engine_of(tp=2)
    return [
        message_of(lambda: engine.save(folder, extra={"next": rank})),
        message_of(lambda: engine.save(folder, extra={"loader": engine_of})),
    ]


@pytest.mark.multiproc
def test_extra_is_plain_and_the_same_on_all_ranks(tmp_path: Path) -> None:
    for different, odd in run_distributed(other_extra, 2, str(tmp_path / "none")):
        assert different == "BuildError: the ranks save different extra; give all of them the same, as it is kept once"
        assert "extra, 'loader' has a builtins.function; only numbers" in odd
    assert not (tmp_path / "none").exists()
