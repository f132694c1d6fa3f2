"""Gradients of built stages under torch's schedules, for models whose backward torch would split or accumulate wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.nn import functional as F

from slapo_core import build_program
from slapo_pipeline.torch_pipe import build_stage
from slapo_testing import run_distributed

from ..stage_comparison import cut
from ..toy_models import WIDTH

ROWS, PARTS, RANKS = 8, 4, 2
SCHEDULES: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class SharedMemory(nn.Module):
    """Gradients of parameters and of the input that autograd gives one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Parameter(torch.randn(ROWS // PARTS, WIDTH)) for _ in range(3))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x + self.first) + self.one + self.other)


class UsedTwice(nn.Module):
    """A weight on either side of a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Hooked(nn.Linear):
    """A hook on an activation, which scales its gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(super().forward(x))
        x.register_hook(lambda gradient: gradient / 2)
        return x


class Transposed(nn.Linear):
    """The gradient of the input is not contiguous."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.t().contiguous().tanh().t(), self.weight, self.bias)


class Residual(nn.Module):
    """A cut before the sum sends a value that the stage has used itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return x + torch.tanh(self.linear(x))


KINDS: dict[str, Any] = {
    "residual": Residual,
    "shared memory": SharedMemory,
    "used twice": UsedTwice,
    "hooked": lambda: Hooked(WIDTH, WIDTH),
    "transposed": lambda: Transposed(WIDTH, WIDTH),
}


def model(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(KINDS[kind]() for _ in range(2 * RANKS)))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x, target = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    return x, target


def trained(rank: int, kind: str, schedule: str) -> dict[str, torch.Tensor]:
    """Return the gradients of this rank's stages."""
    x, target = data()
    inner = ".linear" if kind == "residual" else ""
    program = build_program(cut(model(kind), {"input": x[: ROWS // PARTS]}, *(f"{index}{inner}" for index in range(3))))
    mine = [rank, 2 * RANKS - 1 - rank] if schedule == "zbv" else [rank, rank + RANKS]
    stages = [build_stage(program, index, "cpu", dist.group.WORLD) for index in mine]
    runtime = SCHEDULES[schedule](stages, PARTS, loss_fn=F.mse_loss)
    has_loss = 2 * RANKS - 1 in mine
    runtime.step(**({"input": x} if rank == 0 else {}), target=target if has_loss else None)
    parameters = (named for index in mine for named in program.stages[index].module.named_parameters())
    return {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}


CASES = [(kind, schedule) for kind in KINDS for schedule in SCHEDULES]
FAST = [*((kind, "zero bubble") for kind in KINDS), ("shared memory", "interleaved"), ("residual", "zbv")]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "schedule"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST)) for case in CASES]
)
def test_gradients_are_those_of_the_model(kind: str, schedule: str) -> None:
    plain, (x, target) = model(kind), data()
    for part, label in zip(x.chunk(PARTS), target.chunk(PARTS), strict=True):
        (F.mse_loss(plain(part), label) / PARTS).backward()
    first, last = run_distributed(trained, RANKS, kind, schedule, timeout=200.0)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert {**first, **last}.keys() == expected.keys()
    for name, gradient in {**first, **last}.items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}")
