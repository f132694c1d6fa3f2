"""Torch calls: classification by what they read, and their form as a node."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Iterator
from traceback import walk_stack, walk_tb
from typing import Any

import torch
from torch import fx

from . import _torch_private as private
from .graph_functions import setitem
from .nested_values import tensors_in

VALUE_READS = frozenset(
    "item tolist __bool__ __int__ __float__ __index__ __complex__ __contains__ is_nonzero equal allclose numpy "
    "__array__".split()
)
SHAPES = frozenset("shape size numel nelement __len__ nbytes stride".split())
_METADATA = SHAPES | frozenset(
    "dim ndim ndimension dtype device layout storage_offset element_size itemsize requires_grad grad_fn output_nr name names "
    "_version get_device result_type can_cast __hash__ __repr__ __format__ __dir__ retains_grad _is_param _is_view".split()
)
_UNCERTAIN_QUERIES = frozenset(
    [*"requires_grad is_leaf grad_fn is_inference is_contiguous stride storage_offset".split(), *private.MODES]
)
_DATA_DEPENDENT_SHAPES = frozenset(
    "nonzero argwhere masked_select unique unique_consecutive bincount repeat_interleave where".split()
)
"""Operators whose result has a shape that depends on values."""

_BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()
_UNARY_AND_COMPARISONS = "lt le eq ne gt ge neg invert abs pos getitem".split()
_OPERATORS = {f"__{name.strip('_')}__": getattr(operator, name) for name in [*_BINARY, *_UNARY_AND_COMPARISONS]}
_REFLECTED = {f"__r{name.strip('_')}__": getattr(operator, name) for name in _BINARY}
_TORCH = os.path.dirname(torch.__file__) + os.sep
_STANDARD_LIBRARY = ("contextlib.py", "inspect.py", "functools.py", "copy.py")


def name_of(func: Any) -> str:
    """Return the name of a function, or of the property that a getter or setter belongs to."""
    name = getattr(func, "__name__", "")
    return str(func.__self__.__name__ if name in ("__get__", "__set__") else name)


def function_name(node: fx.Node) -> str:
    """Return the plain name of the function, method or module that a node calls."""
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def is_metadata(func: Any, name: str) -> bool:
    """Return True if the result does not depend on values."""
    return (name in _METADATA or (name.startswith("is_") and name not in VALUE_READS)) and func.__name__ != "__set__"


def node_form(func: Any, name: str, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """Return op, target and arguments of a call, in fx's own form for operators and methods, so that graphs read like code."""
    kind = getattr(func, "__name__", "")
    if kind == "__get__":
        return "call_function", getattr, (args[0], name)
    if kind == "__set__":
        return "call_function", setattr, (args[0], name, args[1])
    if kind == "__setitem__":
        return "call_function", setitem, args
    if kind in _OPERATORS:
        return "call_function", _OPERATORS[kind], args
    if kind in _REFLECTED:
        return "call_function", _REFLECTED[kind], (args[1], args[0])
    return "call_method" if getattr(torch.Tensor, kind, None) == func else "call_function", func, args


class Effects:
    """Side effects of a call so far: arguments changed in place, and random numbers drawn."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: private.Watch) -> None:
        self._watch, self._drawn = watch, watch.drawn
        self.tensors = [*tensors_in((args, kwargs))]
        self._before = [private.version(tensor) for tensor in self.tensors]

    def has_drawn(self) -> bool:
        return self._watch.drawn > self._drawn

    def changed_arguments(self) -> set[int]:
        return {id(t) for t, before in zip(self.tensors, self._before, strict=True) if private.version(t) != before}


def _is_slapo(frame: Any) -> bool:
    """Return True if a frame is of core or of a plugin, by its module name."""
    return str(frame.f_globals.get("__name__")).startswith("slapo_")


def is_dynamic(node: fx.Node) -> bool:
    """Return True if the shape of the result may depend on data."""
    name = function_name(node)
    inputs = node.all_input_nodes
    vals = [other.meta["val"] for other in inputs[1:] if "val" in other.meta]
    by_mask = name == "getitem" and any(val.dtype in (torch.bool, torch.uint8) for val in vals)
    may_be_itself = node.op == "call_module" or name in _DATA_DEPENDENT_SHAPES or by_mask
    return may_be_itself or any(other.meta.get("dynamic") for other in inputs)


def is_uncertain_query(name: str, depth: int) -> bool:
    """Return True if the model's own code, ``depth`` frames up, queries a mode or a fact that shape and dtype do not tell."""
    frame = sys._getframe(depth + 1)
    return name in _UNCERTAIN_QUERIES and not (frame.f_code.co_filename.startswith(_TORCH) or _is_slapo(frame))


def model_source(err: BaseException | None = None) -> str | None:
    """Return ``file:line`` of the model's innermost frame, of this call or of the origin of ``err``; None if there is none."""
    frames: Iterator[tuple[Any, int]] = walk_stack(sys._getframe(1)) if err is None else reversed([*walk_tb(err.__traceback__)])
    inner = None
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            inner = inner or f"{file}:{line}"
        elif not (file.startswith("<") or file.endswith(_STANDARD_LIBRARY) or _is_slapo(frame)):
            return f"{file}:{line}"
    return inner
