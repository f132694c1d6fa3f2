"""An engine trains a ``Pipe`` that torch has made, marks in a forward and models with their own loss as it trains the model."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.nn import functional as F

import slapo
from slapo.pipeline import build_pipeline_model, pipe_split
from slapo_testing import run_distributed

ROWS, WIDTH = 4, 8
Weights = dict[str, Any]


class Loss(nn.Module):
    """A model with its loss, with tied weights and a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(16, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = self.embedding(ids)
        x = torch.tanh(self.blocks[0](first))
        pipe_split()
        return F.cross_entropy(self.head(self.blocks[1](x) + first), targets)


def model() -> Loss:
    torch.manual_seed(1)
    return Loss()


def batch(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randint(16, (rows,), generator=generator) for name in ("ids", "targets")}


def expected() -> tuple[torch.Tensor, Weights]:
    """Loss and weights of one step of the unmodified model."""
    plain = model()
    loss = plain(**batch(ROWS))
    loss.backward()
    torch.optim.AdamW(plain.parameters(), lr=1e-2).step()
    return loss.detach(), {name: p.detach() for name, p in plain.named_parameters(remove_duplicate=False)}


def trained(rank: int, how: str) -> tuple[torch.Tensor, Weights]:
    """The same numbers from two stages."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    part = batch(ROWS // 2)
    scheduled = model()
    sch = slapo.create_schedule(scheduled, mesh=mesh, example_inputs=part)
    options: dict[str, Any] = {}
    if how == "pipe":
        split = {"blocks.1": SplitPoint.BEGINNING}
        options["pipe"] = pipeline(copy.deepcopy(scheduled), (), part, split_spec=split)
    elif how == "marks":
        sch.cut_at_marks()
    else:
        sch["blocks.1"].cut_pipeline_stage(where="before")
    engine = build_pipeline_model(sch, "torch", optimizer=partial(torch.optim.AdamW, lr=1e-2), microbatches=2, **options)
    loss = engine.train_batch(**batch(ROWS))
    result = loss, sch.full_state("param")
    engine.close()
    return result


@pytest.mark.multiproc
@pytest.mark.parametrize("how", ["pipe", "marks", "before"])
def test_two_stages_train_as_the_model(how: str) -> None:
    loss, weights = expected()
    for found_loss, found in run_distributed(trained, 2, how):
        torch.testing.assert_close(found_loss, loss)
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
