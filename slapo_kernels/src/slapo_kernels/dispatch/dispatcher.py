"""Which implementation of a kernel computes what, where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slapo_core import PluginError, ScheduleError, SlapoError, get_logger

from ..implementations import eager, native
from ..implementations._torch_private import is_dry_run
from .argument_errors import misuse
from .implementation import Function, Implementation
from .kernels import KERNELS
from .registry import VARIABLE, check_kernel, table

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WEIGHED = {name: kernel.weighed for name, kernel in KERNELS.items()}

Key = tuple[str, "str | None", str, torch.dtype]
Candidate = tuple[Function, Implementation]
_chosen: dict[Key, tuple[Candidate, ...]] = {}
_logged: set[tuple[str, str, str]] = set()


def kernel_names() -> tuple[str, ...]:
    """All kernels."""
    return tuple(KERNELS)


def run(kernel: str, *args: Any, choice: str | None = None, **kwargs: Any) -> Any:
    """Compute a kernel, with the first implementation that can, where the tensors are.

    While a model is traced, and for subclasses of tensors, that is the eager one, unless another is chosen for the latter;
    ``torch.compile`` is shown operations of torch, unless another package's are chosen.

    Args:
        kernel: Its name.
        args: As the eager implementation takes them.
        choice: The implementation to use; default: what ``SLAPO_KERNELS`` says, else the first that is usable.
        kwargs: As the eager implementation takes them.

    Raises:
        ScheduleError: the chosen implementation cannot be used here; no such kernel; or arguments that it does not take.
    """
    if torch.compiler.is_compiling():
        return _for_compiler(kernel, choice)(*args, **kwargs)
    try:
        return _run(kernel, choice, args, kwargs)
    except SlapoError:
        raise
    except Exception as error:
        if why := misuse(kernel, choice, args, kwargs):
            raise ScheduleError(why) from error
        raise


def _run(kernel: str, choice: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[_WEIGHED.get(kernel, 0)]
    if type(tensor) not in _PLAIN:
        if choice is None or is_dry_run(tensor):
            choice = "eager"
    elif is_dry_run():
        choice = "eager"
    key = kernel, choice, tensor.device.type, tensor.dtype
    for function, implementation in _chosen.get(key) or _candidates(key):
        if implementation.refuses is not None and implementation.refuses(*args, **kwargs):
            continue
        if implementation.avoids is not None and implementation.avoids(*args, **kwargs):
            continue
        return function(*args, **kwargs)
    return _forced(key, args, kwargs)


def _for_compiler(kernel: str, choice: str | None) -> Function:
    """What ``torch.compile`` is shown: operations that it can fuse itself, or the one that is chosen."""
    if not hasattr(eager, kernel):
        check_kernel(kernel)
    module = native if choice in (None, "native") and hasattr(native, kernel) else eager
    if choice in (None, "inductor", "native", "eager"):
        function: Function = getattr(module, kernel)
        return function
    return table().load(table().get(kernel, choice))


def choose(kernel: str, device: torch.device | str, dtype: torch.dtype | None, forced: str | None = None) -> Implementation:
    """The implementation that computes a kernel.

    Args:
        kernel: Its name.
        device: Where the tensors are.
        dtype: Theirs; None: any.
        forced: Its name; default: what ``SLAPO_KERNELS`` says, else the first that is usable.

    Raises:
        ScheduleError: no such kernel, implementation, device or dtype, or the forced one cannot be used: its package is
            missing, or it works elsewhere.
        PluginError: the forced one cannot be imported, or two plugins provide it.
    """
    return _choose(kernel, _kind(device, dtype), dtype, forced)


@dataclass(frozen=True)
class Explanation:
    """An implementation, and whether it can be used.

    Args:
        implementation: Which.
        lacks: Why it cannot be used; None where it can.
        chosen: Whether it is the one that is used.
    """

    implementation: Implementation
    lacks: str | None
    chosen: bool


def explain(kernel: str, device: torch.device | str, dtype: torch.dtype | None = None) -> list[Explanation]:
    """The implementations of a kernel in order of preference, and why each can be used or not.

    Args:
        kernel: Its name.
        device: Where the tensors would be.
        dtype: Theirs; None: any.

    Raises:
        ScheduleError: no such kernel, device or dtype, or ``SLAPO_KERNELS`` forces one that cannot be used.
    """
    kind = _kind(device, dtype)
    chosen = _choose(kernel, kind, dtype, None)
    return [Explanation(each, _lacks(each, kind, dtype), each == chosen) for each in table().implementations(kernel, kind)]


def reset() -> None:
    """Forget what was chosen: plugins and ``SLAPO_KERNELS`` are read again."""
    table.cache_clear()
    _chosen.clear()
    _logged.clear()


def _kind(device: torch.device | str, dtype: torch.dtype | None) -> str:
    """The type of a device.

    Raises:
        ScheduleError: there is no such device, or no such dtype.
    """
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise ScheduleError(f"{dtype!r} is no dtype; give one such as torch.bfloat16, or None for any")
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ScheduleError(f"{device!r} is no device; give one such as 'cpu' or 'cuda:0'") from error


def _choose(kernel: str, device: str, dtype: torch.dtype | None, forced: str | None) -> Implementation:
    check_kernel(kernel)
    by_variable = table().forced.get(kernel) if forced is None else None
    name = forced if forced is not None else by_variable
    if name is None:
        return next(each for each in table().implementations(kernel, device) if _lacks(each, device, dtype) is None)
    implementation = table().get(kernel, name)
    if why := implementation.lacks(device, dtype):
        origin = f", which {VARIABLE} forces," if by_variable else ""
        raise ScheduleError(f"implementation {name!r} of kernel {kernel!r}{origin} {why}")
    return implementation


def _lacks(implementation: Implementation, device: str, dtype: torch.dtype | None) -> str | None:
    """Why it is not used; that it cannot be imported is a reason too."""
    if why := implementation.lacks(device, dtype):
        return why
    try:
        table().load(implementation)
    except PluginError as error:
        return str(error)
    return None


def _candidates(key: Key) -> tuple[Candidate, ...]:
    """In order of preference, up to one that takes every call; the one that is forced alone."""
    kernel, choice, device, dtype = key
    first = _choose(kernel, device, dtype, choice)
    found = [(table().load(first), first)]
    if choice is None and kernel not in table().forced:
        ordered = table().implementations(kernel, device)
        for each in ordered[ordered.index(first) + 1 :]:
            if found[-1][1].refuses is None and found[-1][1].avoids is None:
                break
            if _lacks(each, device, dtype) is None:
                found.append((table().load(each), each))
    line = kernel, first.name, device
    if choice is None and line not in _logged:
        _logged.add(line)
        get_logger().info("kernel %s on %s: %s", kernel, device, first.name)
    _chosen[key] = tuple(found)
    return _chosen[key]


def _forced(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute by an implementation that is forced, which may only refuse."""
    ((function, implementation),) = _chosen[key]
    if implementation.refuses is not None and (why := implementation.refuses(*args, **kwargs)):
        raise ScheduleError(f"implementation {implementation.name!r} of kernel {key[0]!r} {why}")
    return function(*args, **kwargs)
