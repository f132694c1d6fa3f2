"""Options that have to be the same on all ranks: where they differ all ranks say so, and nobody waits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_testing import run_distributed

from .layouts import adamw, mesh_of, message_of

pytestmark = pytest.mark.multiproc

RATE = partial(StepLR, step_size=1)
ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loss_scale=64.0 on rank 0 and loss_scale=32.0 on rank 1": ({"loss_scale": 64.0}, {"loss_scale": 32}),
    "pipeline_schedule='1f1b' on rank 0 and pipeline_schedule='gpipe' on rank 1": ({}, {"pipeline_schedule": "gpipe"}),
    "ignore_index=0 on rank 0 and ignore_index=-100 on rank 1": ({"ignore_index": 0}, {}),
    "optimizer= on rank 0 and no optimizer= on rank 1": ({}, {"optimizer": None}),
    "no lr_scheduler= on rank 0 and lr_scheduler= on rank 1": ({}, {"lr_scheduler": RATE}),
    "loss_fn= on rank 0 and no loss_fn= on rank 1": ({}, {"loss_fn": None}),
}


class Plain(nn.Module):
    """A layer whose starting values are equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _built(rank: int, path: Path) -> list[str]:
    mesh = mesh_of(dp=2)

    def make(config: dict[str, Any]) -> Any:
        given = {"optimizer": adamw, "loss_fn": F.cross_entropy, "precision": "fp16", **config}
        return build(
            create_schedule(
                Plain(), mesh=mesh, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin])
            ),
            "torch",
            **given,
        )

    messages = [message_of(partial(make, configs[rank])) for configs in ALONE.values()]
    own = path / f"schedule of {rank}.csv"
    for text in ("0F0,0B0\n", f"0F0,{',' * rank}0B0\n"):
        own.write_text(text)
        messages.append(message_of(partial(make, {"pipeline_schedule": str(own)})))
    engine = make({"loss_scale": (64, 64.0)[rank], "ignore_index": (None, -100)[rank]})
    assert engine.train_batch(x=torch.ones(2, 4), labels=torch.tensor([0, 1])) > 0
    return messages


def test_where_options_differ_all_ranks_say_how(tmp_path: Path) -> None:
    one, other = run_distributed(_built, 2, tmp_path)
    assert one == other
    for message, how in zip(one, ALONE, strict=False):
        assert message.startswith(f"BuildError: the ranks have different schedules: {how}; give every rank the same")
    assert one[-2] == "no error"
    assert "pipeline_schedule of crc 0x" in one[-1]
