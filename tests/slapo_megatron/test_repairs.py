"""What is set right of Megatron-Core is still wrong in it: a test that fails says that a repair can go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core.build import build
from slapo_core.schedule import create_schedule
from slapo_core.testing import run_distributed
from slapo_megatron.cpu_mode import cpu_mode
from slapo_megatron.repairs import repaired
from tests.slapo_torch.layouts import adamw

from .layouts import PLUGINS

pytestmark = pytest.mark.multiproc


def stepped() -> Any:
    """An engine with the distributed optimizer, behind one step."""
    schedule = create_schedule(nn.Linear(4, 4), plugins=PLUGINS)
    engine = build(schedule, "megatron", optimizer=adamw, loss_fn=F.mse_loss, distributed_optimizer=True)
    engine.train_batch(input=torch.ones(2, 4), labels=torch.zeros(2, 4))
    return engine


def steps_of(engine: Any) -> int:
    """How many tensors count the steps of the two parameters."""
    return len({id(held["step"]) for held in engine.optimizer.optimizer.state.values()})


def looked_at(rank: int, folder: str) -> tuple[int, int, str, float, bool]:
    """Tensors of steps behind a load without and with the repair; the error without; what is read with it; whether a save
    started another process."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    engine = stepped()
    inner = engine.optimizer
    with cpu_mode():
        inner.load_state_dict(inner.state_dict())
        shared = steps_of(engine)
        with repaired():
            inner.load_state_dict(inner.state_dict())
        own = steps_of(engine)
        (name, parameter), *_ = engine.module.named_parameters()
        assert name == "weight"
        ones = torch.ones(parameter.numel())
        read = {"param": ones, "exp_avg": ones, "exp_avg_sq": ones}
        try:
            with torch.no_grad():
                inner._set_main_param_and_optimizer_states(parameter, read)
            message = ""
        except KeyError as err:
            message = str(err)
        with repaired():
            inner._set_main_param_and_optimizer_states(parameter, read)
    group, order = inner.model_param_group_index_map[parameter]
    value = inner.optimizer.param_groups[group]["params"][order].sum().item()
    engine.save(folder)
    engine.close()
    return shared, own, message, value, filesystem_async._results_queue is not None


def test_they_are_needed_and_do_what_they_say(tmp_path: Path) -> None:
    ((shared, own, message, value, is_another_process),) = run_distributed(looked_at, 1, str(tmp_path))
    assert shared == 1, "Megatron gives each parameter its own step now"
    assert own == 2
    assert message == "'step'", "Megatron asks for no step that it did not save now"
    assert value == 16
    assert not is_another_process
