"""Random numbers on many ranks: equal for replicated tensors, different for sharded ones.

The default generators have equal seeds within one tensor-parallel group. A tracker keeps further named states, which sharded
regions run in. The CPU generator and that of the current CUDA device are handled together.
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
    """Named generator states, beside the default one.

    Attributes:
        seeds: Initial seed of each state.

    Example:
        >>> tracker = RNGTracker()
        >>> tracker.add("dropout", seed=7)
        >>> with tracker.fork("dropout"):
        ...     first = torch.rand(2)
        >>> with tracker.fork("dropout"):
        ...     torch.equal(torch.rand(2), first)
        False
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all states."""
        self.seeds: dict[str, int] = {}
        self._states: dict[str, DeviceStates] = {}
        self._forks: list[tuple[str, DeviceStates]] = []

    def add(self, name: str, seed: int) -> None:
        """Add a state with an initial seed.

        Raises:
            ValueError: the name or the seed is in use.
        """
        if name in self.seeds:
            raise ValueError(f"random state {name!r} exists already; reset() forgets all of them")
        if seed in self.seeds.values():
            raise ValueError(f"seed {seed} is taken by another random state; equal seeds give equal numbers")
        self.seeds[name] = seed
        self._states[name] = {}

    def get_states(self) -> dict[str, DeviceStates]:
        """Return the states by name, each as of the last exit from it."""
        return {name: dict(states) for name, states in self._states.items()}

    def set_states(self, states: Mapping[str, DeviceStates]) -> None:
        """Restore the states that ``get_states`` returned. States that were added since are kept.

        Raises:
            KeyError: a state has not been added.
        """
        if unknown := sorted(set(states) - set(self.seeds)):
            raise KeyError(f"no random state {unknown[0]!r}; add it first, known: {', '.join(self.seeds) or 'none'}")
        self._states.update({name: dict(devices) for name, devices in states.items()})

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Run a ``with`` block in a named state, which advances; the default state does not.

        A fork of the state that is active continues it.

        Raises:
            KeyError: no such state; ``set_random_seed`` adds the default one.
            ValueError: the state is active outside of another fork.
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
    def outer_state(self) -> Iterator[None]:
        """Run a ``with`` block in the state outside of the innermost fork, which advances. No effect without a fork."""
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
    """Random state of a process: the default generators, the tracker's states, the open forks.

    Example:
        >>> sorted(rng_state().devices)[0]
        'cpu'
    """

    devices: DeviceStates
    tracked: dict[str, DeviceStates]
    forks: tuple[tuple[str, DeviceStates], ...]


_TRACKER = RNGTracker()


def get_cuda_rng_tracker() -> RNGTracker:
    """Return the tracker of this process. Despite its established name it works on CPU too.

    Example:
        >>> get_cuda_rng_tracker() is get_cuda_rng_tracker()
        True
    """
    return _TRACKER


def is_random_seed_set() -> bool:
    """Return True if ``set_random_seed`` was called in this process, and the tracker was not reset since.

    Example:
        >>> seed = set_random_seed(1)
        >>> is_random_seed_set()
        True
    """
    return MODEL_PARALLEL_RNG in _TRACKER.seeds


def set_random_seed(
    seed: int = 2013,
    dp_rank: int | None = None,
    pp_rank: int | None = None,
    tp_rank: int | None = None,
    always_enable_tp_seed: bool = False,
) -> int:
    """Seed Python's, NumPy's (if imported) and torch's generators and the tracker for this rank.

    The seed is mixed with a hash of the ranks, so that no two coordinates of a mesh share one.

    Args:
        seed: The same number on every rank.
        dp_rank: Data-parallel rank; None without data parallelism.
        pp_rank: Pipeline rank; None without a pipeline.
        tp_rank: Tensor-parallel rank. It affects the tracker's state, which sharded regions fork.
        always_enable_tp_seed: True lets it affect the default state too, as sequence parallelism needs.

    Returns:
        Seed of this rank's default generators; ``seed`` itself if no rank affects it.

    Example:
        >>> set_random_seed(1), set_random_seed(1, tp_rank=1)
        (1, 1)
        >>> set_random_seed(1, dp_rank=0) == set_random_seed(1, dp_rank=1)
        False
    """
    outer = {"dp": dp_rank, "pp": pp_rank}
    own = _mix_seed(seed, **outer, tp=tp_rank if always_enable_tp_seed else None)
    random.seed(own)
    if (numpy_random := getattr(sys.modules.get("numpy"), "random", None)) is not None:
        numpy_random.seed(own % 2**32)
    torch.manual_seed(own)
    _TRACKER.reset()
    _TRACKER.add(MODEL_PARALLEL_RNG, _mix_seed(seed, **outer, tp=tp_rank or 0, fork=1))
    return own


def rng_state() -> RNGState:
    """Return the random state of this process, for ``set_rng_state``. Recomputation starts from the state of the forward.

    Example:
        >>> state = rng_state()
        >>> first = torch.rand(2)
        >>> set_rng_state(state)
        >>> torch.equal(torch.rand(2), first)
        True
    """
    return RNGState(_device_states(), _TRACKER.get_states(), tuple((name, dict(outer)) for name, outer in _TRACKER._forks))


def set_rng_state(state: RNGState) -> None:
    """Restore the random state that ``rng_state`` returned, including open forks.

    Call it at the same depth of forks, or restore the present state before leaving the fork.

    Example:
        >>> set_rng_state(rng_state())
    """
    _restore(state.devices)
    _TRACKER.set_states(state.tracked)
    _TRACKER._forks = [(name, dict(outer)) for name, outer in state.forks]


def _mix_seed(seed: int, **ranks: int | None) -> int:
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
    """Set the generators; a device without a state starts from ``seed``, if given."""
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
    """Return the current CUDA device; None while CUDA is uninitialised, since asking for its state would create a context."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
