"""Layers whose tensors are computed from others by ``torch.nn.utils.parametrize`` or hooks: norms, masks, own functions.

Such a layer is split like its class, by the tensors that its weight is computed from. That is right if each part of the weight
follows from the same part of all these tensors: in both dimensions for an elementwise function, along the outputs for a weight
norm, in none for a spectral norm. A numeric probe decides; torch's own hooks are known, see ``parametrization_hooks``.
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
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..communication._torch_autograd import preserve_versions
from .sharding_rule import Cut, ShardingRule, holder_of

_SOURCES = {WeightNorm: ("_g", "_v"), SpectralNorm: ("_orig",), BasePruningMethod: ("_orig", "_mask")}


_LIST = "parametrizations"
_CASES = ((True, 1.0), (True, 1e-2), (True, 1e2), (False, 1.0))
"""Modes and magnitudes of the random values; a bound on a norm shows only above or below it."""


def parametrization_of(module: nn.Module) -> str | None:
    """Return the clause of messages that names the computed tensors of a module; None if there are none.

    Example:
        >>> parametrization_of(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)))
        "'weight' is computed by _WeightNorm"
    """
    found = {name: [type(each).__name__ for each in functions.children()] for name, functions in _functions(module).items()}
    found.update({name: [type(hook).__name__] for name, hook in parametrization_hooks(module).items()})
    return " and ".join(f"{name!r} is computed by {', '.join(names)}" for name, names in found.items()) or None


def source_parameters(module: nn.Module, name: str) -> tuple[str, ...]:
    """Return the paths of the parameters that a tensor is computed from; the tensor's own name if it is not computed."""
    holder, own = holder_of(module, name)
    if (hook := parametrization_hooks(holder).get(own)) is not None:
        return tuple(name + suffix for kind, suffixes in _SOURCES.items() if isinstance(hook, kind) for suffix in suffixes)
    functions, below = _functions(holder).get(own), name.removesuffix(own)
    return (name,) if functions is None else tuple(f"{below}{_LIST}.{own}.{source}" for source in functions._parameters)


def restricted_rule(rule: ShardingRule, module: nn.Module, ranks: int) -> ShardingRule:
    """Return a rule without the cuts that are wrong for a module's computed tensors."""
    held = {*module._parameters, *module._buffers}
    if {name for cut in rule.cuts for name in cut.dims} <= held and not parametrize.is_parametrized(module):
        return rule
    known = _adapted.setdefault(module, {})
    if (rule.kind, ranks) not in known:
        cuts = [_adapted_cut(module, cut, ranks) for cut in rule.cuts]
        known[rule.kind, ranks] = replace(rule, cuts=tuple(cut for cut in cuts if cut is not None))
    return known[rule.kind, ranks]


_adapted: WeakKeyDictionary[nn.Module, dict[tuple[str, int], ShardingRule]] = WeakKeyDictionary()


def _functions(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return the parametrizations of the module's tensors by name."""
    return dict(module.get_submodule(_LIST).named_children()) if parametrize.is_parametrized(module) else {}


def _adapted_cut(module: nn.Module, cut: Cut, ranks: int) -> Cut | None:
    split = {name: found for name in cut.dims if (found := _computation_of(module, name)) is not None}
    if not split:
        return cut
    if any("." in name and not isinstance(found, nn.Module) for name, found in split.items()):
        return None  # hooks of a layer inside do not run where its weight alone is used
    if not all(_splits_elementwise(found, cut.dims[name], ranks * cut.parts.get(name, 1)) for name, found in split.items()):
        return None
    return replace(
        cut,
        dims={source: dim for name, dim in cut.dims.items() for source in source_parameters(module, name)},
        parts={source: number for name, number in cut.parts.items() for source in source_parameters(module, name)},
        shown=True,
    )


def _computation_of(module: nn.Module, name: str) -> Any:
    """Return the parametrization or hook that computes a tensor of this path; None without one, or without the tensor."""
    below, _, own = name.rpartition(".")
    try:
        holder = module.get_submodule(below)
    except AttributeError:
        return None
    return parametrization_hooks(holder).get(own) or _functions(holder).get(own)


def _splits_elementwise(functions: Any, dim: int, pieces: int) -> bool:
    """Return whether each piece along a dimension, and its gradients, follow from the same piece of all sources."""
    if not isinstance(functions, nn.Module):
        # a mask multiplies elements; a weight norm has one norm for each index of its own dimension
        return isinstance(functions, BasePruningMethod) or (isinstance(functions, WeightNorm) and functions.dim == dim)
    try:
        own = copy.deepcopy(functions).cpu().double()
        shapes = {name: parameter.shape for name, parameter in own.named_parameters(recurse=False)}
        if [*shapes] != [name for name, _ in own.named_parameters()]:  # the functions have parameters of their own
            return False
        return all(_follows_in_case(own.train(training), shapes, dim, scale, pieces) for training, scale in _CASES)
    except (RuntimeError, ValueError, TypeError, IndexError):  # it does not run on a part, or has no values yet
        return False


def _follows_in_case(functions: nn.Module, shapes: Mapping[str, torch.Size], dim: int, scale: float, pieces: int) -> bool:
    from torch.func import functional_call  # noqa: PLC0415  it imports torch.distributed.tensor

    generator = torch.Generator().manual_seed(0)

    def numbers(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    given = {name: (numbers(shape) * scale).requires_grad_() for name, shape in shapes.items()}
    used = copy.deepcopy(functions)
    whole = functional_call(used, given)
    if any(not torch.equal(*each) for each in zip(used.buffers(), functions.buffers(), strict=True)):  # it keeps statistics
        return False
    weights = numbers(whole.shape)
    wanted = torch.autograd.grad(whole, [*given.values()], weights)
    sizes = {whole.shape[dim], *(shape[dim] for shape in shapes.values())}
    if len(sizes) > 1:
        return False
    pieces = min(pieces, *sizes)
    for number in {0, 1, pieces - 1}:
        parts = {
            name: piece_of(tensor.detach(), dim, pieces, number).clone().requires_grad_() for name, tensor in given.items()
        }
        part = functional_call(copy.deepcopy(functions), parts)
        if not torch.allclose(part, piece_of(whole, dim, pieces, number)):
            return False
        found = torch.autograd.grad(part, [*parts.values()], piece_of(weights, dim, pieces, number))
        pairs = zip(found, wanted, strict=True)
        if not all(torch.allclose(one, piece_of(other, dim, pieces, number)) for one, other in pairs):
            return False
    return True


def piece_of(tensor: torch.Tensor, dim: int, pieces: int, number: int) -> torch.Tensor:
    """Return one of several pieces of a tensor along a dimension."""
    return tensor.tensor_split(pieces, dim)[number]


@contextmanager
def no_parametrization_in_forward() -> Iterator[list[nn.Module]]:
    """Yield the list of modules that a forward parametrizes while it runs, as PEFT's does for ``target_parameters``."""
    plain, found = parametrize.register_parametrization, list[nn.Module]()

    def register(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        found.append(module)
        with preserve_versions(tuple(module.parameters())):  # registration writes the same values in place
            return plain(module, *args, **kwargs)

    parametrize.register_parametrization = register
    try:
        yield found
    finally:
        parametrize.register_parametrization = plain


def is_computing(hook: object) -> bool:
    """Return whether a hook is one of torch's that compute a tensor of the module before each forward."""
    return isinstance(hook, tuple(_SOURCES))


def parametrization_hooks(module: nn.Module) -> Mapping[str, Any]:
    """Return the hooks that compute tensors of the module, by the tensors' names."""
    hooks: list[Any] = [hook for hook in module.__dict__["_forward_pre_hooks"].values() if is_computing(hook)]
    return {hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name: hook for hook in hooks}
