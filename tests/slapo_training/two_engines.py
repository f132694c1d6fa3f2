"""A GAN of two engines beside the same in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import slapo
from tests.slapo_torch.layouts import mesh_of


class Net(nn.Module):
    """A generator or a discriminator."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Judged(nn.Module):
    """A generator's loss, through the discriminator."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return told(self.discriminator(self.generator(x)), x.new_ones(len(x), 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def told(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(outputs, labels)


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for rows in (8, 4, 12):
        yield torch.randn(rows, 4, generator=generator), torch.randn(rows, 8, generator=generator)


def mixed(real: torch.Tensor, fake: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both kinds by turns, and their labels."""
    x = torch.stack([real, fake], 1).flatten(0, 1)
    return x, torch.tensor([1.0, 0.0]).repeat(len(real))[:, None]


def in_one_process(generator: nn.Module, discriminator: nn.Module) -> list[tuple[float, float]]:
    first, second = sgd(discriminator.parameters()), sgd(generator.parameters())
    found = []
    for z, real in data():
        first.zero_grad()
        x, y = mixed(real, generator(z).detach())
        (one := told(discriminator(x), y)).backward()
        first.step()
        second.zero_grad()
        (other := told(discriminator(generator(z)), torch.ones(len(z), 1))).backward()
        second.step()
        found.append((one.item(), other.item()))
    return found


def differences(rank: int, target: str, layout: dict[str, int], options: dict[str, Any], kind: str) -> float | str:
    """Largest difference of losses, or what is said.

    Args:
        rank: Not used.
        target: Of both engines.
        layout: Of their mesh.
        options: Of their builds.
        kind: ``"loss"`` for a generator whose loss function calls the discriminator's engine, ``"model"`` for a model of both.
    """
    try:
        return _differences(target, mesh_of(**layout), options, kind)
    except slapo.BuildError as err:
        return str(err)


def _differences(target: str, mesh: Any, options: dict[str, Any], kind: str) -> float:
    torch.manual_seed(0)
    generator, discriminator = Net(4, 8), Net(8, 1)
    expected = in_one_process(copy.deepcopy(generator), copy.deepcopy(discriminator))

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]

    def scheduled(module: nn.Module, size: int, path: str) -> Any:
        schedule = slapo.create_schedule(module, mesh=mesh, example_inputs={"x": torch.ones(4, size)})
        if mesh["tp"].size() > 1:
            schedule[path].tensor_parallel()
        return schedule

    judge = slapo.build(scheduled(discriminator, 8, "net"), target, optimizer=sgd, loss_fn=told, **options)
    if kind == "model":
        schedule = scheduled(Judged(generator, discriminator), 4, "generator")
        trained = slapo.build(schedule, target, optimizer=lambda _: sgd(list(generator.parameters())), **options)
    else:
        by_engine = {"loss_fn": lambda fake, labels: told(judge.module(fake), labels)}
        trained = slapo.build(scheduled(generator, 4, "net"), target, optimizer=sgd, **by_engine, **options)
    worst = 0.0
    for (z, real), (one, other) in zip(data(), expected, strict=True):
        with torch.no_grad():
            x, y = mixed(real, generator(z))
        worst = max(worst, abs(judge.train_batch(x=part(x), labels=part(y)).item() - one))
        ones = {"labels": torch.ones(len(part(z)), 1)} if kind == "loss" else {}
        worst = max(worst, abs(trained.train_batch(x=part(z), **ones).item() - other))
    return worst
