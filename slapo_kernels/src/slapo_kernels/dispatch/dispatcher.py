"""Dispatch of kernels: choice and call of an implementation for a device and dtype."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slapo_core import PluginError, ScheduleError, SlapoError, get_logger

from ..implementations import eager, native
from ..implementations._torch_private import is_dry_run
from .kernels import KERNELS, Function, Implementation
from .registry import ENVIRONMENT_VARIABLE, check_kernel, implementation_registry

_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_DTYPE_ARGUMENT = {name: kernel.dtype_argument for name, kernel in KERNELS.items()}

Key = tuple[str, "str | None", str, torch.dtype]
Candidate = tuple[Function, Implementation]
_candidates_by_key: dict[Key, tuple[Candidate, ...]] = {}
_logged: set[tuple[str, str, str]] = set()


def kernel_names() -> tuple[str, ...]:
    """Return the names of all kernels."""
    return tuple(KERNELS)


def run(kernel: str, *args: Any, choice: str | None = None, **kwargs: Any) -> Any:
    """Call a kernel, by its first implementation that supports the tensors' device and dtype and the arguments.

    While a model is traced, the eager implementation runs; for tensor subclasses too, unless another one is chosen.
    ``torch.compile`` sees operations of torch, unless another package's implementation is chosen.

    Args:
        kernel: Name of the kernel.
        args: Positional arguments of the eager implementation.
        choice: The implementation to use; default: the one ``SLAPO_KERNELS`` forces, else the first that is usable.
        kwargs: Keyword arguments of the eager implementation.

    Raises:
        ScheduleError: the chosen implementation cannot be used here; no such kernel; or wrong arguments.
    """
    if torch.compiler.is_compiling():
        return _for_compiler(kernel, choice)(*args, **kwargs)
    try:
        return _run(kernel, choice, args, kwargs)
    except SlapoError:
        raise
    except Exception as error:
        if why := argument_error(kernel, choice, args, kwargs):
            raise ScheduleError(why) from error
        raise


def _run(kernel: str, choice: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[_DTYPE_ARGUMENT.get(kernel, 0)]
    if type(tensor) not in _TENSOR_TYPES:
        if choice is None or is_dry_run(tensor):
            choice = "eager"
    elif is_dry_run():
        choice = "eager"
    key = kernel, choice, tensor.device.type, tensor.dtype
    for function, implementation in _candidates_by_key.get(key) or _candidates(key):
        if implementation.refuses is not None and implementation.refuses(*args, **kwargs):
            continue
        if implementation.avoids is not None and implementation.avoids(*args, **kwargs):
            continue
        return function(*args, **kwargs)
    return _run_forced(key, args, kwargs)


def _for_compiler(kernel: str, choice: str | None) -> Function:
    """Return the function that ``torch.compile`` traces: operations that it can fuse itself, or the chosen implementation."""
    if not hasattr(eager, kernel):
        check_kernel(kernel)
    module = native if choice in (None, "native") and hasattr(native, kernel) else eager
    if choice in (None, "inductor", "native", "eager"):
        function: Function = getattr(module, kernel)
        return function
    return implementation_registry().load(implementation_registry().get(kernel, choice))


def choose(kernel: str, device: torch.device | str, dtype: torch.dtype | None, forced: str | None = None) -> Implementation:
    """Return the implementation that computes a kernel.

    Args:
        kernel: Name of the kernel.
        device: Device of the tensors.
        dtype: Dtype of the tensors; None for any.
        forced: Name of the implementation; default: the one ``SLAPO_KERNELS`` forces, else the first that is usable.

    Raises:
        ScheduleError: no such kernel, implementation, device or dtype; or the forced implementation cannot be used, as its
            package is missing or it does not support the device or dtype.
        PluginError: the forced implementation cannot be imported, or two plugins provide it.
    """
    return _choose(kernel, _device_type(device, dtype), dtype, forced)


@dataclass(frozen=True)
class Explanation:
    """An implementation, and whether it can be used.

    Args:
        lacks: Reason why it cannot be used; None if it can.
        chosen: Whether it is the implementation that is used.
    """

    implementation: Implementation
    lacks: str | None
    chosen: bool


def explain(kernel: str, device: torch.device | str, dtype: torch.dtype | None = None) -> list[Explanation]:
    """Return the implementations of a kernel in order of preference, with the reason against each that cannot be used.

    Args:
        kernel: Name of the kernel.
        device: Device of the tensors.
        dtype: Dtype of the tensors; None for any.

    Raises:
        ScheduleError: no such kernel, device or dtype, or ``SLAPO_KERNELS`` forces an implementation that cannot be used.
    """
    kind = _device_type(device, dtype)
    chosen = _choose(kernel, kind, dtype, None)
    return [
        Explanation(each, _lacks(each, kind, dtype), each == chosen)
        for each in implementation_registry().implementations(kernel, kind)
    ]


def reset() -> None:
    """Forget all choices; the next call reads plugins and ``SLAPO_KERNELS`` again."""
    implementation_registry.cache_clear()
    _candidates_by_key.clear()
    _logged.clear()


def _device_type(device: torch.device | str, dtype: torch.dtype | None) -> str:
    """Return the type of a device; raise ``ScheduleError`` unless there are such a device and dtype."""
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise ScheduleError(f"{dtype!r} is not a dtype; give one such as torch.bfloat16, or None for any")
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ScheduleError(f"{device!r} is not a device; give one such as 'cpu' or 'cuda:0'") from error


def _choose(kernel: str, device: str, dtype: torch.dtype | None, forced: str | None) -> Implementation:
    check_kernel(kernel)
    by_variable = implementation_registry().forced.get(kernel) if forced is None else None
    name = forced if forced is not None else by_variable
    if name is None:
        return next(
            each for each in implementation_registry().implementations(kernel, device) if _lacks(each, device, dtype) is None
        )
    implementation = implementation_registry().get(kernel, name)
    if why := implementation.lacks(device, dtype):
        origin = f", which {ENVIRONMENT_VARIABLE} forces," if by_variable else ""
        raise ScheduleError(f"implementation {name!r} of kernel {kernel!r}{origin} {why}")
    return implementation


def _lacks(implementation: Implementation, device: str, dtype: torch.dtype | None) -> str | None:
    """Return the reason why an implementation cannot be used, including a failed import; None if it can."""
    if why := implementation.lacks(device, dtype):
        return why
    try:
        implementation_registry().load(implementation)
    except PluginError as error:
        return str(error)
    return None


def _candidates(key: Key) -> tuple[Candidate, ...]:
    """Return the usable implementations in order of preference, up to one that takes every call; or the forced one alone."""
    kernel, choice, device, dtype = key
    first = _choose(kernel, device, dtype, choice)
    found = [(implementation_registry().load(first), first)]
    if choice is None and kernel not in implementation_registry().forced:
        ordered = implementation_registry().implementations(kernel, device)
        for each in ordered[ordered.index(first) + 1 :]:
            if found[-1][1].refuses is None and found[-1][1].avoids is None:
                break
            if _lacks(each, device, dtype) is None:
                found.append((implementation_registry().load(each), each))
    line = kernel, first.name, device
    if choice is None and line not in _logged:
        _logged.add(line)
        get_logger().info("kernel %s on %s: %s", kernel, device, first.name)
    _candidates_by_key[key] = tuple(found)
    return _candidates_by_key[key]


def _run_forced(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the forced implementation; raise ``ScheduleError`` if it refuses the arguments."""
    ((function, implementation),) = _candidates_by_key[key]
    if implementation.refuses is not None and (why := implementation.refuses(*args, **kwargs)):
        raise ScheduleError(f"implementation {implementation.name!r} of kernel {key[0]!r} {why}")
    return function(*args, **kwargs)


_KNOWN = {"activation": tuple(eager.ACTIVATIONS), "cast": eager.CASTS, "reduction": ("mean", "sum", "none")}
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "Tensor": (torch.Tensor, "a tensor"),
    "float": ((float, int), "a number"),
    "int": (int, "a whole number"),
    "bool": (bool, "True or False"),
    "str": (str, "a name"),
}


def argument_error(kernel: object, choice: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the message for a wrong kernel name, argument type or label, or None if these are right."""
    if any(map(is_dry_run, (None, *args, *kwargs.values()))):  # fake tensors and proxies fail for other reasons
        return None
    try:
        check_kernel(kernel)
    except ScheduleError as error:
        return str(error)
    if not (choice is None or isinstance(choice, str)):
        return f"run({kernel!r}): choice is {choice!r}, not the name of an implementation"
    signature = inspect.signature(getattr(eager, str(kernel)))
    takes = f"{kernel} takes {', '.join(map(_parameter_text, signature.parameters.values()))}"
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        return f"run({kernel!r}): {error}; {takes}"
    wrong = next(filter(None, (_value_problem(signature.parameters[name], value) for name, value in given.items())), None)
    by_position = list(signature.parameters)[: KERNELS[str(kernel)].dtype_argument + 1]
    if wrong is None and len(args) < len(by_position):
        wrong = f"{by_position[len(args)]} is to be given by its position"
    if wrong is None and kernel == "linear_cross_entropy":
        return _label_error(given)
    return None if wrong is None else f"run({kernel!r}): {wrong}; {takes}"


def _value_problem(parameter: inspect.Parameter, value: Any) -> str | None:
    name, _, optional = str(parameter.annotation).partition(" | ")
    if optional and value is None:
        return None
    kind, said = _KINDS[name]
    if not isinstance(value, kind):
        return f"{parameter.name} is {value!r}, not {said}"
    if parameter.name in _KNOWN and value not in _KNOWN[parameter.name]:
        return f"no {parameter.name} {value!r}, but {', '.join(_KNOWN[parameter.name])}"
    return None


def _label_error(given: Mapping[str, Any]) -> str | None:
    labels, num_classes = given["labels"], len(given["weight"])
    if labels.device.type != "cpu":  # after an error, a GPU may not answer
        return None
    outside = labels[(labels != given.get("ignore_index", -100)) & ((labels < 0) | (labels >= num_classes))]
    return f"run('linear_cross_entropy'): label {outside[0]} is none of {num_classes} classes" if len(outside) else None


def _parameter_text(parameter: inspect.Parameter) -> str:
    by_name = parameter.kind is parameter.KEYWORD_ONLY
    default = "" if parameter.default is parameter.empty else repr(parameter.default)
    return f"{parameter.name}={default}" if by_name or default else parameter.name
