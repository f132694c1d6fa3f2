"""A learning-rate schedule that is made of several, loaded into one of fewer or of more."""

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
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

from ..parameter_numbers import count_again

pytestmark = pytest.mark.multiproc
X = torch.ones(4, 4)


@pytest.fixture(scope="module", autouse=True)
def _counters() -> Iterator[None]:
    """The processes go on to tests of other files."""
    yield
    run_distributed(count_again, 1)


def sequence(length: int, optimizer: Any) -> Any:
    kinds = [LinearLR(optimizer, 0.1, total_iters=2), ConstantLR(optimizer, 1.0), StepLR(optimizer, 3)]
    return SequentialLR(optimizer, kinds[:length], [2, 3][: length - 1])


def engine_of(rate: Any, **buffers: torch.Tensor) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    for name, value in buffers.items():
        model[0].register_buffer(name, value)
    sch = create_schedule(model, mesh=mesh_of(), plugins=PLUGINS)
    return build(sch, "deepspeed", optimizer=adamw, lr_scheduler=rate, loss_fn=nn.functional.mse_loss)


def trained(engine: Any, steps: int) -> list[float]:
    return [engine.train_batch(input=X, labels=X).item() for _ in range(steps)]


def loaded(rank: int, folder: str, one: int, other: int) -> tuple[str, Any, Any]:
    """What a load says, and what the engine has before and after it."""
    engine = engine_of(partial(sequence, one))
    trained(engine, 3)
    engine.save(folder)
    engine.close()
    engine = engine_of(partial(sequence, other))
    trained(engine, 1)
    found = []
    for act in (lambda: None, lambda: engine.load(folder)):
        message = message_of(act)
        weights = [parameter.tolist() for parameter in engine.module.parameters()]
        found.append(str((weights, engine.lr_scheduler.state_dict(), engine.steps)))
    trained(engine, 1)
    engine.close()
    return message, *found


@pytest.mark.parametrize(("one", "other"), [(3, 2), (2, 3)])
def test_one_of_another_length_changes_nothing(one: int, other: int, tmp_path: Path) -> None:
    ((message, before, after),) = run_distributed(loaded, 1, str(tmp_path), one, other)
    kinds = ["LinearLR", "ConstantLR", "StepLR"]
    for length in (one, other):
        assert f"SequentialLR({', '.join(kinds[:length])})" in message
    assert after == before


def expanded(rank: int, folder: str) -> tuple[list[float], list[float], list[float]]:
    """A buffer that was expanded as it is loaded, and losses after a save and after a load."""
    engine = engine_of(None, many=torch.tensor([3.0]).expand(4))
    trained(engine, 1)
    engine.save(folder)
    ahead = trained(engine, 2)
    engine.close()
    engine = engine_of(None, many=torch.tensor([0.0]).expand(4))
    engine.load(folder)
    (many,) = engine.module.buffers()
    found = many.tolist(), ahead, trained(engine, 2)
    engine.close()
    return found


def test_a_buffer_that_was_expanded_comes_back(tmp_path: Path) -> None:
    ((many, ahead, found),) = run_distributed(expanded, 1, str(tmp_path))
    assert many == [3.0] * 4
    assert found == ahead
