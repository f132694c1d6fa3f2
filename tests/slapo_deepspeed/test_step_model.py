"""Order of actions of DeepSpeed's pipeline beside DeepSpeed's own schedule."""

from __future__ import annotations

import pytest

from slapo_core import BuildError
from slapo_deepspeed.step_model import DeepSpeedStepModel

pytestmark = pytest.mark.needs("deepspeed")


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 8), (4, 2), (5, 7)])
def test_the_order_is_that_of_deepspeeds_schedule(stages: int, microbatches: int) -> None:
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    for rank, row in DeepSpeedStepModel.action_order({}, stages, stages, microbatches).items():
        commands = [each for step in TrainSchedule(microbatches, stages, rank).steps() for each in step]
        kinds = [
            "F" if isinstance(each, ForwardPass) else "B" for each in commands if isinstance(each, (ForwardPass, BackwardPass))
        ]
        assert [action.kind for action in row] == kinds


def test_several_stages_on_a_rank_are_refused() -> None:
    with pytest.raises(BuildError, match="DeepSpeed runs one stage on each rank"):
        DeepSpeedStepModel.action_order({}, 4, 2, 4)
