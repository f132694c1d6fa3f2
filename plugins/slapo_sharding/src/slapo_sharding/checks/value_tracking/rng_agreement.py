"""Comparison of random draws between ranks: draws for shards must differ, draws for replicated values must be equal."""

from __future__ import annotations

import hashlib

import torch

from slapo_core import rng_state

from ...communication import collectives
from ...communication._torch_autograd import no_functions
from ...communication._torch_private import no_modes
from ...communication.collectives import Group


class GeneratorSnapshot:
    """Generator states before a function that may draw; empty inside ``fork_rng``, where ranks differ on purpose."""

    def __init__(self) -> None:
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        state = None if is_captured else rng_state()
        self.before = {} if state is None or state.forks else state.devices

    def advanced_states(self) -> list[torch.Tensor]:
        """Return the states of the generators that have advanced since."""
        if not self.before:
            return []
        with no_functions(), no_modes(), torch.no_grad():
            after = rng_state().devices
            return [state for device, state in self.before.items() if not torch.equal(after[device], state)]

    def is_same_on_ranks(self, group: Group, device: torch.device) -> bool:
        """Return whether the advanced generators had the same states on all ranks. Collective over the group."""
        with no_functions(), no_modes(), torch.no_grad():
            states = b"".join(state.numpy().tobytes() for state in self.advanced_states())
            digest = hashlib.blake2b(states, digest_size=7).digest()
            own = torch.tensor([int.from_bytes(digest, "big")], device=device)
            everywhere = collectives.all_gather(own, 0, group)
            return bool((everywhere == own).all())
