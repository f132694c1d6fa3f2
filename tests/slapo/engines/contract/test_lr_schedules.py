"""Schedules, single numbers and expanded buffers in checkpoints of other projects' engines."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR, StepLR

from slapo_core import build, create_schedule
from slapo_testing import run_distributed
from tests.engines import PLUGINS
from tests.slapo_deepspeed.parameter_numbers import count_again
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

pytestmark = pytest.mark.multiproc
TARGETS = ("deepspeed", "megatron")
X = torch.ones(4, 4)


@pytest.fixture(scope="module", autouse=True)
def _counters() -> Iterator[None]:
    """The processes go on to tests of other files."""
    yield
    run_distributed(count_again, 1)


def sequence(length: int, optimizer: Any) -> Any:
    kinds = [LinearLR(optimizer, 0.1, total_iters=2), ConstantLR(optimizer, 1.0), StepLR(optimizer, 3)]
    return SequentialLR(optimizer, kinds[:length], [2, 3][: length - 1])


def engine_of(target: str, rate: Any, **buffers: torch.Tensor) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    for name, value in buffers.items():
        model[0].register_buffer(name, value)
    sch = create_schedule(model, mesh=mesh_of(), plugins=PLUGINS)
    return build(sch, target, optimizer=adamw, lr_scheduler=rate, loss_fn=nn.functional.mse_loss)


def trained(engine: Any, steps: int) -> list[float]:
    return [engine.train_batch(input=X, labels=X).item() for _ in range(steps)]


def loaded(rank: int, target: str, folder: str, one: int, other: int) -> tuple[str, Any, Any]:
    """Message of a load, and the engine's state before and after it."""
    engine = engine_of(target, partial(sequence, one))
    trained(engine, 3)
    engine.save(folder)
    engine.close()
    engine = engine_of(target, partial(sequence, other))
    trained(engine, 1)
    found = []
    for act in (lambda: None, lambda: engine.load(folder)):
        message = message_of(act)
        weights = [parameter.tolist() for parameter in engine.module.parameters()]
        found.append(str((weights, engine.lr_scheduler.state_dict(), engine.steps)))
    trained(engine, 1)
    engine.close()
    return message, *found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("one", "other"), [(3, 2), (2, 3)])
def test_one_of_another_length_changes_nothing(target: str, one: int, other: int, tmp_path: Path) -> None:
    ((message, before, after),) = run_distributed(loaded, 1, target, str(tmp_path), one, other)
    kinds = ["LinearLR", "ConstantLR", "StepLR"]
    for length in (one, other):
        assert f"SequentialLR({', '.join(kinds[:length])})" in message
    assert after == before


class Picky(StepLR):
    """Takes no state that is more than two steps old, when half of it is there."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.last_epoch > 2:
            raise LookupError("too old")


def refused(rank: int, folder: str) -> tuple[str, Any, Any, list[float]]:
    """Message of a load whose schedule raises, the engine's state before and after it, and the next loss."""
    engine = engine_of("megatron", partial(Picky, step_size=1))
    trained(engine, 3)
    engine.save(folder)
    engine.close()
    engine = engine_of("megatron", partial(Picky, step_size=1))
    found = []
    for act in (lambda: None, lambda: engine.load(folder)):
        message = message_of(act)
        weights = [parameter.tolist() for parameter in engine.module.parameters()]
        found.append(str((weights, engine.lr_scheduler.state_dict(), engine.steps)))
    after = trained(engine, 1)
    engine.close()
    return message, found[0], found[1], after


def test_one_that_refuses_its_state_changes_nothing(tmp_path: Path) -> None:
    ((message, before, after, losses),) = run_distributed(refused, 1, str(tmp_path))
    assert "Picky does not accept its saved state: LookupError: too old" in message
    assert after == before
    assert losses[0] > 0


def expanded(rank: int, target: str, folder: str) -> tuple[list[float], list[float], list[float]]:
    """A buffer that was expanded as it is loaded, and losses after a save and after a load."""
    engine = engine_of(target, None, many=torch.tensor([3.0]).expand(4))
    trained(engine, 1)
    engine.save(folder)
    ahead = trained(engine, 2)
    engine.close()
    engine = engine_of(target, None, many=torch.tensor([0.0]).expand(4))
    engine.load(folder)
    (many,) = engine.module.buffers()
    found = many.tolist(), ahead, trained(engine, 2)
    engine.close()
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_a_buffer_that_was_expanded_comes_back(target: str, tmp_path: Path) -> None:
    ((many, ahead, found),) = run_distributed(expanded, 1, target, str(tmp_path))
    assert many == [3.0] * 4
    assert found == ahead


class Norms(torch.optim.SGD):
    """Keeps the norm of what a rank has of a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["norm"] = parameter.grad.norm()
        super().step()


def normed(rank: int, folder: str, is_split: bool) -> str:
    """Message of a save with an optimizer whose state has norms."""
    torch.manual_seed(0)
    sch = create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh_of(tp=2), plugins=PLUGINS)
    if is_split:
        sch["0"].shard("weight", axis=0)
        sch["0"].shard("bias", axis=0)
        sch["0"].sync("bwd_post", "all_reduce")
        sch["1"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    engine = build(sch, "megatron", optimizer=partial(Norms, lr=0.1), loss_fn=nn.functional.mse_loss)
    trained(engine, 1)
    message = message_of(lambda: engine.save(folder))
    engine.close()
    return message


def test_numbers_that_ranks_have_different_ones_of_are_refused(tmp_path: Path) -> None:
    assert run_distributed(normed, 2, str(tmp_path), False) == ["no error"] * 2
    first, second = run_distributed(normed, 2, str(tmp_path), True)
    assert first == second
    assert "Norms keeps" in first
    assert "as 'norm' of '0.weight', which Megatron writes once; use another optimizer" in first
