"""Small models that hand unusual things from module to module."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 8


class Block(nn.Module):
    """Takes keyword, dict, None and bool arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, mask: Any = None, double: bool = False, extra: Any = None) -> torch.Tensor:
        y = torch.tanh(self.linear(self.norm(x)))
        if mask is not None:
            y = y * mask
        if extra is not None:
            y = y + extra["bias"]
        return x + (2 * y if double else y)


class Skips(nn.Module):
    """The first block's result is used again three blocks later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = Block(), Block(), Block(), Block()
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        a = self.a(x)
        out = self.head(torch.cat([self.d(self.c(self.b(a))), a], -1))
        return {"loss": F.mse_loss(out, labels), "out": out, "nothing": None}


class Opening(nn.Module):
    """Gives a tuple with a dict in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        y = self.linear(x)
        return y, {"bias": y * 0.5, "nothing": None, "number": 3}


@dataclasses.dataclass
class Record:
    """A structure of a model's own."""

    bias: torch.Tensor
    times: int


class ReadsRecord(nn.Module):
    """Takes a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, record: Record) -> torch.Tensor:
        return self.linear(x) + record.bias * record.times


class Structures(nn.Module):
    """Dicts, dataclasses, None, bools and tuples between modules, a tuple of everything at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.opening, self.a, self.b = Opening(), Block(), Block()
        self.first, self.second = ReadsRecord(), ReadsRecord()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[Any, ...]:
        h, extra = self.opening(x)
        h = self.a(h, mask=mask, double=True, extra=extra)
        record = Record(extra["bias"] * 2, 3)
        h = self.first(h, record)
        h = self.b(h, mask=None, extra=extra)
        h = self.second(h, record)
        return h.mean(), [h, None, (extra["bias"],)]


class Regions(nn.Module):
    """Gradients off in places, a frozen weight, parameters and buffers read directly, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 2.0), persistent=False)
        self.a.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.a(x)
        with torch.no_grad():
            gate = self.b(h).sigmoid()
        h = self.norm(h * self.scale)
        with torch.no_grad():
            fixed = self.shift * 2
        h = self.c(h * gate + fixed + self.shift * self.scale)
        return {"loss": h.pow(2).mean(), "gate": gate}


class InPlace(nn.Module):
    """Changes masks, views and received values in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = torch.zeros_like(x)
        row = mask[0]
        mask[:, 2] += 1
        mask.mul_(2)
        h = self.a(x + mask)
        h.add_(mask)
        h = self.b(h)
        h.mul_(2)
        h[:, 0] = 0.5
        h = self.c(h * row + mask)
        return {"loss": h.pow(2).mean(), "h": h}


class Cache:
    """An object that modules change."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


class Remembers(nn.Module):
    """Writes into an object it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.seen.append(x)
        return self.linear(x)


class Stateful(nn.Module):
    """Its modules share an object."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Remembers(), Remembers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        return self.b(self.a(x, cache), cache).mean()


class TwiceNormed(nn.Module):
    """One BatchNorm used before and after a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.norm(self.a(x)))).pow(2).mean()


class Counts(nn.Module):
    """Changes and reads a buffer in chosen places: before, between and after its two parts."""

    def __init__(self, changes: tuple[int, ...], reads: tuple[int, ...], in_eval: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.ones(()))
        self.changes, self.reads, self.in_eval = changes, reads, in_eval

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self._at(1, self.a(self._at(0, x))))
        return self._at(2, x).pow(2).mean()

    def _at(self, place: int, x: torch.Tensor) -> torch.Tensor:
        if place in self.reads:
            x = x * self.calls.clone()
        if place in self.changes and (self.training or self.in_eval):
            self.calls.add_(1)
        return x
