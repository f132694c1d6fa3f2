"""Random states of tensor-parallel ranks while a model runs that nothing trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slapo_core import MODEL_PARALLEL_RNG, get_cuda_rng_tracker


@contextmanager
def tracked_random_states() -> Iterator[None]:
    """Provide the states that ``set_random_seed`` makes, in a block, and restore those from before.

    Training draws dropout masks from them, so without a state a model on several tensor-parallel ranks does not run.
    """
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    if not before:
        tracker.add(MODEL_PARALLEL_RNG, 0)
    try:
        yield
    finally:
        if before:
            tracker.set_states(before)
        else:
            tracker.reset()
