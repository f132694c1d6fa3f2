"""Random numbers drawn for a value of which each rank has a part: equal on all ranks, they are not those of the whole."""

from __future__ import annotations

import hashlib

import torch

from slapo_core.random import rng_state

from . import collectives
from ._torch_autograd import no_functions
from .followed import Followed


class Draw:
    """The states of the generators before a function runs that may draw. In a forked region ranks differ as they are to."""

    def __init__(self) -> None:
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        state = None if is_captured else rng_state()
        self.before = {} if state is None or state.forks else state.devices

    def is_alike(self, value: Followed) -> bool:
        """Whether it has drawn for this value, from the same state on every rank that has a part of it.

        All ranks that draw ask each other: seeds of their own are as good as a fork.
        """
        if not self.before:
            return False
        with no_functions(), torch.no_grad():
            after = rng_state().devices
            drawn_from = [state for device, state in self.before.items() if not torch.equal(after[device], state)]
            return bool(drawn_from) and self._is_everywhere(drawn_from, value)

    def _is_everywhere(self, drawn_from: list[torch.Tensor], value: Followed) -> bool:
        digest = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in drawn_from), digest_size=7).digest()
        own = torch.tensor([int.from_bytes(digest, "big")], device=value.layout.device)
        everywhere = collectives.all_gather(own, 0, value.group)
        return bool((everywhere == own).all())
