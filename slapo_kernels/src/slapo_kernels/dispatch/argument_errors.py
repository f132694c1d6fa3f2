"""Explanations of a kernel call that failed: the argument that is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slapo_core import ScheduleError

from ..implementations import eager
from ..implementations._torch_private import is_dry_run
from .kernels import KERNELS
from .registry import check_kernel

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
