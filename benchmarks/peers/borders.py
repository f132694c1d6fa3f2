"""Cost of packing and unpacking the values that cross between two stages, on each engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

from slapo_core import Boundary

Shape = tuple[int, int, int]
HIDDEN: dict[str, Shape] = {"128 KiB": (1, 128, 256), "2 MiB": (4, 512, 256)}
"""Shapes of the hidden states, (rows, tokens, features)."""


class Costs(NamedTuple):
    """Microseconds of a boundary, and of one copy of its bytes: Megatron sends one tensor for all of them."""

    pack: float
    unpack: float
    both: float
    copy: float


def measure_border(rank: int, target: str, shape: Shape) -> Costs:
    """In this process; of ``(hidden, mask, None)``, where what is not a tensor is in the stages' plan and does not cross."""
    torch.set_num_threads(1)
    values = (torch.randn(shape, requires_grad=True), torch.ones(shape[0], 1, 1, shape[1], dtype=torch.bool))
    names = zip(("hidden", "mask"), values, strict=True)
    planned = tuple(Boundary(name, tuple(of.shape), of.dtype, requires_grad=of.requires_grad) for name, of in names)
    pack, unpack = _BORDERS[target](planned)
    sent = pack(values)
    for found, given in zip(unpack(sent), values, strict=True):
        assert torch.equal(found, given)
        assert found.requires_grad == given.requires_grad
    flat = [value.detach().view(-1).view(torch.uint8) for value in values]
    functions = (lambda: pack(values), lambda: unpack(sent), lambda: unpack(pack(values)), lambda: torch.cat(flat))
    return Costs(*(_microseconds(function) for function in functions))


def _microseconds(function: Callable[[], Any], calls: int = 500, rounds: int = 9) -> float:
    """The median of several rounds, after one."""
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return median(found[1:])


Planned = tuple[Boundary, ...]
Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _deepspeed(planned: Planned) -> Pair:
    from slapo_deepspeed.pipeline import pack, unpack

    return lambda values: pack(values, planned, 0), lambda sent: unpack(sent, planned, torch.float32)


def _megatron(planned: Planned) -> Pair:
    from slapo_megatron.pipeline import Layout

    layout = Layout(planned, torch.float32, 0, torch.device("cpu"))
    return lambda values: layout.pack(values, layout.size), layout.unpack


_BORDERS: dict[str, Callable[[Planned], Pair]] = {"deepspeed": _deepspeed, "megatron": _megatron}
