"""What packing the values that cross between two stages costs on each engine, and unpacking them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

from slapo_core.program import Boundary

HIDDEN, MASK = (4, 512, 256), (4, 1, 1, 512)
PLANNED = (
    Boundary("hidden", HIDDEN, torch.float32, requires_grad=True),
    Boundary("mask", MASK, torch.bool, requires_grad=False),
)
"""Of ``(hidden, mask, None)``: what is no tensor is in the stages' plan and does not cross."""


class Costs(NamedTuple):
    """Microseconds of a boundary, and of one copy of its bytes: Megatron sends one tensor for all of them."""

    pack: float
    unpack: float
    both: float
    copy: float


def measure_border(rank: int, target: str) -> Costs:
    """In this process."""
    torch.set_num_threads(1)
    values = (torch.randn(HIDDEN, requires_grad=True), torch.ones(MASK, dtype=torch.bool))
    pack, unpack = _BORDERS[target]()
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


Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _deepspeed() -> Pair:
    from slapo_deepspeed.border import pack, unpack

    return lambda values: pack(values, PLANNED, 0), lambda sent: unpack(sent, PLANNED, torch.float32)


def _megatron() -> Pair:
    from slapo_megatron.carrier import Layout

    layout = Layout(PLANNED, torch.float32, 0, torch.device("cpu"))
    return lambda values: layout.pack(values, layout.size), layout.unpack


_BORDERS: dict[str, Callable[[], Pair]] = {"deepspeed": _deepspeed, "megatron": _megatron}
