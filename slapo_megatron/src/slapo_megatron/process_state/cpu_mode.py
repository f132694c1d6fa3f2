"""Megatron-Core on a CPU, for tests and dry runs: it asks for CUDA by name where it means the device of the model.

No file of Megatron's is changed, and nothing is answered differently to anybody else: what stands in asks who calls. All of
it is gone on exit.
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
    """Let Megatron-Core run on this process's CPU inside; may be entered again within itself.

    Limits: its random states are those of the CPU, so that dropout which Megatron draws by itself differs from that on a GPU;
    there are no streams.

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
    """Leave the CPU mode for code that is not Megatron's, whose calls of torch it would slow; back in it behind."""
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
    """What the calls of Megatron need around them on a device of this type."""
    return cpu_mode() if device_type == "cpu" else nullcontext()


class _Depth:
    """Whether this process is inside, and whether that was said."""

    now = 0
    told = False
    mode: TorchFunctionMode | None = None


class _NoCuda(TorchFunctionMode):
    """Tensors that Megatron makes or moves go to the CPU, and their type is spelt as a CUDA tensor's, which it compares."""

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
    """Owner, name and what stands in for it: CUDA's functions, and the two of Megatron's that go past them."""

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    def state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(number)

    of_cuda: dict[str, Callable[..., Any]] = {
        "current_device": lambda: _CPU,
        "synchronize": nothing,
        "empty_cache": nothing,
        "get_rng_state": state,
        "set_rng_state": put,
        "manual_seed": seed,
    }
    yield from ((torch.cuda, name, stand_in) for name, stand_in in of_cuda.items())
    for_reading, for_writing = cuda_rng_functions()
    yield *for_reading, state
    yield *for_writing, put


def _for_megatron(original: Any, stand_in: Callable[..., Any]) -> Any:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if _is_megatron(sys._getframe(1)) else original)(*args, **kwargs)

    return chosen


def _is_megatron(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("megatron.")


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.partition(":")[0] == "cuda") or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
