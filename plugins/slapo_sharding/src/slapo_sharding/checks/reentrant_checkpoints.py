"""Non-reentrant execution of reentrant checkpoints during the first run.

Reentrant checkpoints run their forward without gradients, so a check could not track these. The non-reentrant kind has the same
memory, values and gradients, and its forward records a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import checkpoint


@contextmanager
def run_as_non_reentrant() -> Iterator[None]:
    """Run reentrant checkpoints as non-reentrant ones in the block."""
    reentrant: Any = checkpoint.CheckpointFunction

    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run the function; without an input that needs a gradient it runs reentrant, and its output has no gradient."""
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        return reentrant.apply(function, preserve_rng_state, *args)

    checkpoint.CheckpointFunction = SimpleNamespace(apply=apply)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]
