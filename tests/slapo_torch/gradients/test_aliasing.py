"""Gradients that autograd or the runtime would put in one place: micro-batches and scales change each by itself."""

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
from slapo_torch.pipeline import RunningStage
from slapo_training.engines.gradient_unaliasing import GradientUnaliasing, memory_extents

from ..layouts import mesh_of

SGD = partial(torch.optim.SGD, lr=0.1)


class Block(nn.Module):
    """Parameters of the activation's very shape, at the input, beside each other, seen through views, and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Parameter(torch.randn(1, 2, 3)) for _ in range(3))
        self.left, self.right = (nn.Parameter(torch.randn(6)) for _ in range(2))
        self.summed = nn.Parameter(torch.randn(3))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x + self.first) + self.one + self.other
        return torch.tanh(x) * self.summed.sum() + (self.left.view(1, 2, 3) + self.right.view(1, 2, 3))


def _model(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), *(Block() for _ in range(blocks - 1)))


def _engine(model: nn.Module, pp: int, x: torch.Tensor, **config: Any) -> tuple[Schedule, Any]:
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
    schedule = create_schedule(model, mesh=mesh_of(pp=pp), example_inputs={"input": x[:1]}, plugins=plugins)
    for index in range(len(schedule.mod) - 1 if pp > 1 else 0):
        schedule[str(index)].cut_pipeline_stage()
    return schedule, build(schedule, "torch", optimizer=SGD, loss_fn=F.mse_loss, microbatches=4, **config)


def _differences(rank: int, pp: int, blocks: int, config: dict[str, Any]) -> dict[str, float]:
    """Largest differences of gradients, after clipping, from those of the unmodified model, row after row."""
    model = _model(blocks)
    reference, x, y = copy.deepcopy(model), torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    expected: dict[str, torch.Tensor] = {}
    for row, label in zip(x.split(1), y.split(1), strict=True):
        reference.zero_grad()
        F.mse_loss(reference(row), label).backward()
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            expected[name] = expected.get(name, 0) + parameter.grad.clone() / 4
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    schedule, engine = _engine(model, pp, x, clip=float(norm) / 2, **config)
    found: dict[str, float] = {}
    for _ in range(2):
        before = schedule.full_state()
        engine.train_batch(input=x, labels=y)
        if not found:
            gradients = schedule.full_state("grad")
            found = {name: float((gradients[name] - value / 2).abs().max()) for name, value in expected.items()}
            moved = {name: (before[name] - value) / 0.1 for name, value in schedule.full_state().items()}
            found |= {f"step of {name}": float((moved[name] - value / 2).abs().max()) for name, value in expected.items()}
    return found


@pytest.mark.sampled(2)
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("schedule", "blocks"), [("1f1b", 2), ("zero_bubble", 2), ("zbv", 4), pytest.param("dualpipev", 4, marks=pytest.mark.slow)]
)
def test_stages(schedule: str, blocks: int) -> None:
    for worst in run_distributed(_differences, 2, 2, blocks, {"pipeline_schedule": schedule}):
        assert all(difference < 1e-5 for difference in worst.values()), worst


def _sent(rank: int) -> list[bool]:
    """Return whether each sent gradient is unchanged at the end of the step."""
    x, y, sent = torch.randn(4, 2, 3), torch.randn(4, 2, 3), []
    _, engine = _engine(_model(2), 2, x, pipeline_schedule="zero_bubble")
    messages = RunningStage.get_bwd_send_ops

    def noted(stage: RunningStage, microbatch: int) -> Any:
        found = messages(stage, microbatch)
        sent.extend((message.tensor, message.tensor.clone()) for message in found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningStage, "get_bwd_send_ops", noted)
        engine.train_batch(input=x, labels=y)
    return [torch.equal(now, then) for now, then in sent]


@pytest.mark.multiproc
def test_what_is_sent_stays_as_it_is() -> None:
    assert run_distributed(_sent, 2) == [[], [True] * 4]


def _hooked(rank: int) -> list[int]:
    """Return the number of calls of each parameter's post-accumulate hook in one step."""
    _, engine = _engine(_model(2), 2, torch.randn(4, 2, 3), pipeline_schedule="zero_bubble")
    calls = {name: 0 for name, _ in engine.module.named_parameters()}
    for name, parameter in engine.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update({name: calls[name] + 1}))
    engine.train_batch(input=torch.randn(4, 2, 3), labels=torch.randn(4, 2, 3))
    return [*calls.values()]


@pytest.mark.multiproc
def test_hooks_of_parameters_are_called() -> None:
    assert run_distributed(_hooked, 2) == [[4] * 2, [4] * 8]


@pytest.mark.multiproc
def test_a_model_in_one_piece() -> None:
    for worst in run_distributed(_differences, 1, 1, 3, {}):
        assert all(difference < 1e-5 for difference in worst.values()), worst


def _module(number: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.zeros(2, 3)) for _ in range(number))


def _separated(kept: tuple[torch.Tensor, ...], *gradients: torch.Tensor) -> list[bool]:
    """Return whether each gradient was copied; values stay the same."""
    module = _module(len(gradients))
    first = GradientUnaliasing(module)
    for parameter, gradient in zip(module, gradients, strict=True):
        parameter.grad = gradient
    first.separate(memory_extents(kept))
    assert all(
        torch.equal(parameter.grad.to_dense(), each.to_dense()) for parameter, each in zip(module, gradients, strict=True)
    )
    return [parameter.grad is not each for parameter, each in zip(module, gradients, strict=True)]


def test_what_gets_memory_of_its_own() -> None:
    shared, bucket, other = torch.randn(2, 3), torch.randn(4, 3), torch.randn(2, 3)
    assert _separated((), shared, other, shared) == [True, False, True]
    assert _separated((), shared, shared.view(2, 3)) == [True, True]
    assert _separated((), bucket[:2], bucket[2:]) == [False, False]
    assert _separated((), bucket[:2], bucket[1:3]) == [True, True]
    assert _separated((bucket,), bucket[2:], other) == [True, False]
    assert _separated((), torch.randn(1).expand(2, 3), other) == [True, False]
    assert _separated((torch.randn(0),), torch.randn(2, 3).to_sparse(), other) == [False, False]


def test_only_a_step_s_first_gradients_are_looked_at() -> None:
    shared = torch.randn(2, 3)
    module = _module(3)
    first = GradientUnaliasing(module)
    module[0].grad = shared
    first.separate()
    module[1].grad = shared
    first.separate()
    assert module[0].grad is module[1].grad is shared
    assert module[2].grad is None
