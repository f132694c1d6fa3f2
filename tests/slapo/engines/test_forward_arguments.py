"""Engines, programs and checks take what a model's forward takes: by position, by keyword, and both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo
from slapo_core import BuildError, VerifyError
from slapo_testing import run_distributed
from tests.slapo_torch.layouts import mesh_of

WIDTH, ROWS = 4, 8


class ByPosition(nn.Module):
    """Takes its first argument by position alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, /, scale: torch.Tensor, *, power: int = 1) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)) * scale) ** power


class Several(ByPosition):
    """Takes any number of tensors."""

    def forward(self, *xs: torch.Tensor, power: int = 1) -> torch.Tensor:  # type: ignore[override]
        return self.b(torch.tanh(self.a(xs[0])) * xs[1]) ** power


def model(cls: type[nn.Module] = ByPosition) -> nn.Module:
    torch.manual_seed(1)
    return cls()


def tensors(rows: int = ROWS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(ROWS, WIDTH, generator=generator)[:rows] for _ in range(3)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def expected(cls: type[nn.Module] = ByPosition) -> list[float]:
    """Losses of two steps of the unmodified model."""
    plain, (x, scale, labels), losses = model(cls), tensors(), []
    for _ in range(2):
        loss = F.mse_loss(plain(x, scale, power=2), labels)
        plain.zero_grad()
        loss.backward()
        sgd(plain.parameters()).step()
        losses.append(loss.item())
    return losses


def trained(rank: int, cls: type[nn.Module], layout: dict[str, int]) -> dict[str, list[float]]:
    """Losses of two steps of each engine, whose batches are given in two ways."""
    mesh = mesh_of(**layout)
    part = slice(rank * 4, rank * 4 + 4) if "dp" in layout else slice(None)
    x, scale, labels = (tensor[part] for tensor in tensors())
    found = {}
    for target in ("torch", "deepspeed", "megatron"):
        sch = slapo.create_schedule(model(cls), mesh=mesh, example_inputs=((x[:2], scale[:2]), {"power": 2}))
        if "pp" in layout:
            sch["a"].cut_pipeline_stage()
        engine: Any = slapo.build(sch, target, optimizer=sgd, loss_fn=F.mse_loss, microbatches=2)
        second = {"scale": scale} if cls is ByPosition else {}
        first = engine.train_batch(x, scale, labels=labels, power=2)
        found[target] = [
            first.item(),
            engine.train_batch(x, *([] if second else [scale]), **second, labels=labels, power=2).item(),
        ]
        assert engine.eval_batch(x, scale, power=2, labels=labels) < first
        if cls is ByPosition:
            with pytest.raises(
                BuildError, match="positional arguments are given, but the forward of ByPosition takes x, scale by"
            ):
                engine.eval_batch(x, scale, scale, labels)
        engine.close()
    return found


LAYOUTS = [({"pp": 2}, ByPosition), ({"dp": 2}, ByPosition), ({"pp": 2}, Several), ({"dp": 2}, Several)]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("layout", "cls"),
    [pytest.param(layout, cls, marks=[pytest.mark.slow] * (index > 0)) for index, (layout, cls) in enumerate(LAYOUTS)],
)
def test_engines_take_what_the_forward_takes(layout: dict[str, int], cls: type[nn.Module]) -> None:
    losses = expected(cls)
    for found in run_distributed(trained, 2, cls, layout, timeout=110):
        for target, each in found.items():
            assert each == pytest.approx(losses, abs=1e-5), target


@pytest.mark.parametrize("cls", [ByPosition, Several])
def test_one_process(cls: type[nn.Module]) -> None:
    x, scale, labels = tensors()
    engine: Any = slapo.build(slapo.create_schedule(model(cls)), "torch", optimizer=sgd, loss_fn=F.mse_loss, microbatches=2)
    losses = [engine.train_batch(x, scale, power=2, labels=labels).item() for _ in range(2)]
    assert losses == pytest.approx(expected(cls), abs=1e-5)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("cls", [ByPosition, Several])
@pytest.mark.parametrize("how", ["tuple", "call"])
def test_a_program_takes_what_the_forward_takes(cls: type[nn.Module], cut: bool, how: str) -> None:
    (x, scale, _), scheduled = tensors(), model(cls)
    plain = copy.deepcopy(scheduled)
    sch = slapo.create_schedule(scheduled, example_inputs=(x, scale) if how == "tuple" else ([x, scale], {"power": 2}))
    if cut:
        sch["a"].cut_pipeline_stage()
    program = slapo.build_program(sch)
    for call in [((x, scale), {"power": 2}), ((x[:3], scale[:3]), {})]:
        found, wanted = program(*call[0], **call[1]), plain(*call[0], **call[1])
        torch.testing.assert_close(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(scheduled.get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("cut", [False, True])
def test_one_tensor_is_enough(cut: bool) -> None:
    scheduled = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    plain, x = copy.deepcopy(scheduled), tensors()[0]
    sch = slapo.create_schedule(scheduled, example_inputs=x)
    if cut:
        sch.pipeline(2)
    torch.testing.assert_close(slapo.build_program(sch)(x), plain(x))
    assert slapo.verify(plain, sch)


def test_verify_and_budgets_take_every_way() -> None:
    x, scale, labels = tensors()
    plain = model()
    for inputs in ((x, scale), {"x": x, "scale": scale}, ((x,), {"scale": scale, "power": 2})):
        sch = slapo.create_schedule(copy.deepcopy(plain), example_inputs=inputs)
        with slapo.Verify(sch, inputs):
            sch["a"].checkpoint()
        assert slapo.verify(plain, sch, inputs)
        report = slapo.verify_engine(plain, sch, ((x, scale), {"labels": labels}), "torch", loss_fn=F.mse_loss, microbatches=2)
        assert report, report
    with pytest.raises(VerifyError, match="the batch does not fit: 3 positional arguments are given"):
        slapo.verify_engine(plain, sch, (x, scale, labels))
    with pytest.raises(VerifyError, match="batch is 5; give the arguments of the model's forward"):
        slapo.verify_engine(plain, sch, 5)
