"""Random numbers on many ranks: equal where tensors are replicated, different where they are sharded.

The default generators are seeded alike in one tensor-parallel group; a tracker keeps further states, one per name, that
sharded regions run in. CPU generators and those of the current CUDA device are handled together.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

MODEL_PARALLEL_RNG = "model-parallel-rng"
"""Name of the state that differs between the ranks of one tensor-parallel group."""

DeviceStates = dict[str, torch.Tensor]
"""Generator state per device, e.g. ``{"cpu": ..., "cuda:0": ...}``."""


class RNGTracker:
    """Named generator states beside the default one.

    Attributes:
        seeds: What each of them started from.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.seeds: dict[str, int] = {}
        self._states: dict[str, DeviceStates] = {}
        self._forks: list[tuple[str, DeviceStates]] = []

    def add(self, name: str, seed: int) -> None:
        """Add a state that starts from ``seed``; a name or a seed that is there already is a ``ValueError``."""
        if name in self.seeds:
            raise ValueError(f"random state {name!r} exists already; reset() forgets all of them")
        if seed in self.seeds.values():
            raise ValueError(f"seed {seed} is taken by another random state; equal seeds give equal numbers")
        self.seeds[name] = seed
        self._states[name] = {}

    def get_states(self) -> dict[str, DeviceStates]:
        """The states by name, as of the last time each was left."""
        return {name: dict(states) for name, states in self._states.items()}

    def set_states(self, states: Mapping[str, DeviceStates]) -> None:
        """Put back what ``get_states`` gave; names that were added since are kept as they are."""
        unknown = sorted(set(states) - set(self.seeds))
        if unknown:
            raise KeyError(f"no random state {unknown[0]!r}; add it first, known: {', '.join(self.seeds) or 'none'}")
        self._states.update({name: dict(devices) for name, devices in states.items()})

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Run a block in a named state, which advances; the state outside is left untouched.

        A fork of the name that is being run already goes on in it.

        Raises:
            KeyError: Nobody added that name; ``set_random_seed`` adds the default one.
        """
        if name not in self.seeds:
            raise KeyError(f"no random state {name!r}; call set_random_seed(...) or get_cuda_rng_tracker().add({name!r}, seed)")
        active = [forked for forked, _ in self._forks]
        if active and active[-1] == name:
            yield
            return
        if name in active:
            raise ValueError(f"random state {name!r} is forked again inside a fork of {active[-1]!r}; it would repeat numbers")
        self._forks.append((name, _device_states()))
        _restore(self._states[name], self.seeds[name])
        try:
            yield
        finally:
            self._states[name] = _device_states()
            _restore(self._forks.pop()[1])

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Run a block in the state outside of the innermost fork, which advances; no fork, no effect."""
        if not self._forks:
            yield
            return
        name, outer = self._forks.pop()
        inner = _device_states()
        _restore(outer)
        try:
            yield
        finally:
            self._forks.append((name, _device_states()))
            _restore(inner)


@dataclass(frozen=True)
class RNGState:
    """Everything that decides which numbers come next: the default generators, the tracker's states, the open forks."""

    devices: DeviceStates
    tracked: dict[str, DeviceStates]
    forks: tuple[tuple[str, DeviceStates], ...]


_TRACKER = RNGTracker()


def get_cuda_rng_tracker() -> RNGTracker:
    """The tracker of this process; despite its established name it works on CPU too."""
    return _TRACKER


def is_random_seed_set() -> bool:
    """Return whether ``set_random_seed`` was called in this process, and the tracker not reset since."""
    return MODEL_PARALLEL_RNG in _TRACKER.seeds


def set_random_seed(
    seed: int = 2013,
    dp_rank: int | None = None,
    pp_rank: int | None = None,
    tp_rank: int | None = None,
    always_enable_tp_seed: bool = False,
) -> int:
    """Seed Python's, NumPy's (where loaded) and torch's generators and the tracker for this rank.

    The seed is mixed with a hash of the ranks, so no two places of a mesh share one.

    Args:
        seed: The same number on every rank.
        dp_rank: Data-parallel rank; None where there is no data parallelism.
        pp_rank: Pipeline rank; None where there is no pipeline.
        tp_rank: Tensor-parallel rank; it enters the tracker's state, which sharded regions fork.
        always_enable_tp_seed: Let it enter the default state too, as sequence parallelism needs.

    Returns:
        Seed of this rank's default generators; ``seed`` itself when no rank enters it.
    """
    outer = {"dp": dp_rank, "pp": pp_rank}
    own = _mix(seed, **outer, tp=tp_rank if always_enable_tp_seed else None)
    random.seed(own)
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    if numpy_random is not None:
        numpy_random.seed(own % 2**32)
    torch.manual_seed(own)
    _TRACKER.reset()
    _TRACKER.add(MODEL_PARALLEL_RNG, _mix(seed, **outer, tp=tp_rank or 0, fork=1))
    return own


def rng_state() -> RNGState:
    """The random state of this process, for ``set_rng_state``; a recompute starts from the forward's."""
    return RNGState(_device_states(), _TRACKER.get_states(), tuple((name, dict(outer)) for name, outer in _TRACKER._forks))


def set_rng_state(state: RNGState) -> None:
    """Put back what ``rng_state`` gave, open forks included; call it at the same depth of forks or restore before leaving."""
    _restore(state.devices)
    _TRACKER.set_states(state.tracked)
    _TRACKER._forks = [(name, dict(outer)) for name, outer in state.forks]


def _mix(seed: int, **ranks: int | None) -> int:
    given = {axis: rank for axis, rank in ranks.items() if rank is not None}
    if not given:
        return seed
    digest = hashlib.blake2b(repr((seed, sorted(given.items()))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _device_states() -> DeviceStates:
    states = {"cpu": torch.get_rng_state()}
    if (device := _cuda_device()) is not None:
        states[f"cuda:{device}"] = torch.cuda.get_rng_state(device)
    return states


def _restore(states: Mapping[str, torch.Tensor], seed: int | None = None) -> None:
    """Set the generators; a device without a state starts from ``seed``, when one is given."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    elif seed is not None:
        torch.default_generator.manual_seed(seed)
    device = _cuda_device()
    if device is not None and f"cuda:{device}" in states:
        torch.cuda.set_rng_state(states[f"cuda:{device}"], device)
    elif device is not None and seed is not None:
        torch.cuda.manual_seed(seed)


def _cuda_device() -> int | None:
    """The current CUDA device; None while CUDA is idle, as asking for its state would create a context."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
