"""Ranks that are threads: they find what ranks that are processes find, and nothing of torch's that they need has moved."""

from __future__ import annotations

import copy
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import SlapoError, VerifyError, create_schedule, get_cuda_rng_tracker, set_random_seed
from slapo_testing import run_distributed
from slapo_verify import Report, run_as_threads, verify
from tests.engine_models import batches, small
from tests.slapo_verify.test_faults_on_two_ranks import FAULTS, planted

pytestmark = pytest.mark.multiproc


def rounded(report: Report) -> Report:
    """Without the numbers, which depend on the order in which ranks are summed."""
    exact = [replace(each, message=each.what, absolute=None, relative=None) for each in report.differences]
    return replace(report, differences=tuple(exact), largest=None)


QUICK = ("no sum of the output",)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fault", [None, *(pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in FAULTS)]
)
def test_threads_find_what_processes_find(fault: str | None) -> None:
    def work() -> Report:
        torch.manual_seed(0)  # as every process of the tests begins
        return planted(dist.get_rank(), fault)

    one, other = run_as_threads(work, 2)
    assert one == other
    assert one.ok == (fault is None)
    assert rounded(one) == rounded(run_distributed(planted, 2, fault)[0])


def on_a_mesh(rank: int, name: str, options: dict[str, Any]) -> Report:
    mesh = init_device_mesh("cpu", (1, 1, dist.get_world_size()), mesh_dim_names=("pp", "dp", "tp"))
    set_random_seed(0, tp_rank=rank)
    reference = small(name)
    sch: Any = create_schedule(copy.deepcopy(reference), mesh=mesh, example_inputs=batches(1)[0])
    sch.tensor_parallel(**options)
    return verify(reference, sch, level="step")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        pytest.param("gpt2", {"sequence_parallel": True}, marks=pytest.mark.slow),
        ("llama", {}),
        pytest.param("t5", {}, marks=pytest.mark.slow),
    ],
)
def test_real_models_with_a_mesh(name: str, options: dict[str, Any]) -> None:
    one, other = run_as_threads(lambda: on_a_mesh(dist.get_rank(), name, options), 2)
    assert one.check() == other
    assert rounded(one) == rounded(run_distributed(on_a_mesh, 2, name, options)[0])


def test_each_rank_has_a_random_state_of_its_own() -> None:
    def work() -> tuple[list[float], list[float]]:
        set_random_seed(0, tp_rank=dist.get_rank())
        whole, sharded = [], []
        for _ in range(20):
            whole.append(torch.rand(()).item())
            with get_cuda_rng_tracker().fork():
                sharded.append(torch.rand(()).item())
                dist.all_reduce(torch.ones(()))
                sharded.append(torch.rand(()).item())
        return whole, sharded

    before = torch.get_rng_state()
    (one, own), (other, others) = run_as_threads(work, 2)
    assert one == other
    assert not {*own} & {*others}
    assert torch.equal(before, torch.get_rng_state())
    assert not dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_collectives_meet(world_size: int) -> None:
    def work() -> Any:
        rank, world = dist.get_rank(), dist.get_world_size()
        time.sleep(random.random() / 50)
        total = torch.tensor([rank])
        dist.all_reduce(total)
        parts: list[Any] = [None] * world
        dist.all_gather_object(parts, {"rank": rank})
        largest, scattered = torch.tensor([float(rank)]), torch.empty(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.reduce_scatter(scattered, [torch.ones(1)] * world)
        waited = dist.all_reduce(torch.ones(()), async_op=True)
        assert waited is not None
        waited.wait()
        pair = dist.new_group(list(range(world)))
        dist.broadcast(largest, 0, group=pair)
        return total.item(), [part["rank"] for part in parts], largest.item(), scattered.item()

    ranks = [*range(world_size)]
    assert run_as_threads(work, world_size) == [(sum(ranks), ranks, world_size - 1.0, float(world_size))] * world_size


def test_the_error_of_one_rank_ends_all() -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("of rank 1")
        dist.all_reduce(torch.ones(()))

    with pytest.raises(ZeroDivisionError, match="of rank 1"):
        run_as_threads(work, 3)
    assert run_as_threads(dist.get_rank, 2) == [0, 1]


def test_ranks_that_never_meet_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slapo_verify.ranks.thread_ranks._DEADLOCK_SECONDS", 0.2)

    def work() -> None:
        if dist.get_rank():
            dist.all_reduce(torch.ones(()))

    with pytest.raises(VerifyError, match="wait for each other in different collectives"):
        run_as_threads(work, 2)


def inside(rank: int) -> str:
    try:
        run_as_threads(dist.get_rank, 2)
    except VerifyError as err:
        return str(err)
    return ""


def test_a_rank_has_no_threads_that_are_ranks() -> None:
    assert run_distributed(inside, 2) == ["there is a process group in this process already; ranks cannot be threads of it"] * 2


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop, self.down, self.rate = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8), 0.5
        self.dropout = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.down(self.drop(self.up(x))), self.dropout, self.training)


def in_training(shards: bool) -> Report:
    set_random_seed(0, tp_rank=dist.get_rank())
    reference = Dropping()
    sch: Any = create_schedule(copy.deepcopy(reference), example_inputs=torch.ones(4, 8))
    if shards:
        sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch["drop"].fork_rng()
        sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    report = verify(reference, sch, eval_mode=False)
    assert (reference.drop.p, sch.mod.dropout, sch["drop"].mod.p, reference.rate) == (0.5,) * 4
    return report


def test_dropout_of_shards_is_off_in_training_and_said_so() -> None:
    one, other = run_as_threads(lambda: in_training(True), 2)
    assert one.check() == other
    assert one.notes == ("training mode: 4 dropouts of both models are off, as shards draw other masks than the whole",)
    whole = run_as_threads(lambda: in_training(False), 2)[0].check()
    assert whole.notes == ("training mode: both models draw from one random state",)


class Counting(nn.Module):
    """Counts its forwards, and may draw."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.draws, self.count = nn.Linear(8, 16), nn.Linear(16, 8), draws, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        noise = torch.rand(()) if self.draws else 0.0
        return self.down(self.up(x)) + noise


@pytest.mark.parametrize(("draws", "counts"), [(False, [1, 0]), (True, [1, 1])])
def test_threads_run_the_unmodified_model_once_where_that_is_the_same(draws: bool, counts: list[int]) -> None:
    def work() -> int:
        set_random_seed(3, tp_rank=dist.get_rank())
        reference = Counting(draws)
        sch: Any = create_schedule(copy.deepcopy(reference), example_inputs=torch.zeros(4, 8))
        sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        verify(reference, sch, level="step").check()
        return reference.count

    assert run_as_threads(work, 2) == counts


def second_alone(what: str) -> dict[str, Any]:
    """Arguments that only the second rank passes."""
    given: dict[str, dict[str, Any]] = {
        "level": {"level": "outputs"},
        "mode": {"eval_mode": False},
        "blame": {"blame": False},
        "inputs": {"inputs": torch.ones(4, 8)},
        "shape": {"inputs": torch.zeros(2, 8)},
        "mask": {"inputs": (torch.zeros(4, 8), torch.zeros(3, 7, dtype=torch.bool)[1:])},
        "loss": {"loss": nn.functional.relu},
        "weights": {"reference": Counting(False).double()},
        "unknown": {"level": "all"},
    }
    return given.get(what, {})


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("level", "verify with level='grads' on rank 0 and verify with level='outputs' on rank 1"),
        ("mode", "verify with eval_mode=True on rank 0 and verify with eval_mode=False on rank 1"),
        ("blame", "verify with blame=True on rank 0 and verify with blame=False on rank 1"),
        ("inputs", "an input of the shape (4, 8) and with the sum "),
        ("shape", "an input of the shape (2, 8) and with the sum 0 on rank 1"),
        ("mask", "an input of the shape (2, 7) and with the sum 0 on rank 1"),
        ("loss", "verify with loss='NoneType' on rank 0 and verify with loss='relu' on rank 1"),
        ("weights", "a reference whose weights have the sum "),
        (
            "step",
            "nothing more on rank 0 and step 1, sch['up'].replace(",
        ),
        ("unknown", "no level 'all'; available: grads, outputs, step"),
    ],
)
def test_ranks_that_verify_otherwise_are_told_and_do_not_wait(what: str, said: str) -> None:
    def work() -> str:
        given: dict[str, Any] = {"reference": Counting(False), "inputs": torch.zeros(4, 8)}
        sch: Any = create_schedule(Counting(False))
        if dist.get_rank():
            given.update(second_alone(what))
            if what == "step":
                sch["up"].replace(nn.Identity())
        try:
            return str(verify(sch=sch, **given))
        except SlapoError as error:
            return str(error)

    one, other = run_as_threads(work, 2)
    assert said in one
    assert said in other
