"""Stage 3 of ZeRO, which gathers a parameter while its module runs and frees it behind that."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import build, create_schedule
from slapo_testing import run_distributed
from tests.slapo_torch.layouts import mesh_of

pytestmark = pytest.mark.multiproc


class EndsWithLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).sin())


def layers(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "ends with a Linear":
        return nn.Sequential(EndsWithLinear(), EndsWithLinear())
    # its attention reads the weight of out_proj, which never runs
    return nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)))


def losses(rank: int, kind: str) -> list[list[float]]:
    batch = {"input": torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(rank)), "labels": torch.zeros(4, 6, 8)}
    found = []
    for checkpointed in (False, True):
        schedule = create_schedule(layers(kind), mesh=mesh_of(dp=2))
        if checkpointed:
            for layer in schedule.select("*"):
                layer.checkpoint()
        config = {"zero_optimization": {"stage": 3}}
        sgd = partial(torch.optim.SGD, lr=0.1)
        engine = build(schedule, "deepspeed", optimizer=sgd, loss_fn=F.mse_loss, config=config)
        found.append([engine.train_batch(**batch).item() for _ in range(3)])
        engine.close()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["ends with a Linear", "reads another module's weight"])
def test_zero_3_trains_as_without_checkpoints(kind: str) -> None:
    for without, with_checkpoints in run_distributed(losses, 2, kind):
        assert with_checkpoints == pytest.approx(without, rel=1e-6)


def losses_after_others(rank: int) -> list[list[float]]:
    """Losses of engines where the second rank's process has had more parameters and modules than the first one's."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id += 7 * rank
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] += 5 * rank
    return losses(rank, "ends with a Linear")


def test_zero_3_trains_where_a_rank_has_had_more_engines() -> None:
    for without, with_checkpoints in run_distributed(losses_after_others, 2):
        assert with_checkpoints == pytest.approx(without, rel=1e-6)
