"""The worker pool: what comes back, and that nothing hangs or stays behind when a rank goes wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slapo_core import is_random_seed_set, set_random_seed
from slapo_testing import MAX_WORKERS, DistributedError, preload, run_distributed, shutdown_workers
from slapo_testing.workers import pool


@pytest.fixture(autouse=True, scope="module")
def workers_of_its_own() -> Iterator[None]:
    """Those of the other tests have imported models, for seconds: they outlive the ones that are ended here."""
    others, pool._pool = pool._pool, pool._Pool()
    yield
    shutdown_workers()
    pool._pool = others


class Named:
    """A class that only this module has."""

    def __init__(self, value: int) -> None:
        self.value = value


def sum_of_ranks(rank: int, scale: int) -> torch.Tensor:
    total = torch.full((2,), float(rank + 1) * scale)
    dist.all_reduce(total)
    return total


def world(rank: int) -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


def returns_everything(rank: int, given: Named) -> dict[str, object]:
    weight = torch.nn.Parameter(torch.ones(2))
    return {"named": Named(given.value + rank), "grad": [weight * 2], "pid": os.getpid()}


def fails(rank: int, which: int) -> None:
    if rank == which:
        raise ValueError(f"no good on {rank}")
    dist.barrier()


def fails_beside_a_sleeper(rank: int) -> None:
    if rank == 1:
        raise ValueError("no good")
    time.sleep(600)


def dies(rank: int, how: str) -> None:
    if rank == 1 and how == "exit":
        os._exit(7)
    if rank == 1:
        import ctypes

        ctypes.string_at(0)
    dist.barrier()


def returns_a_lambda(rank: int) -> object:
    return lambda: rank


def never_ends(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def leaves_a_mess(rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    set_random_seed(5, tp_rank=rank)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")


left: list[weakref.ref[Named]] = []


def leaves_garbage(rank: int) -> bool:
    """Return True if the garbage of the last call was collected, and leave new garbage."""
    gone = all(ref() is None for ref in left)
    circle = Named(0)
    circle.value = circle  # type: ignore[assignment]
    left.append(weakref.ref(circle))
    return gone


def looks_around(rank: int) -> tuple[object, ...]:
    clean = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), is_random_seed_set()
    return (
        *clean,
        os.environ.get("LEFT_BEHIND"),
        os.getcwd(),
        os.environ.get("FROM_TEST"),
        torch.rand(1).item(),
        random.random(),
    )


def one_is_done_early(rank: int) -> float:
    value = torch.full((1,), float(rank))
    if rank == 1:
        dist.send(value, 0)
        return 1.0
    time.sleep(0.3)
    dist.recv(value, 1)
    return value.item()


def reduces_over_the_default(rank: int) -> float:
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(torch.ones(1)).item()


def groups(rank: int) -> list[float]:
    pair = dist.new_group([0, 1])
    value = torch.ones(1)
    dist.all_reduce(value, group=pair)
    return value.tolist()


def test_ranks_form_a_process_group() -> None:
    assert [result.tolist() for result in run_distributed(sum_of_ranks, 2, 10)] == [[30.0, 30.0]] * 2


@pytest.mark.parametrize("world_size", [1, 3, 2])
def test_each_call_has_its_own_world_size(world_size: int) -> None:
    assert run_distributed(world, world_size) == [(rank, world_size, 1) for rank in range(world_size)]


def test_subgroups_are_fresh_in_each_call() -> None:
    for _ in range(3):
        assert run_distributed(groups, 2) == [[2.0]] * 2


def test_a_rank_that_is_done_waits_for_the_others() -> None:
    assert run_distributed(one_is_done_early, 2) == [1.0, 1.0]


def test_results_carry_classes_of_the_test_and_detached_tensors() -> None:
    results = run_distributed(returns_everything, 2, Named(40))
    assert [result["named"].value for result in results] == [40, 41]
    assert all(isinstance(result["named"], Named) and not result["grad"][0].requires_grad for result in results)


def test_workers_are_reused() -> None:
    pids = [{result["pid"] for result in run_distributed(returns_everything, 2, Named(0))} for _ in range(2)]
    assert pids[0] == pids[1]


def test_a_group_that_torch_took_as_default_is_none_of_an_earlier_job() -> None:
    shutdown_workers()
    assert run_distributed(reduces_over_the_default, 2) == [2.0, 2.0]
    with pytest.raises(DistributedError):
        run_distributed(dies, 2, "exit")  # rank 0 still has the group it met the old rank 1 in
    assert run_distributed(reduces_over_the_default, 2) == [2.0, 2.0]


def test_a_job_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_TEST", "yes")
    run_distributed(leaves_a_mess, 2)
    first, second = run_distributed(looks_around, 2)
    assert first[:7] == (torch.float32, True, 1, False, None, os.getcwd(), "yes")
    assert first == second


def test_garbage_of_a_job_is_gone_in_the_next() -> None:
    assert [run_distributed(leaves_garbage, 2) for _ in range(3)] == [[True] * 2] * 3


def test_the_first_rank_that_fails_is_named() -> None:
    with pytest.raises(DistributedError, match="rank 1 of 2: ValueError: no good on 1") as caught:
        run_distributed(fails, 2, 1)
    assert caught.value.rank == 1
    assert "test_pool.py" in caught.value.traceback
    assert "worker_process.py" not in caught.value.traceback


def test_the_other_ranks_are_interrupted() -> None:
    start = time.monotonic()
    with pytest.raises(DistributedError, match="rank 1 of 2: ValueError"):
        run_distributed(fails_beside_a_sleeper, 2)
    assert time.monotonic() - start < 30
    assert len(run_distributed(world, 2)) == 2


@pytest.mark.parametrize(("how", "what"), [("exit", "exited with code 7"), ("segfault", "killed by SIGSEGV")])
def test_a_dead_rank_is_reported_and_replaced(how: str, what: str) -> None:
    with pytest.raises(DistributedError, match=f"rank 1 of 2: its process (was )?{what}") as caught:
        run_distributed(dies, 2, how)
    assert how == "exit" or "string_at" in caught.value.traceback
    assert len(run_distributed(world, 2)) == 2


def test_a_stuck_rank_is_named_with_its_stack() -> None:
    with pytest.raises(DistributedError, match="rank 1 of 2 still running after 2 s") as caught:
        run_distributed(never_ends, 2, timeout=2)
    assert "never_ends" in caught.value.traceback


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(DistributedError, match=r"rank \d of 2: .*lambda"):
        run_distributed(returns_a_lambda, 2)


def test_a_local_function_is_refused() -> None:
    with pytest.raises(TypeError, match="not a function at module level"):
        run_distributed(lambda rank: rank, 2)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=f"the pool has 1 to {MAX_WORKERS} workers"):
        run_distributed(world, MAX_WORKERS + 1)


def test_workers_can_be_shut_down_and_come_back() -> None:
    before = run_distributed(returns_everything, 1, Named(0))[0]["pid"]
    shutdown_workers()
    assert not _alive(before)
    assert run_distributed(returns_everything, 1, Named(0))[0]["pid"] != before


def imported(rank: int) -> bool:
    return "wave" in sys.modules


def test_workers_have_what_was_imported_for_all_and_come_from_a_new_server_when_one_has_died() -> None:
    assert run_distributed(imported, 2) == [False, False]
    shutdown_workers()
    try:
        preload("wave", "no_such_module.at_all")
        assert run_distributed(imported, 2) == [True, True]
        assert pool._pool.server is not None
        os.kill(pool._pool.server.pid, signal.SIGKILL)
        assert run_distributed(imported, 2) == [True, True]
        with pytest.raises(DistributedError, match="rank 1 of 2: its process exited with code 7"):
            run_distributed(dies, 2, "exit")
    finally:
        preload()
        shutdown_workers()


SCRIPT = """
import os, time
from slapo_testing import run_distributed

def pid(rank, stay):
    os.write(1, f"{os.getpid()}\\n".encode())  # one write: two ranks share the pipe
    time.sleep(stay)
    return os.getpid()

if __name__ == "__main__":
    run_distributed(pid, 2, STAY)
"""


@pytest.mark.parametrize("end", [*(pytest.param(end, marks=pytest.mark.slow) for end in ("exit", "SIGINT")), "SIGKILL"])
def test_no_process_outlives_the_script(tmp_path: Path, end: str) -> None:
    """However the script ends, also in the middle of a job; no pytest involved."""
    script = tmp_path / "javascript.py"
    script.write_text(SCRIPT.replace("STAY", "0" if end == "exit" else "600"))
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            pids = [int(process.stdout.readline()) for _ in range(2)]
            if end == "SIGINT":
                process.send_signal(2)
            elif end == "SIGKILL":
                process.kill()
            assert (process.wait(30) == 0) == (end == "exit")
            limit = time.monotonic() + 10
            while any(map(_alive, pids)) and time.monotonic() < limit:
                time.sleep(0.05)
            assert not any(map(_alive, pids))
        finally:
            process.kill()


def _alive(pid: int) -> bool:
    """Return True if the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
