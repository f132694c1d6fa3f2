"""Calls that would train nothing or leave a rank waiting raise on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_pipeline.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule
from slapo_testing import run_distributed

from .layouts import adamw, mesh_of

X, Y = torch.randn(2, 4, 8).unbind()


def engine(model: nn.Module, pp: int = 1, **options: Any) -> Any:
    mesh = mesh_of(pp) if pp > 1 else None
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
    schedule = create_schedule(model, mesh=mesh, example_inputs={"input": X[:2]}, plugins=plugins)
    if pp > 1:
        schedule.pipeline(pp)
    return build(schedule, "torch", **{"optimizer": adamw, "loss_fn": nn.functional.mse_loss, "microbatches": 2, **options})


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def test_an_optimizer_of_other_parameters() -> None:
    others = list(nn.Linear(8, 8).parameters())
    with pytest.raises(BuildError, match="optimizer= gave an optimizer of other parameters than it was given"):
        engine(layers(), optimizer=lambda parameters: torch.optim.SGD(others, lr=0.1))


def test_a_loss_with_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(out * self.scale, labels)

    with pytest.raises(BuildError, match="loss_fn has parameters of its own, which no optimizer would step"):
        engine(layers(), loss_fn=Scaled())
    frozen = engine(layers(), loss_fn=Scaled().requires_grad_(False))
    assert frozen.train_batch(input=X, labels=Y) > 0


@pytest.mark.parametrize("options", [{"weight": torch.rand(8)}, {"reduction": "sum"}])
def test_a_loss_function_that_hides_weights_or_a_sum(options: dict[str, Any]) -> None:
    labels = torch.tensor([0, 1, 2, 3])

    def hiding(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, labels, **options)

    for parts in (engine(layers(), loss_fn=hiding).train_batch, engine(layers(), loss_fn=hiding).eval_batch):
        with pytest.raises(BuildError, match="the loss sums over its labels, or weights their classes"):
            parts(input=X, labels=labels)
    whole = engine(layers(), loss_fn=hiding, microbatches=1)
    torch.testing.assert_close(whole.eval_batch(input=X, labels=labels), hiding(layers()(X), labels).detach())


def test_a_batch_that_is_a_conjugate_view() -> None:
    z = torch.complex(X, Y)
    found = engine(layers(), loss_fn=lambda out, labels: (out - labels.imag).square().mean())
    assert found.eval_batch(input=X, labels=z.conj()) == found.eval_batch(input=X, labels=z.conj().resolve_conj())


def detached(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out.detach(), labels)


class Rows(nn.Module):
    """Gives its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, like: torch.Tensor) -> torch.Tensor:
        return self.weight.expand_as(like)


class Table(nn.Module):
    """Sends a parameter to the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.first, self.last = Rows(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.rows(input)
        return self.last(self.first(input)) + rows


def evaluated(rank: int) -> tuple[float, float]:
    """Return the losses of a model whose parameter crosses a cut, in a pipeline and in one process."""
    torch.manual_seed(0)
    model = Table()
    mesh, plugins = (
        mesh_of(2),
        Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin]),
    )
    plain = [nn.functional.mse_loss(model(X), Y).item()]
    schedule = create_schedule(model, mesh=mesh, example_inputs={"input": X}, plugins=plugins)
    schedule["first"].cut_pipeline_stage()
    options: dict[str, Any] = {"microbatches": 1, "pipeline_schedule": "gpipe"}
    pipeline: Any = build(schedule, "torch", optimizer=adamw, loss_fn=nn.functional.mse_loss, **options)
    return pipeline.eval_batch(input=X, labels=Y).item(), plain[0]


@pytest.mark.multiproc
def test_a_parameter_that_crosses_is_evaluated_too() -> None:
    for found, expected in run_distributed(evaluated, 2):
        assert abs(found - expected) < 1e-6


def message_of(work: Any) -> str:
    try:
        work()
    except BuildError as err:
        return str(err)
    return ""


def refused(rank: int, pp: int) -> tuple[str, str]:
    """Return messages for a loss without a gradient and for ranks that call different methods; training continues."""
    model = layers()
    without = engine(model, pp, loss_fn=detached)
    before = {name: tensor.clone() for name, tensor in without.module.named_parameters()}
    first = message_of(lambda: without.train_batch(input=X, labels=Y))
    assert all(torch.equal(before[name], tensor) for name, tensor in without.module.named_parameters())
    different = engine(layers(), pp)
    call = different.train_batch if rank or pp == 1 else different.eval_batch
    second = message_of(lambda: call(input=X, labels=Y))
    assert different.train_batch(input=X, labels=Y) > 0
    return first, second


@pytest.mark.multiproc
def test_ranks_that_call_different_methods_and_losses_without_a_gradient() -> None:
    for first, second in run_distributed(refused, 2, 2, timeout=60):
        assert "the loss has no gradient: nothing that is trained is in it" in first
        assert "or some train while others evaluate" in second
    assert "the loss has no gradient" in refused(0, 1)[0]
