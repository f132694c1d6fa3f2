"""``fork_rng``: different random numbers on each rank in a sharded region."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from slapo_core import MODEL_PARALLEL_RNG, Primitive, Schedule, ScheduleError, get_cuda_rng_tracker
from slapo_tracing.nodes import wrap_forward

from .communication._torch_private import NO_BACKWARD, backward_pass

_UNSEEDED = (
    "fork_rng: there is no state yet to draw this rank's random numbers from; call set_random_seed(seed, tp_rank=...) before "
    "the first forward in training"
)


class ForkRngPrimitive(Primitive):
    """Run a module with random numbers that differ between the ranks of the tensor-parallel group.

    Dropout inside a sharded region needs a different mask on each rank; outside, all ranks must draw the same one. The numbers
    come from the generator state that ``set_random_seed(..., tp_rank=...)`` adds to the tracker. The default state is left
    untouched. The recomputation of a checkpoint draws the same numbers as its forward.

    Args:
        outside: Do the reverse, for a module of replicated values inside a forked one, such as the dropout after an attention's
            output projection: its numbers come from the state outside the fork, equal on all ranks.
    """

    name = "fork_rng"
    scope = "module"

    @staticmethod
    def apply(schedule: Schedule, *, outside: bool = False) -> None:
        """Wrap the forward."""
        wrap_forward(schedule.mod, run_outside if outside else run_forked)


def run_forked(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call inside the tracker's fork.

    Raises:
        ScheduleError: in training, ``set_random_seed`` has not been called; or a recomputation has not restored the tracker's
            state, which torch's own checkpoints do not do.
    """
    if MODEL_PARALLEL_RNG not in get_cuda_rng_tracker().get_states():
        if _is_training(call):
            raise ScheduleError(_UNSEEDED)
        return call(*args, **kwargs)
    with _fork():
        return call(*args, **kwargs)


_last_fork: dict[str, Any] = {"state": None, "backward": NO_BACKWARD}
"""The tracked state of the CPU after the last fork, and the backward pass that it ran in."""


@contextmanager
def _fork() -> Iterator[None]:
    """Enter the tracker's fork; refuse a recomputation that draws without having restored the forward's state."""
    tracker = get_cuda_rng_tracker()
    before, backward = _tracker_states(), backward_pass()
    stale = backward not in (NO_BACKWARD, _last_fork["backward"]) and before.get("cpu") is _last_fork["state"]
    try:
        with tracker.fork():
            yield
    finally:
        after = _tracker_states()
        _last_fork.update(state=after.get("cpu"), backward=backward)
        if stale and any(not torch.equal(after[device], state) for device, state in before.items()):
            raise ScheduleError(
                "fork_rng: a recompute in the backward pass draws different random numbers than the forward did; "
                "recompute with checkpoint() of the schedule, not with torch.utils.checkpoint or "
                "gradient_checkpointing_enable()"
            )


def _tracker_states() -> dict[str, torch.Tensor]:
    return get_cuda_rng_tracker().get_states().get(MODEL_PARALLEL_RNG, {})


def run_outside(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call outside the innermost fork."""
    with get_cuda_rng_tracker().outer_state():
        return call(*args, **kwargs)


def _is_training(call: Any) -> bool:
    while isinstance(call, partial):  # wrappers inside this one
        call = call.args[0]
    return bool(getattr(getattr(call, "__self__", None), "training", True))
