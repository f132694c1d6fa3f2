"""Random numbers that are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slapo_core.agreement import mesh_groups


@contextmanager
def equal_random_numbers(mesh: DeviceMesh | None) -> Iterator[None]:
    """Let all ranks draw the random numbers of the first one inside. Collective over the mesh.

    Ranks that were where the first one was stay with it; the others go on behind as if nothing had been drawn.
    """
    groups = list(mesh_groups(mesh))
    if mesh is None or not groups:
        yield
        return
    own = _state(mesh.device_type)
    first = own.clone()
    for group in groups:
        dist.broadcast(first, group=group, group_src=0)
    _put(first, mesh.device_type)
    try:
        yield
    finally:
        if not torch.equal(own, first):
            _put(own, mesh.device_type)


def _state(device: str) -> torch.Tensor:
    states = [torch.get_rng_state()]
    if device == "cuda":
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states).to(device)


def _put(state: torch.Tensor, device: str) -> None:
    size = torch.get_rng_state().numel()
    state = state.cpu()
    torch.set_rng_state(state[:size])
    if device == "cuda":
        torch.cuda.set_rng_state(state[size:])
