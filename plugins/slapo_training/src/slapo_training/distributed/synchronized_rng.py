"""Random numbers that are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def synchronized_rng(groups: Iterable[dist.ProcessGroup], device: str) -> Iterator[None]:
    """Let all ranks of some groups draw the random numbers of the first one inside. Collective over each group in turn.

    Ranks that were where the first one was stay with it; the others go on behind as if nothing had been drawn.

    Args:
        groups: One group along each axis of a mesh.
        device: Type of the ranks' devices.
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
