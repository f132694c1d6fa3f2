"""State of a scheduled model and of a call's arguments, to detect what a step changed.

``Snapshot`` compares to the bit, for refused and undone steps; ``structure`` is equal for models with the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.nn.parameter import is_lazy

from slapo_core import ParameterFacts, Schedule, parameter_facts, shard_spec

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_MISSING = object()


class Snapshot:
    """State reachable from the model's modules: modules and tensors by identity, values by bits.

    Args:
        schedule: Any handle.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._alive: list[Any] = []  # an identity says something only as long as the object lives
        self.facts: dict[str, Any] = dict(self._of_schedule(schedule.get_top_schedule()))

    def differences(self, later: Snapshot) -> list[str]:
        """Return the differences of a later snapshot, each as ``what, of which module or tensor``."""
        found = []
        for what in dict.fromkeys(chain(self.facts, later.facts)):
            before, after = self.facts.get(what, _MISSING), later.facts.get(what, _MISSING)
            if before is _MISSING or after is _MISSING:
                found.append(f"{what} {'is new' if before is _MISSING else 'is gone'}")
            elif not _equal(before, after):
                found.append(f"{what} differs")
        return found

    def _of_schedule(self, top: Schedule) -> Iterator[tuple[str, Any]]:
        yield "the journal", len(top.journal)
        yield "the order of modules", [path for path, _ in top.mod.named_modules(remove_duplicate=False)]
        for path, module in top.mod.named_modules(remove_duplicate=False):
            here = f"module {path!r}"
            yield f"{here}", self._identity(module)
            yield f"the class of {here}", type(module)
            yield f"metadata of {here}", sorted(top[path].metadata.primitives)
            yield f"tags in the metadata of {here}", set(top[path].metadata.param_tags)
            if isinstance(module, fx.GraphModule):
                yield f"the graph of {here}", str(module.graph)
            for name, value in module.__dict__.items():
                yield f"{name} of {here}", self._value(value)
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in table.items():
                    if tensor is not None:
                        yield from self._of_tensor(f"{kind} {f'{path}.{name}'.strip('.')!r}", tensor)

    def _of_tensor(self, here: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
        yield here, self._identity(tensor)
        if is_lazy(tensor):
            return
        kind = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
        yield f"shape, dtype, device or requires_grad of {here}", kind
        yield f"gradient of {here}", self._identity(tensor.grad) if tensor.is_leaf else None
        if not tensor.is_meta:
            yield f"values of {here}", tensor.detach().clone()
        for name, value in tensor.__dict__.items():
            yield f"{name} of {here}", self._value(value)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            yield f"{name} of {here}", self._value(getattr(tensor, name, None) or {})

    def _value(self, value: Any) -> Any:
        """Return plain values and the contents of containers by value, others by identity."""
        if isinstance(value, ParameterFacts):
            return (value.names, value.spec, frozenset(value.tags))
        if isinstance(value, dict):
            return [(key if isinstance(key, _PLAIN) else self._identity(key), self._item(item)) for key, item in value.items()]
        if isinstance(value, (list, tuple)):
            return [self._item(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return frozenset(self._item(item) for item in value)
        return self._item(value)

    def _item(self, value: Any) -> Any:
        return value if type(value) in _PLAIN else self._identity(value)

    def _identity(self, value: Any) -> int:
        self._alive.append(value)
        return id(value)


def _equal(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        same = (before.shape, before.dtype, before.device) == (after.shape, after.dtype, after.device)
        return same and (bool(torch.equal(before, after)) or _bits(before) == _bits(after))
    return bool(before == after)


def _bits(tensor: torch.Tensor) -> bytes:
    """Return the bits of the values, by which equal NaN are equal."""
    return bytes(tensor.cpu().contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


def first_of(differences: list[str]) -> str:
    """Return the first three differences, and the number of the others."""
    more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
    return "; ".join(differences[:3]) + more


def structure(schedule: Schedule) -> dict[str, Any]:
    """Return facts of modules and tensors by path that are equal for models with the same steps."""
    found: dict[str, Any] = {}
    for path, module in schedule.mod.named_modules(remove_duplicate=False):
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        found[f"module {path!r}"] = (type(module).__qualname__, module.training, *map(len, hooks), "forward" in module.__dict__)
    for kind, tensors in (("parameter", schedule.mod.named_parameters), ("buffer", schedule.mod.named_buffers)):
        for name, tensor in tensors(remove_duplicate=False):
            spec = shard_spec(tensor)
            where = None if spec is None else (spec.dim, spec.full_shape, spec.sizes)
            facts = parameter_facts(tensor)
            known = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, facts.names, facts.tags, where)
            found[f"{kind} {name!r}"] = known
    return found


def first_difference(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the first difference of the second structure as text."""
    what = next(key for key in {**wanted, **found} if wanted.get(key) != found.get(key))
    return f"{what} is {found.get(what, 'missing')}, not {wanted.get(what, 'there')}"


def copy_containers(value: Any, *, clone: bool = False) -> Any:
    """Return the value with new lists, tuples, dicts and sets around the same objects, so that a step changes only its own.

    Args:
        value: Any value.
        clone: True to clone tensors, too.
    """
    if type(value) in (list, tuple, set):
        return type(value)(copy_containers(item, clone=clone) for item in value)
    if type(value) is dict:
        return {key: copy_containers(item, clone=clone) for key, item in value.items()}
    return value.detach().clone() if clone and isinstance(value, torch.Tensor) else value


def is_unchanged(now: Any, then: Any) -> bool:
    """Return True if a value equals the copy that ``copy_containers`` made of it."""
    if now is then:
        return True
    if type(now) in (list, tuple) and type(then) is type(now):
        return len(now) == len(then) and all(map(is_unchanged, now, then))
    if type(now) is dict and type(then) is dict:
        return [*now] == [*then] and all(map(is_unchanged, now.values(), then.values()))
    if isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor):
        return now.shape == then.shape and now.dtype == then.dtype and bool(torch.equal(now, then))
    return bool(now == then)
