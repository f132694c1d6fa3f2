"""Layers whose tensors are computed from others, by ``torch.nn.utils.parametrize`` or hooks: norms, masks, an own function.

Such a layer is split as its class is, by the tensors its weight is computed from, where each part of the weight follows from
the same part of all of them: of an elementwise function in both ways, of weight norm along the outputs, of a spectral norm in
none. Which it is, a trial on random numbers tells; of torch's own hooks it is known, see ``computing_hooks``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils import parametrize

from ._torch_autograd import versions_kept
from .computing_hooks import computing_hooks, follows, sources_of
from .rules import Cut, ShardingRule

_LIST = "parametrizations"


def computed_by(module: nn.Module) -> str | None:
    """Return which tensors of a module are computed, and by what, as a sentence starts; None where none is.

    Example:
        >>> computed_by(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)))
        "'weight' is computed by _WeightNorm"
    """
    found = {name: [type(each).__name__ for each in functions.children()] for name, functions in _functions(module).items()}
    found.update({name: [type(hook).__name__] for name, hook in computing_hooks(module).items()})
    return " and ".join(f"{name!r} is computed by {', '.join(names)}" for name, names in found.items()) or None


def sources(module: nn.Module, name: str) -> tuple[str, ...]:
    """Return the names of the parameters that a tensor is computed from, counted from the module; of any other, its own."""
    if (hook := computing_hooks(module).get(name)) is not None:
        return sources_of(hook, name)
    functions = _functions(module).get(name)
    return (name,) if functions is None else tuple(f"{_LIST}.{name}.{own}" for own in functions._parameters)


def adapted(rule: ShardingRule, module: nn.Module) -> ShardingRule:
    """Return the rule for a module of the kind whose tensors may be computed: without the cuts that would be wrong."""
    hooks, functions = computing_hooks(module), _functions(module)
    if not hooks and not functions:
        return rule
    known = _adapted.setdefault(module, {})
    if rule.kind not in known:
        cuts = [_adapted_cut(module, {**functions, **hooks}, cut) for cut in rule.cuts]
        known[rule.kind] = replace(rule, cuts=tuple(cut for cut in cuts if cut is not None))
    return known[rule.kind]


_adapted: WeakKeyDictionary[nn.Module, dict[str, ShardingRule]] = WeakKeyDictionary()


def _functions(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return what computes the module's tensors, by their names."""
    return dict(module.get_submodule(_LIST).named_children()) if parametrize.is_parametrized(module) else {}


def _adapted_cut(module: nn.Module, functions: Mapping[str, Any], cut: Cut) -> Cut | None:
    split = functions.keys() & cut.dims.keys()
    adds_late = cut.late_bias and "bias" in functions
    if adds_late or functions.keys() & cut.parts.keys() or not all(_follows(functions[name], cut.dims[name]) for name in split):
        return None
    return replace(cut, dims={source: dim for name, dim in cut.dims.items() for source in sources(module, name)})


def _follows(functions: Any, dim: int) -> bool:
    """Return whether each part along a dimension, and its gradients, follow from the same part of all sources."""
    if not isinstance(functions, nn.Module):
        return follows(functions, dim)
    try:
        own = copy.deepcopy(functions).cpu().double()
        shapes = {name: parameter.shape for name, parameter in own.named_parameters(recurse=False)}
        if [*shapes] != [name for name, _ in own.named_parameters()]:  # the functions learn, too
            return False
        return all(_follows_once(own.train(training), shapes, dim) for training in (True, False))
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):  # it takes no part, or has no numbers yet
        return False


def _follows_once(functions: nn.Module, shapes: Mapping[str, torch.Size], dim: int) -> bool:
    from torch.func import functional_call  # noqa: PLC0415  it imports torch.distributed.tensor

    generator = torch.Generator().manual_seed(0)

    def numbers(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    given = {name: numbers(shape).requires_grad_() for name, shape in shapes.items()}
    whole = functional_call(copy.deepcopy(functions), given)
    weights = numbers(whole.shape)
    wanted = torch.autograd.grad(whole, [*given.values()], weights)
    sizes = {whole.shape[dim], *(shape[dim] for shape in shapes.values())}
    if len(sizes) > 1:
        return False
    for number in range(2):
        parts = {name: _half(tensor.detach(), dim, number).clone().requires_grad_() for name, tensor in given.items()}
        part = functional_call(copy.deepcopy(functions), parts)
        if not torch.allclose(part, _half(whole, dim, number)):
            return False
        found = torch.autograd.grad(part, [*parts.values()], _half(weights, dim, number))
        if not all(torch.allclose(one, _half(other, dim, number)) for one, other in zip(found, wanted, strict=True)):
            return False
    return True


def _half(tensor: torch.Tensor, dim: int, number: int) -> torch.Tensor:
    return tensor.tensor_split(2, dim)[number]


@contextmanager
def registrations() -> Iterator[list[nn.Module]]:
    """Give the modules of which a forward parametrises a tensor while it runs, as PEFT's for ``target_parameters`` does."""
    plain, found = parametrize.register_parametrization, list[nn.Module]()

    def register(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        found.append(module)
        with versions_kept(tuple(module.parameters())):  # it sets them to what they are
            return plain(module, *args, **kwargs)

    parametrize.register_parametrization = register
    try:
        yield found
    finally:
        parametrize.register_parametrization = plain
