"""Rank functions of the tests of background saves, for the engines of all targets, and processes that the tests kill."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import build, set_random_seed
from slapo_training.checkpoint import SaveHandle
from tests.engine_models import batches, halved, my_part, small, two_groups
from tests.engines import scheduled
from tests.slapo_torch.layouts import mesh_of, message_of

Layout = dict[str, int]


def engine_of(target: str, layout: Layout, chunks: int = 1, **options: Any) -> tuple[Any, Any]:
    """A GPT-2 with dropout, two groups and a falling rate on a mesh, and the mesh."""
    mesh, model = mesh_of(**layout), small("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    set_random_seed(7, dp_rank=mesh["dp"].get_local_rank(), tp_rank=mesh["tp"].get_local_rank())
    schedule = scheduled(model, mesh, my_part(batches(2)[0], mesh), chunks)
    given = {"optimizer": two_groups, "lr_scheduler": halved, "microbatches": 2, **options}
    return build(schedule, target, **given), mesh


def losses(engine: Any, mesh: Any, steps: range) -> list[float]:
    return [engine.train_batch(**my_part(batches(2)[step], mesh)).item() for step in steps]


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Threads that write a checkpoint begin when the event is set."""
    gate, run = threading.Event(), SaveHandle._run

    def late(self: SaveHandle) -> None:
        gate.wait(60)
        run(self)

    SaveHandle._run = late
    try:
        yield gate
    finally:
        gate.set()
        SaveHandle._run = run


def went_on(rank: int, target: str, layout: Layout, chunks: int, options: dict[str, Any], folder: str) -> list[Any]:
    """Losses behind saves in the background, and those of an engine that loads them; what else came back.

    Nothing of the first is written before two more steps are done; the second is written while they go on; and the third as the
    engine is closed.
    """
    engine, mesh = engine_of(target, layout, chunks, **options)
    losses(engine, mesh, range(1))
    with held_back() as gate:
        first = engine.save(f"{folder}/first", extra={"next": 1}, wait=False)
        expected = losses(engine, mesh, range(1, 3))
        is_early = first.done() or Path(folder, "first", "slapo.json").exists()
        gate.set()
        first.wait()
    second = engine.save(f"{folder}/second", extra={"next": 3}, wait=False)
    later = losses(engine, mesh, range(3, 5))
    second.wait()
    third = engine.save(f"{folder}/third", extra={"next": 5}, wait=False)
    engine.close()
    found, extras = [], []
    engine, mesh = engine_of(target, layout, chunks, **options)
    for name, step in (("first", 1), ("second", 3), ("third", 5)):
        extras.append((engine.load(f"{folder}/{name}"), engine.steps))
        found.append(losses(engine, mesh, range(step, min(step + 2, 5))))
    engine.close()
    return [found, [expected, later, []], extras, is_early, third.done()]


def check_gone_on(found: list[Any]) -> None:
    """Check the result of ``went_on``."""
    losses, expected, extras, is_early, is_done = found
    assert losses == expected
    assert extras == [({"next": 1}, 1), ({"next": 3}, 3), ({"next": 5}, 5)]
    assert is_done
    assert not is_early


def in_vain(rank: int, target: str, layout: Layout, options: dict[str, Any], folder: str) -> list[Any]:
    """Messages of saves that fail: one for which only some ranks wait, and several that the second rank cannot write.

    Each failed write is reported twice: by its ``wait``, by another save, by a save after only the first rank has waited, by
    a load, and by ``close``. The last entry says which checkpoint is left.
    """
    engine, mesh = engine_of(target, layout, **options)
    losses(engine, mesh, range(1))
    engine.save(folder, extra="kept")
    messages = [message_of(lambda: engine.save(folder, wait=rank == 0)), "no error"]
    for ask in ("wait", "save", "alone", "load", "close"):
        with held_back() as gate:
            saving = engine.save(folder, extra="lost", wait=False)
            kept, torch.save = torch.save, fail if rank == 1 else torch.save
            gate.set()
            while not saving.done():
                time.sleep(0.01)
            torch.save = kept
        actions = {
            "wait": saving.wait,
            "save": lambda: engine.save(f"{folder}/other", wait=False),
            "alone": lambda: engine.save(f"{folder}/other"),
            "load": lambda: engine.load(folder),
            "close": engine.close,
        }
        if ask == "alone" and rank == 0:
            assert "No space left on device" in message_of(saving.wait)
        messages += [message_of(actions[ask]), message_of(actions[ask])]
    engine, mesh = engine_of(target, layout, **options)
    found = engine.load(folder), engine.steps, len([*Path(folder).glob("data-*")])
    engine.close()
    return [messages, found]


def fail(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def check_in_vain(first: list[Any], second: list[Any]) -> None:
    """Check the result of ``in_vain``."""
    for messages, found in (first, second):
        assert found == ("kept", 1, 1)
        assert messages[1::2] == ["no error"] * 6
        assert "some ranks save with wait=True and others with wait=False" in messages[0]
    for other, own in zip(first[0][2::2], second[0][2::2], strict=True):
        assert "No space left on device" in own
        assert f"rank 1 failed: {own.removeprefix('BuildError: ')}" in other


def trains_and_saves(target: str, folder: str, layout: Layout, options: dict[str, Any]) -> None:
    """Go on from the checkpoint that is there, save each step in the background of the next, and say what is done."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    engine, mesh = engine_of(target, layout, **options)
    if Path(folder, "slapo.json").exists():
        assert engine.load(folder) == engine.steps
    print("loaded", engine.steps, flush=True)
    while True:
        saving = engine.save(folder, extra=engine.steps, wait=False)
        steps = engine.steps
        print("loss", *losses(engine, mesh, range(steps % 5, steps % 5 + 1)), flush=True)
        saving.wait()
        print("saved", steps, flush=True)


def killed(target: str, folder: Path, layout: Layout, options: dict[str, Any], seconds: float, victim: int) -> list[list[str]]:
    """Output of ``trains_and_saves`` on each rank; one rank is killed ``seconds`` after the first save, and the others fail."""
    arguments = ", ".join(map(repr, (target, str(folder), layout, options)))
    call = f"from tests.background_saves import trains_and_saves; trains_and_saves({arguments})"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    size = prod(layout.values())
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with ExitStack() as stack:
        ranks, said = [], []
        for rank in range(size):
            given: dict[str, Any] = {
                "env": {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                "cwd": Path(__file__).parents[1],
            }
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE if size > 1 else None, "text": True}
            ranks.append(stack.enter_context(subprocess.Popen([sys.executable, "-c", call], **pipes, **given)))
        for rank in ranks:
            said.append([""])
            while not said[-1][-1].startswith("saved"):
                said[-1].append(rank.stdout.readline())
                assert said[-1][-1], "it has ended by itself"
        time.sleep(seconds)
        ranks[victim].kill()
        ends = [rank.communicate(timeout=100) for rank in ranks]
    for rank, (_, errors) in zip(ranks, ends, strict=True):
        assert rank.returncode == (-signal.SIGKILL if rank is ranks[victim] else 1), errors
    lines = [[*before, *out.splitlines()] for before, (out, _) in zip(said, ends, strict=True)]
    return [[line for line in each if line.startswith(("loaded", "loss", "saved"))] for each in lines]


def check_killed(
    target: str, folder: Path, layout: Layout, options: dict[str, Any], moments: random.Random, times: int
) -> None:
    """Kill a rank of what trains and saves at random moments: the next go on from the last checkpoint, or one just written."""
    known: dict[int, str] = {}
    done, broken_off = 0, 0
    for _ in range(times):
        victim = moments.randrange(prod(layout.values()))
        everyone = killed(target, folder, layout, options, moments.uniform(0.0, 0.8), victim)
        begun = done
        for lines in everyone:
            assert int(lines[0].split()[1]) in (begun, begun + 1)
            step = int(lines[0].split()[1])
            for word, value in map(str.split, lines[1:]):
                if word == "saved":
                    done = max(done, int(value))
                else:
                    assert known.setdefault(step, value) == value
                    step += 1
        broken_off += len([*folder.glob("data-*")]) > 1
    print(f"{broken_off} of {times} within a save, {done} steps")
    assert broken_off or layout  # the moments are within saves, of which ranks that live remove what they wrote
