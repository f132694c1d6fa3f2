"""Equivalence of calls: one name for all spellings of an operator, and arguments without defaults."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch.fx.operator_schemas import get_signature_for_torch_op

COMMUTATIVE = frozenset("add mul bitwise_and bitwise_or bitwise_xor logical_and logical_or eq ne maximum minimum".split())
_ALIASES = dict(
    pair.split("=")
    for pair in (
        "truediv=div true_divide=div divide=div multiply=mul subtract=sub negative=neg mod=remainder and_=bitwise_and "
        "or_=bitwise_or xor=bitwise_xor invert=bitwise_not inv=bitwise_not floordiv=floor_divide concat=cat concatenate=cat "
        "swapaxes=transpose swapdims=transpose absolute=abs "
        "less=lt greater=gt less_equal=le greater_equal=ge not_equal=ne iadd=add_ isub=sub_ "
        "imul=mul_ itruediv=div_ iand=bitwise_and_ ior=bitwise_or_ clip=clamp"
    ).split()
)
_TORCH = ("torch", "_operator", "operator")


Signature = tuple[inspect.Parameter, ...]


def operator_of(node: fx.Node) -> Any:
    """Return the key of all spellings of a function: ``x + y``, ``torch.add(x, y)`` and ``x.add(y)`` are ``"add"``."""
    if node.op == "call_method":
        return _ALIASES.get(str(node.target), node.target)
    module = getattr(node.target, "__module__", None) or "torch"
    name = getattr(node.target, "__name__", None)
    if name is None or module.split(".")[0] not in _TORCH:
        return node.target
    name = name.strip("_") if name.startswith("__") else name
    return _ALIASES.get(name, name)


def signatures_of(node: fx.Node, module: nn.Module | None) -> Sequence[Signature]:
    """Return the possible signatures of a call, one per overload. ``module`` is the called module, if any."""
    if module is not None:
        return [signature[1:] for signature in _function_signature(type(module).forward)]
    operator = operator_of(node)
    return _function_signature(node.target) or (_aten_signatures(operator) if isinstance(operator, str) else ())


def bound_arguments(signatures: Sequence[Signature], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, without those equal to the default."""
    named = _rename_input(kwargs)
    for signature in signatures:
        bound = _bind(signature, list(args), named)
        if bound is not None:
            known = {p.name: p.default for p in signature}
            return {name: value for name, value in bound.items() if not _is_default(value, known[name])}
    return {**{str(index): arg for index, arg in enumerate(args)}, **named}


def default_arguments(signatures: Sequence[Signature], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of a call's parameters by name; none if no signature fits."""
    fitting = (signature for signature in signatures if _bind(signature, list(args), _rename_input(kwargs)) is not None)
    return {p.name: p.default for p in next(fitting, ()) if p.default is not p.empty}


def _rename_input(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {("self" if key == "input" else key): value for key, value in kwargs.items()}


def _bind(signature: Signature, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by parameter name, or None if they do not fit."""
    positional = [p for p in signature if p.kind is p.POSITIONAL_OR_KEYWORD]
    known = {p.name: p for p in signature}
    if len(args) > len(positional):
        if not positional or "List" not in str(positional[-1].annotation) or len(positional) > 2:
            return None
        args = [*args[: len(positional) - 1], args[len(positional) - 1 :]]  # x.view(2, 3) is x.view((2, 3))
    bound = dict(zip((p.name for p in positional), args, strict=False))
    if bound.keys() & kwargs.keys() or not kwargs.keys() <= known.keys():
        return None
    bound.update(kwargs)
    if any(p.default is p.empty and p.name not in bound and p.kind is not p.VAR_KEYWORD for p in signature):
        return None
    for name, value in bound.items():
        if "List" in str(known[name].annotation) and isinstance(value, int):
            bound[name] = [value]
    return bound


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, fx.Node) and bool(value == default)


@cache
def _aten_signatures(name: str) -> tuple[Signature, ...]:
    packet = getattr(torch.ops.aten, name, None)
    return tuple(map(_parameters, get_signature_for_torch_op(packet) or ())) if packet is not None else ()


@cache
def _function_signature(target: Any) -> tuple[Signature, ...]:
    if isinstance(target, str) or inspect.isbuiltin(target):
        return ()
    try:
        return (_parameters(inspect.signature(target)),)
    except (TypeError, ValueError):  # no signature: arguments are compared as they stand
        return ()


def _parameters(signature: inspect.Signature) -> Signature:
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL]
    return tuple(p.replace(name="self") if p.name == "input" else p for p in named)
