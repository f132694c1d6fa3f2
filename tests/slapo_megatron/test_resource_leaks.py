"""An engine that could not be built leaves no process group behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, build, build_program, create_schedule
from slapo_megatron.process_state.process_groups import ParallelState
from slapo_testing import run_distributed
from tests.engines import PLUGINS
from tests.slapo_torch.layouts import mesh_of, message_of


def test_refused_groups_do_not_keep_the_process_group_of_one_process() -> None:
    program = build_program(create_schedule(nn.Linear(2, 2), plugins=PLUGINS))
    state = ParallelState(program, chunks=1, timeout_minutes=1)
    with pytest.raises(BuildError, match="for another mesh or other stages is still open in this process"):
        ParallelState(program, chunks=2, timeout_minutes=1)
    state.close()
    assert not dist.is_initialized()


def failed_behind_its_ties(rank: int) -> tuple[str, int]:
    """Message of a build on the user's groups that fails after its ties have theirs, and the number of groups left behind."""
    from megatron.core import parallel_state

    model, mesh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh_of(pp=2)
    model[1].weight = model[0].weight
    schedule = create_schedule(model, mesh=mesh, example_inputs={"input": torch.zeros(1, 2)}, plugins=PLUGINS)
    schedule["0"].cut_pipeline_stage()
    parallel_state.initialize_model_parallel(1, 2, create_gloo_process_groups=False, distributed_timeout_minutes=1)
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    options = {"config": {"optimizer": {"optimizer": "adam", "lr": 1e-2, "adam_beta1": 2.0}}}
    message = message_of(lambda: build(schedule, "megatron", loss_fn=nn.functional.mse_loss, **options))
    left = len(groups) - before
    parallel_state.destroy_model_parallel()
    return message, left


@pytest.mark.multiproc
def test_what_fails_behind_its_ties_gives_their_groups_back() -> None:
    for message, left in run_distributed(failed_behind_its_ties, 2):
        assert "Invalid beta parameter" in message
        assert left == 0
