"""Calls of equal modules that a trace keeps whole: the first runs on fake tensors, the results of the others are made alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..nodes import _torch_private as private
from ..nodes.mode_regions import autocast_state
from ..nodes.module_signature import module_signature, plain_attributes
from ..nodes.nested_values import MODULE_TABLES, map_tensors
from ..recording.attribute_writes import state_changes
from ..recording.sandbox import Sandbox

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, slice)
_OF_CALLS_OR_STATES = ("_slapo", "_forward", "_backward", "_state_dict", "_load_state_dict")
"""Beginnings of the names of hooks and wrappers, which the signature has, and of hooks that no call runs."""

_CAPTURING = "transformers.utils.output_capturing"

Reads = dict[tuple[int, str], set[int]]
"""Attribute (id of the module, name) to the ids of the modules kept whole that read it."""


class _Known(NamedTuple):
    """A call that ran.

    Args:
        module: The module.
        given: Its arguments, which stay alive: those with values are known by their ids.
        result: Its result, with fake tensors.
        drawn: Number of operators that drew random numbers.
        value_reads: Number of operators whose result depends on values.
        reads: Attributes that it read: place of the module inside, or the id of another one, and name.
    """

    module: nn.Module
    given: list[Any]
    result: Any
    drawn: int
    value_reads: int
    reads: list[tuple[int, bool, str]]


class RepeatedCalls:
    """Results of calls of whole modules, for later calls of equal modules.

    A call is repeated if it left no trace but its result: new tensors, computed from tensors and plain values. It changed no
    state and no argument, and no hooks of others saw it.

    Args:
        sandbox: The run; its tensors are fake.
        reads: Attributes that modules kept whole read; filled.
    """

    def __init__(self, sandbox: Sandbox, reads: Reads) -> None:
        self._sandbox, self._reads = sandbox, reads
        self._known: dict[Hashable, list[_Known]] = {}
        self._signatures: dict[int, Hashable] = {}

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Return the result of a call: that of an equal module, or that of ``call``."""
        given = [*_leaves((args, kwargs))]
        if not self._can_repeat(module, given):
            return call()
        key = (self._signature(module), _facts((args, kwargs)), torch.is_grad_enabled(), autocast_state())
        for known in self._known.get(key, ()):
            if _have_same_settings(known.module, module):
                return self._repeat(known, module)
        versions = [each._version for each in given if isinstance(each, torch.Tensor)]
        drawn, value_reads = self._sandbox.watch.drawn, self._sandbox.mode.value_reads
        before = {place: set(ids) for place, ids in self._reads.items()}
        result = call()
        unchanged = versions == [each._version for each in given if isinstance(each, torch.Tensor)]
        if unchanged and self._is_new(result, module, given) and not self._changed_state(module):
            reads = [*self._new_reads(module, before)]
            counts = self._sandbox.watch.drawn - drawn, self._sandbox.mode.value_reads - value_reads
            self._known.setdefault(key, []).append(_Known(module, given, result, *counts, reads))
        return result

    def _can_repeat(self, module: nn.Module, given: list[Any]) -> bool:
        if not self._sandbox.fake or not next(module.children(), None):
            return False
        keeps_values = self._sandbox.mode.keeps_values
        if not all(isinstance(each, _PLAIN) or _is_known(each, keeps_values) for each in given):
            return False
        return all(map(_is_quiet, (hook for each in module.modules() for hook in _hooks(each))))

    def _signature(self, module: nn.Module) -> Hashable:
        if id(module) not in self._signatures:
            tensors = [*module.parameters(), *module.buffers()]
            self._signatures[id(module)] = module_signature(module), tuple(str(each.device) for each in tensors)
        return self._signatures[id(module)]

    def _is_new(self, result: Any, module: nn.Module, given: list[Any]) -> bool:
        """Return whether a result is made of new tensors, each with memory of its own, and plain values."""
        leaves = [*_leaves(result)]
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        if not all(isinstance(each, _PLAIN) or type(each) is private.FakeTensor for each in leaves):
            return False
        if not all(each.layout is torch.strided and each.is_contiguous() and not each.storage_offset() for each in tensors):
            return False
        others = [*(each for each in given if isinstance(each, torch.Tensor)), *module.parameters(), *module.buffers()]
        memory = [private.memory_of(each) for each in tensors]
        return len(set(memory)) == len(memory) and {private.memory_of(each) for each in others}.isdisjoint(memory)

    def _changed_state(self, module: nn.Module) -> bool:
        inside = [*module.modules()]
        before = [self._sandbox.state[id(each)] for each in inside if id(each) in self._sandbox.state]
        return len(before) < len(inside) or any(True for _ in state_changes(inside, before))

    def _new_reads(self, module: nn.Module, before: Reads) -> Iterator[tuple[int, bool, str]]:
        places = {id(each): index for index, each in enumerate(module.modules())}
        for (owner, name), readers in self._reads.items():
            if id(module) in readers and id(module) not in before.get((owner, name), ()):
                yield (places[owner], True, name) if owner in places else (owner, False, name)

    def _repeat(self, known: _Known, module: nn.Module) -> Any:
        inside = [*module.modules()]
        for owner, is_inside, name in known.reads:
            self._reads.setdefault((id(inside[owner]) if is_inside else owner, name), set()).add(id(module))
        result = map_tensors(known.result, self._fresh)
        self._sandbox.watch.drawn += known.drawn
        self._sandbox.mode.value_reads += known.value_reads
        return result

    def _fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor like a result; with a gradient, it is no leaf."""
        found = self._sandbox.fake_of(tensor.detach())
        return found.requires_grad_().clone() if tensor.requires_grad else found


def _is_known(value: Any, keeps_values: bool) -> bool:
    return type(value) is private.FakeTensor or (keeps_values and type(value) is torch.Tensor and private.has_values(value))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what plain containers hold; other containers, such as a cache of keys, are leaves."""
    if type(value) in (list, tuple, dict):
        for each in value.values() if type(value) is dict else value:
            yield from _leaves(each)
    else:
        yield value


def _facts(value: Any) -> Hashable:
    """Return what a call depends on of its arguments: shapes and types, which of them are the same, and plain values.

    Tensors with values are told apart by their ids and versions.
    """
    seen: dict[int, int] = {}

    def describe(part: Any) -> Hashable:
        if isinstance(part, torch.Tensor):
            place = seen.setdefault(id(part), len(seen))
            memory = part.storage_offset(), part.untyped_storage().nbytes()
            if private.has_values(part):
                return (id(part), part._version, part.requires_grad)
            return (place, tuple(part.shape), part.stride(), part.dtype, str(part.device), part.requires_grad, memory)
        if isinstance(part, dict):
            return (type(part), *((key, describe(each)) for key, each in part.items()))
        if isinstance(part, (list, tuple)):
            return (type(part), *map(describe, part))
        return (type(part), repr(part))

    return describe(value)


def _hooks(module: nn.Module) -> Iterator[Any]:
    for table in (module._forward_pre_hooks, module._forward_hooks):
        yield from table.values()


def _is_quiet(hook: Any) -> bool:
    """Return whether a hook is one of ours, or one of Transformers that collects nothing in this call."""
    origin = getattr(hook, "__module__", "") or type(hook).__module__
    if origin == _CAPTURING:
        return not sys.modules[_CAPTURING]._active_collector.get()
    return origin.startswith("slapo_")


def _have_same_settings(module: nn.Module, other: nn.Module) -> bool:
    return all(_same_attributes(vars(one), vars(two)) for one, two in zip(module.modules(), other.modules(), strict=True))


def _same_attributes(own: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether attributes that the signature lacks are the same objects or equal: all but plain ones, hooks, members."""
    if own.keys() != others.keys():
        return False
    plain = plain_attributes(own)
    for name, value in own.items():
        if value is others[name] or name in plain or name in MODULE_TABLES or name.startswith(_OF_CALLS_OR_STATES):
            continue
        if isinstance(value, (bool, int, str)) or name == "forward":
            continue  # numbers of layers; wrapped forwards
        if type(value) is not type(others[name]) or not isinstance(value, (list, tuple, dict, set)) or value != others[name]:
            return False
    return True
