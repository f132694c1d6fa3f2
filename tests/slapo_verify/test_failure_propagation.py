"""A rank that fails within the model strands no other, whether ranks are threads or processes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slapo_core import VerifyError, create_schedule
from slapo_testing import run_distributed
from slapo_verify import run_as_threads, verify, verify_engine
from slapo_verify.ranks import failure_propagation
from slapo_verify.ranks._torch_private import _COLLECTIVES, watched_collectives
from tests.slapo_torch.layouts import mesh_of

pytestmark = pytest.mark.multiproc

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
STRANDED = (
    "rank 1 failed, and others waited in a collective for 0.3 s more: ZeroDivisionError: of rank 1; "
    "start the ranks again, as their process groups are out of step"
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.up, self.act, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(self.before(x))))


def fails(module: nn.Module, args: Any) -> None:
    if dist.get_rank() == 1 and type(args[0]) is torch.Tensor:
        raise ZeroDivisionError("of rank 1")


def sleeps(module: nn.Module, args: Any) -> None:
    if dist.get_rank() == 1 and type(args[0]) is torch.Tensor:
        time.sleep(1.0)


def make_schedule(change: Callable[[Any], Any] = lambda sch: None) -> tuple[nn.Module, Any]:
    reference = Model()
    sch: Any = create_schedule(copy.deepcopy(reference), example_inputs=X)
    sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    change(sch)
    return reference, sch


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    before = failure_propagation.COLLECTIVE_GRACE_SECONDS
    failure_propagation.COLLECTIVE_GRACE_SECONDS = seconds
    try:
        yield
    finally:
        failure_propagation.COLLECTIVE_GRACE_SECONDS = before


def told(work: Callable[[], Any]) -> tuple[str, str]:
    """Class and text of what it raises."""
    try:
        return "", str(work())
    except Exception as err:
        return type(err).__name__, str(err)


def before_the_sum(sch: Any) -> None:
    sch.mod.down.register_forward_pre_hook(fails)


def in_the_backward(sch: Any) -> None:
    def hook(gradient: torch.Tensor) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("of rank 1")

    sch.mod.up.register_forward_hook(lambda module, args, output: output.register_hook(hook) and None)


def stranded(rank: int, where: str) -> tuple[float, tuple[str, str], list[bool]]:
    reference, sch = make_schedule(globals()[where])
    start = time.monotonic()
    with patience(0.3):
        error = told(lambda: verify(reference, sch))
    seconds = time.monotonic() - start
    return seconds, error, [sch.mod.training, all(each.grad is None for each in sch.mod.parameters())]


@pytest.mark.parametrize("where", ["before_the_sum", "in_the_backward"])
def test_processes_that_wait_for_one_that_failed_are_let_go(where: str) -> None:
    for seconds, error, left in run_distributed(stranded, 2, where, timeout=15):
        assert error == ("StrandedError", STRANDED)
        assert seconds < 5
        assert left == [True, True]


@pytest.mark.parametrize("where", [before_the_sum, in_the_backward])
def test_threads_tell_what_the_one_that_failed_said(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slapo_verify.ranks.thread_ranks._DEADLOCK_SECONDS", 0.2)
    with pytest.raises(ZeroDivisionError, match="of rank 1"):
        run_as_threads(lambda: verify(*make_schedule(where)), 2)
    run_as_threads(lambda: verify(*make_schedule()).check(), 2)


def not_stranded(rank: int) -> tuple[bool, tuple[str, str], float]:
    with patience(0.3):
        reference, sch = make_schedule(lambda sch: sch.mod.down.register_forward_pre_hook(sleeps))
        slow = verify(reference, sch).ok
        reference = Model()
        sch = create_schedule(copy.deepcopy(reference), example_inputs=X)
        sch.mod.down.register_forward_pre_hook(fails)
        sch.mod.up.register_forward_pre_hook(lambda module, args: time.sleep(0.1 * rank))
        error = told(lambda: verify(reference, sch))
        total = torch.ones(())
        dist.all_reduce(total)
    return slow, error, total.item()


def test_a_slow_rank_is_waited_for_and_one_that_fails_alone_leaves_the_groups_as_they_are() -> None:
    one, other = run_distributed(not_stranded, 2)
    assert one == (True, ("BuildError", "rank 1 failed: ZeroDivisionError: of rank 1"), 2.0)
    assert other == (True, ("ZeroDivisionError", "of rank 1"), 2.0)


class FailsLater(nn.ReLU):
    """Wrong when it is called first, and fails on rank 1 from then on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += type(x) is torch.Tensor
        if self.calls > 1:
            fails(self, (x,))
        return super().forward(x) * 2


def stranded_in_blame(rank: int) -> tuple[str, str]:
    reference, sch = make_schedule(lambda sch: sch["act"].replace(FailsLater()))
    FailsLater.calls = 0
    with patience(0.3):
        return told(lambda: verify(reference, sch))


def test_what_was_found_is_told_where_ranks_are_stranded_by_a_step_that_is_tried_again() -> None:
    one, other = run_distributed(stranded_in_blame, 2)
    assert one == other
    assert one[0] == "StrandedError"
    assert one[1].startswith(f"{STRANDED}; that happened while locating the cause of this: output: 32 of 32 elements differ; ")


def all_of_torch(rank: int) -> Any:
    found: list[int] = []

    def look() -> None:
        found.append(1)
        if len(found) > 1:
            raise VerifyError("enough")

    with watched_collectives(look):
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, rank)
        dist.barrier()
        value = torch.full((2,), float(rank))
        dist.broadcast(value, 1)
        dist.reduce(value, 0)
        pieces = torch.empty(1)
        dist.reduce_scatter(pieces, [torch.ones(1), torch.ones(1)])
        work: Any = dist.all_reduce(pieces, async_op=True)
        work.wait()
        if rank:
            dist.send(value, 0)
            time.sleep(1.5)
            return parts, pieces.item(), ""
        dist.recv(value, 1)
        return parts, pieces.item(), told(lambda: dist.all_reduce(value))[1]


def test_torch_s_collectives_are_those_that_are_watched() -> None:
    names = {name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    alone = {"check_for_nan", "monitored_barrier_", "send", "recv_", "recv_any_source_"}
    assert names - set(_COLLECTIVES) == alone  # they return nothing to wait for, or what waits once only
    one, other = run_distributed(all_of_torch, 2)
    assert one == ([0, 1], 4.0, "enough")
    assert other == ([0, 1], 4.0, "")


def engine_that_fails(rank: int) -> tuple[str, str]:
    def schedule(model: nn.Module) -> Any:
        sch: Any = create_schedule(model, mesh=mesh_of(pp=2), example_inputs={"x": X})
        sch["up"].cut_pipeline_stage()
        sch.mod.down.register_forward_pre_hook(fails)
        return sch

    with patience(0.3):
        return told(
            lambda: verify_engine(Model(), schedule, {"x": X, "labels": X}, loss_fn=nn.functional.mse_loss, microbatches=2)
        )


def test_an_engine_s_rank_that_fails_says_so() -> None:
    one, other = run_distributed(engine_that_fails, 2, timeout=20)
    assert one == ("BuildError", "rank 1 failed: ZeroDivisionError: of rank 1")
    assert other == ("ZeroDivisionError", "of rank 1")


SCRIPT = """
import torch.distributed as dist
from tests.slapo_verify import test_failure_propagation as own

dist.init_process_group("gloo")
reference, sch = own.scheduled(own.before_the_sum)
with own.patience(0.3):
    own.verify(reference, sch)
"""


@pytest.mark.slow
def test_a_user_s_own_processes_end_with_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "javascript.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode
    assert done.stderr.count(f"StrandedError: {STRANDED}") == 2


SCHEDULE = """
from tests.slapo_verify.test_failure_propagation import fails


def schedule(sch):
    sch.tensor_parallel()
    sch.mod.model.layers[1].mlp.act_fn.register_forward_pre_hook(fails)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[], ["--processes"]], ids=["threads", "processes"])
def test_the_command_ends_with_the_reason(ranks: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCHEDULE)
    command = [
        str(Path(sys.executable).with_name("slapo")),
        "verify",
        "--model",
        "llama",
        "--tp",
        "2",
        "--schedule",
        "mine.py",
        *ranks,
    ]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode
    assert "rank 1 failed, and others waited in a collective for 20 s more: ZeroDivisionError: of rank 1" in done.stderr
