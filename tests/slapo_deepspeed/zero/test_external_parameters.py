"""Stage 3 of ZeRO: a model reads parameters of its layers itself, as attributes or otherwise."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import BuildError, build, create_schedule
from slapo_testing import run_distributed
from tests.slapo_torch.layouts import mesh_of

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("deepspeed")]

_ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0}


class Penalised(nn.Module):
    """In training a penalty reads the weights of two layers."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.layers, self.by_name = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), by_name

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        loss = F.mse_loss(x, targets)
        if not self.training:
            return loss
        named = dict(self.named_parameters()) if self.by_name else {}
        weights = [named[f"layers.{index}.weight"] if self.by_name else self.layers[index].weight for index in (0, 2)]
        return loss + 0.1 * sum((weight @ weight.T).norm() for weight in weights)


def _train(rank: int, by_name: bool) -> float:
    """Return how far a loss in evaluation, and those of three steps, are from the unmodified model's."""
    torch.manual_seed(0)
    model = Penalised(by_name)
    plain, (x, targets) = copy.deepcopy(model), torch.randn(2, 4, 8)
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = build(create_schedule(model, mesh=mesh_of(dp=2)), "deepspeed", optimizer=sgd, config={"zero_optimization": _ZERO})
    optimizer, own = sgd(plain.parameters()), [each.chunk(2)[rank] for each in (x, targets)]
    far = [float(engine.eval_batch(*own) - plain.eval()(x, targets))]
    plain.train()
    for _ in range(3):
        expected = plain(x, targets)
        far.append(float(engine.train_batch(*own) - expected))
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return max(map(abs, far))


def test_what_is_read_as_an_attribute_is_gathered_also_where_the_first_forwards_did_not() -> None:
    assert max(run_distributed(_train, 2, False)) < 1e-6


def _refused(rank: int) -> None:
    with pytest.raises(BuildError, match=r"'layers.0.weight' is read in \w+ where no module that holds it runs"):
        _train(rank, True)


def test_what_is_found_otherwise_would_be_empty() -> None:
    run_distributed(_refused, 2)
