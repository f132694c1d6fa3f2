"""Reentrant checkpoints run their forward without gradients, so that nothing shows of these when a first run is looked at.

While one is, they run as the other kind does: with the same memory, numbers and gradients, and a forward that has a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint


class _NonReentrantCheckpoint:
    """In the place of torch's function of autograd.

    Args:
        reentrant: That one.
    """

    def __init__(self, reentrant: Any) -> None:
        self.reentrant = reentrant

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run the function; one that is given nothing with a gradient has none, as before."""
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        return self.reentrant.apply(function, preserve_rng_state, *args)


@contextmanager
def run_as_non_reentrant() -> Iterator[None]:
    """Run reentrant checkpoints as the other kind."""
    reentrant = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _NonReentrantCheckpoint(reentrant)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]
