"""Non-reentrant execution of reentrant checkpoints during the first run.

Reentrant checkpoints run their forward without gradients, so a check could not track these. The non-reentrant kind has the same
memory, values and gradients, and its forward records a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint


class _NonReentrantCheckpoint:
    """Replacement of ``torch.utils.checkpoint.CheckpointFunction``, which is ``reentrant``."""

    def __init__(self, reentrant: Any) -> None:
        self.reentrant = reentrant

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run the function; without an input that needs a gradient it runs reentrant, and its output has no gradient."""
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        return self.reentrant.apply(function, preserve_rng_state, *args)


@contextmanager
def run_as_non_reentrant() -> Iterator[None]:
    """Run reentrant checkpoints as non-reentrant ones in the block."""
    reentrant = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _NonReentrantCheckpoint(reentrant)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]
