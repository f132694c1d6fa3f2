"""Megatron-Core on a CPU, for tests and dry runs: Megatron asks for CUDA by name where it means the model's device.

Megatron's files are not changed. Replaced functions look at their caller and behave as before for all other modules. On
exit the originals are restored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from slapo_core import BuildError, get_logger

from ._megatron_private import cuda_rng_functions

_CPU = torch.device("cpu")


@contextmanager
def cpu_mode() -> Iterator[None]:
    """Let Megatron-Core run on this process's CPU inside; contexts may be nested.

    Limits: Megatron's random states are the CPU's, so dropout that Megatron draws by itself differs from a GPU's. There are
    no streams.

    Raises:
        BuildError: there is a CUDA device.
    """
    if torch.cuda.is_available():
        raise BuildError("the CPU mode of target 'megatron' is for machines without CUDA; make the mesh of 'cuda' here")
    if _Depth.now:
        yield
        return
    if not _Depth.told:
        say = get_logger().warning if not dist.is_initialized() or dist.get_rank() == 0 else get_logger().debug
        say("megatron-core runs in Slapo's CPU mode: for tests and dry runs, it says nothing about speed")
        _Depth.told = True
    with ExitStack() as stack:
        for owner, name, stand_in in _stand_ins():
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, _for_megatron(original, stand_in))
        _Depth.mode = stack.enter_context(_NoCuda())
        _Depth.now += 1
        try:
            yield
        finally:
            _Depth.now, _Depth.mode = _Depth.now - 1, None


@contextmanager
def without_mode() -> Iterator[None]:
    """Leave the CPU mode inside, for code that is not Megatron's: the mode would slow its calls of torch."""
    if (mode := _Depth.mode) is None:
        yield
        return
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    _Depth.mode = None
    try:
        yield
    finally:
        _Depth.mode = mode.__enter__()  # type: ignore[no-untyped-call]


def mode_of(device_type: str) -> AbstractContextManager[None]:
    """Return the context for calls of Megatron on a type of device."""
    return cpu_mode() if device_type == "cpu" else nullcontext()


class _Depth:
    """State of the CPU mode in this process: nesting depth, and True in ``told`` after the warning."""

    now = 0
    told = False
    mode: TorchFunctionMode | None = None


class _NoCuda(TorchFunctionMode):
    """Mode that puts Megatron's new or moved tensors on the CPU, and reports CUDA tensor types, which Megatron compares."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if not _is_megatron(sys._getframe(1)):
            return func(*args, **given)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not given:
            return func(*args).replace("torch.", "torch.cuda.")
        if _is_cuda(given.get("device")):
            given = {**given, "device": _CPU}
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(value) else value for value in args)
        return func(*args, **given)


def _stand_ins() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield owner, name and replacement: of CUDA's functions, and of Megatron's RNG functions that bypass them."""
    of_cuda: dict[str, Callable[..., Any]] = {
        "current_device": lambda: _CPU,
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda *args, **kwargs: None,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": lambda number: torch.default_generator.manual_seed(number),
    }
    yield from ((torch.cuda, name, stand_in) for name, stand_in in of_cuda.items())
    for_reading, for_writing = cuda_rng_functions()
    yield *for_reading, of_cuda["get_rng_state"]
    yield *for_writing, of_cuda["set_rng_state"]


def _for_megatron(original: Any, stand_in: Callable[..., Any]) -> Any:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if _is_megatron(sys._getframe(1)) else original)(*args, **kwargs)

    return dispatch


def _is_megatron(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("megatron.")


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.partition(":")[0] == "cuda") or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
