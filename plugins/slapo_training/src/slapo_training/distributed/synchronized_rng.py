"""Equal random numbers on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def synchronized_rng(groups: Iterable[dist.ProcessGroup], device: str) -> Iterator[None]:
    """Context in which all ranks use the first rank's random numbers. Collective over each group in turn.

    Afterwards, ranks that had the first rank's random state keep its new state; other ranks restore their old state.
    """
    own = _state(device)
    first = own.clone()
    for group in groups:
        dist.broadcast(first, group=group, group_src=0)
    is_same = torch.equal(own, first)
    if not is_same:
        _set_state(first, device)
    try:
        yield
    finally:
        if not is_same:
            _set_state(own, device)


def _state(device: str) -> torch.Tensor:
    states = [torch.get_rng_state()]
    if device == "cuda":
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states).to(device)


def _set_state(state: torch.Tensor, device: str) -> None:
    size = torch.get_rng_state().numel()
    state = state.cpu()
    torch.set_rng_state(state[:size])
    if device == "cuda":
        torch.cuda.set_rng_state(state[size:])
