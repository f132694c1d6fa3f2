"""Parameters that several stages share, where the stages of one tie are not those of another."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_pipeline.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, build, create_schedule
from slapo_testing import run_distributed

from ..layouts import mesh_of, message_of

pytestmark = pytest.mark.multiproc

SGD = partial(torch.optim.SGD, lr=0.1)


class Chain(nn.Module):
    """Four layers; ``a`` shares with ``b``, ``b`` with ``c``, and ``a`` with ``d``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.b.weight, self.c.bias, self.d.bias = self.a.weight, self.b.bias, self.a.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.b(self.a(x))).tanh())


def _engine(model: nn.Module, pp: int, x: torch.Tensor) -> tuple[Schedule, Any]:
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
    schedule = create_schedule(model, mesh=mesh_of(pp=pp), example_inputs={"x": x}, plugins=plugins)
    for name in "abc"[: pp - 1]:
        schedule[name].cut_pipeline_stage()
    return schedule, build(schedule, "torch", optimizer=SGD, loss_fn=F.mse_loss, microbatches=4, clip=0.05)


def _train(rank: int, pp: int, frozen: bool) -> tuple[list[float], float]:
    """Differences of losses and norms, and of the weights, from one process; what was frozen is trained from step 2 on."""
    model = Chain()
    model.a.weight.requires_grad_(not frozen)
    reference, x, y = copy.deepcopy(model), torch.randn(8, 4), torch.randn(8, 4)
    schedule, engine = _engine(model, pp, x)
    optimizer, found = SGD([p for p in reference.parameters() if p.requires_grad]), []
    for step in range(4):
        loss = engine.train_batch(x=x, labels=y)
        optimizer.zero_grad()
        expected = F.mse_loss(reference(x), y)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        optimizer.step()
        found += [abs(loss.item() - expected.item()), abs(engine.grad_norm - norm.item())]
        if frozen and step == 1:
            for module, owner in ((engine.module, engine.optimizer), (reference, optimizer)):
                idle = [p for p in module.parameters() if not p.requires_grad]
                if idle:
                    owner.add_param_group({"params": [p.requires_grad_() for p in idle]})
    state = schedule.full_state()
    return found, max(float((state[n] - p.detach()).abs().max()) for n, p in reference.named_parameters())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pp", [3, 4])
def test_stages_may_be_in_different_numbers_of_ties(pp: int) -> None:
    for found, weights in run_distributed(_train, pp, pp, False, timeout=60):
        assert max(found) < 1e-5
        assert weights < 1e-5


def test_a_tie_may_be_unfrozen_after_the_build() -> None:
    for found, weights in run_distributed(_train, 4, 4, True, timeout=60):
        assert max(found) < 1e-5
        assert weights < 1e-5


def _unfrozen_on_one_stage(rank: int) -> list[str]:
    model, x = Chain(), torch.randn(8, 4)
    model.a.weight.requires_grad_(False)
    _, engine = _engine(model, 2, x)
    messages = []
    for frozen in (False, True):
        if rank == 0:
            engine.module.get_parameter("a.weight").requires_grad_(not frozen)
        messages.append(message_of(partial(engine.train_batch, x=x, labels=x)))
    return messages


def test_a_tie_that_one_stage_alone_unfreezes_is_refused() -> None:
    for refused, sound in run_distributed(_unfrozen_on_one_stage, 2, timeout=60):
        assert "have different values, or requires_grad, of the tied 'a.weight'" in refused
        assert sound == "no error"


class Sparse(nn.Module):
    """An embedding of sparse gradients and a last layer of dense ones share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


def _sparse(rank: int) -> str:
    torch.manual_seed(0)
    x = torch.arange(8) % 4
    _, engine = _engine(Sparse(), 3, x)
    return message_of(partial(engine.train_batch, x=x, labels=torch.randn(8, 4)))


def test_a_sparse_gradient_of_a_tie_fails_all_stages() -> None:
    for message in run_distributed(_sparse, 3, timeout=30):
        assert "the sparse gradient of the tied 'a.weight' cannot be summed over stages" in message
