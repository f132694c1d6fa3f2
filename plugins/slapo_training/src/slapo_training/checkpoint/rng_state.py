"""States of this process's random generators as plain data: torch, the CUDA RNG tracker, Python and NumPy."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from slapo_core import BuildError, RNGState, get_cuda_rng_tracker, rng_state, set_rng_state


def collect() -> dict[str, Any]:
    """Return the states of the generators that ``set_random_seed`` seeds."""
    now, numpy = rng_state(), _numpy_random()
    kept = None
    if numpy is not None:
        kind, words, *rest = numpy.get_state()
        kept = (str(kind), words.tolist(), *rest)
    return {"devices": now.devices, "tracked": now.tracked, "python": random.getstate(), "numpy": kept}


def check(saved: Mapping[str, Any]) -> None:
    """Raise ``BuildError`` if a named state is missing in this process's tracker, or numpy is not imported."""
    if missing := sorted(set(saved["tracked"]) - set(get_cuda_rng_tracker().get_states())):
        raise BuildError(f"the checkpoint has the random state {missing[0]!r}, this process has not; call set_random_seed")
    if saved["numpy"] is not None and _numpy_random() is None:
        raise BuildError("the checkpoint has NumPy's random state, but numpy is not loaded here; import numpy first")


def restore(saved: Mapping[str, Any]) -> None:
    """Restore saved states; a GPU's state goes to the current GPU, whatever its index."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    tracked = {name: on_device(states, device) for name, states in saved["tracked"].items()}
    set_rng_state(RNGState(on_device(saved["devices"], device), tracked, ()))
    random.setstate(saved["python"])
    numpy = _numpy_random()
    if numpy is not None and saved["numpy"] is not None:
        numpy.set_state(saved["numpy"])


def on_device(states: Mapping[str, torch.Tensor], device: int | None) -> dict[str, torch.Tensor]:
    """Saved generator states by device, the one used GPU's under another number, or for None left out."""
    if device is None:
        return {name: state for name, state in states.items() if name == "cpu"}
    return {("cpu" if name == "cpu" else f"cuda:{device}"): state for name, state in states.items()}


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def digest_of(saved: Mapping[str, Any]) -> int:
    return int.from_bytes(hashlib.sha256(bytes(saved["devices"]["cpu"].tolist())).digest()[:7], "little")


def reseed(base: int) -> None:
    """Seed all generators by ``base``, equal on all ranks, and their own seeds; seeds that differed still differ."""
    tracker, numpy = get_cuda_rng_tracker(), _numpy_random()
    seeds = {}
    for name in tracker.get_states():
        with tracker.fork(name):
            seeds[name] = _derive_seed(base, torch.initial_seed(), name)
    own = _derive_seed(base, torch.initial_seed(), "")
    tracker.reset()
    for name, seed in seeds.items():
        tracker.add(name, seed)
    random.seed(own)
    torch.manual_seed(own)
    if numpy is not None:
        numpy.seed(own % 2**32)


def _derive_seed(*parts: int | str) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "little")
