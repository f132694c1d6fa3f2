"""Parameters of every type: integers that are frozen, complex ones, single and double precision beside each other."""

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
from slapo_core import Registry, build, create_schedule
from slapo_testing import run_distributed

from .layouts import mesh_of

SGD = partial(torch.optim.SGD, lr=0.1)
PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])


class Mixed(nn.Module):
    """Goes through four types; ``last`` shares the complex weight of ``a``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.codes = nn.Parameter(torch.randint(-8, 8, (4, 4), dtype=torch.int8), requires_grad=False)
        self.a, self.b = Waves(nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))), nn.Linear(4, 4).double()
        self.last = Waves(self.a.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.b(self.a(x @ self.codes.float()).double()).float()).mean(1, keepdim=True)


class Waves(nn.Module):
    """A product of complex numbers."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


def _train(rank: int, layout: dict[str, int]) -> list[float]:
    """Differences of three losses, norms and the weights from one process on the whole batch."""
    mesh, model = mesh_of(**layout), Mixed()
    x, y, reference = torch.randn(8, 4), torch.randn(8, 1), copy.deepcopy(model)
    schedule = create_schedule(model, mesh=mesh, example_inputs={"x": x}, plugins=PLUGINS)
    if mesh["pp"].size() > 1:
        schedule["a"].cut_pipeline_stage()
    engine: Any = build(schedule, "torch", optimizer=SGD, loss_fn=F.mse_loss, microbatches=2, clip=0.05)
    mine = slice(mesh["dp"].get_local_rank(), None, mesh["dp"].size())
    trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    optimizer, found = SGD(trained), []
    for _ in range(3):
        loss = engine.train_batch(x=x[mine], labels=y[mine]).item()
        optimizer.zero_grad()
        expected = F.mse_loss(reference(x), y)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(trained, 0.05)
        optimizer.step()
        found += [abs(loss - expected.item()) / expected.item(), abs(engine.grad_norm / norm.item() - 1)]
    state = schedule.full_state()
    return found + [float((state[name] - p.detach()).abs().max()) for name, p in reference.named_parameters()]


@pytest.mark.multiproc
@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_parameters_of_all_types_train_as_in_one_process(layout: dict[str, int]) -> None:
    for differences in run_distributed(_train, layout.get("pp", 1) * layout.get("dp", 1), layout):
        assert max(differences) < 1e-5


def _unlike(rank: int, name: str) -> str:
    model = Mixed()
    with torch.no_grad():
        model.get_parameter(name)[0, rank] += 1
        model.get_parameter(name)[1, rank] -= 1
    try:
        build(create_schedule(model, mesh=mesh_of(dp=2), plugins=PLUGINS), "torch", optimizer=SGD)
    except Exception as err:
        return str(err)
    return "no error"


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["codes", "a.weight"])
def test_different_starting_values_of_these_types_are_refused(name: str) -> None:
    for message in run_distributed(_unlike, 2, name):
        assert f"the replicas start from different values of '{name}'" in message


def _double(rank: int, layout: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first loss of ours and of one process."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double(), torch.randn(8, 4, dtype=torch.float64)
    expected = F.mse_loss(model(x), x[:, :1]).detach()
    mesh = mesh_of(**layout) if layout else None
    schedule = create_schedule(model, mesh=mesh, example_inputs={"input": x}, plugins=PLUGINS)
    if "pp" in layout:
        schedule["0"].cut_pipeline_stage()
    engine: Any = build(schedule, "torch", optimizer=SGD, loss_fn=F.mse_loss, microbatches=2, clip=1.0)
    return engine.train_batch(input=x, labels=x[:, :1]), expected


@pytest.mark.multiproc
@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"pp": 2}], ids=str)
def test_the_loss_of_a_double_precision_model_is_double(layout: dict[str, int]) -> None:
    for found, expected in run_distributed(_double, 2 if layout else 1, layout):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
