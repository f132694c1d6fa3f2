"""Forward pre-hooks of torch that compute a layer's tensor from others: the older weight norm, spectral norm and pruning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_SOURCES = {WeightNorm: ("_g", "_v"), SpectralNorm: ("_orig",), BasePruningMethod: ("_orig", "_mask")}


def is_computing(hook: object) -> bool:
    """Return whether a hook is one of torch's that compute a tensor of the module before each forward."""
    return isinstance(hook, tuple(_SOURCES))


def parametrization_hooks(module: nn.Module) -> Mapping[str, Any]:
    """Return the hooks that compute tensors of the module, by the tensors' names."""
    hooks: list[Any] = [hook for hook in module.__dict__["_forward_pre_hooks"].values() if is_computing(hook)]
    return {hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name: hook for hook in hooks}


def sources_of(hook: Any, name: str) -> tuple[str, ...]:
    """Return the names of the parameters and buffers that a hook computes a tensor from."""
    return tuple(f"{name}{suffix}" for kind, suffixes in _SOURCES.items() if isinstance(hook, kind) for suffix in suffixes)


def splits_along(hook: Any, dim: int) -> bool:
    """Return whether each part along a dimension follows from the same part of all sources.

    A mask multiplies elements; a weight norm has one norm for each index of its own dimension.
    """
    return isinstance(hook, BasePruningMethod) or (isinstance(hook, WeightNorm) and hook.dim == dim)
