"""Views of traced modules as what they were traced from."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from torch import nn

from ..recording.module_hooks import HOOK_ATTRIBUTES, WRAPPER_ATTRIBUTES

if TYPE_CHECKING:
    from .traced_module import TracedModule
    from .variants import Variants


def module_before_trace(module: TracedModule, bare: bool = False) -> nn.Module:
    """Return a traced module as it was before, with its present attributes, parameters and submodules.

    With ``bare``, it has no hooks and wrappers, and an attribute dict of its own.
    """
    variants: Variants | None = module.__dict__.get("_variants")
    shell = variants.inner if variants is not None else None
    view: nn.Module = as_original(module) if shell is None else object.__new__(type(shell))
    if shell is not None or bare:
        view.__dict__ = {name: value for name, value in module.__dict__.items() if not bare or name not in WRAPPER_ATTRIBUTES}
        view.__dict__.update({name: OrderedDict() for name in HOOK_ATTRIBUTES if bare and name in view.__dict__})
    if shell is not None:
        view.__dict__.update(_graph=shell.graph, _variants=shell._variants)
    return view


def as_original(module: nn.Module, cls: type[nn.Module] | None = None) -> nn.Module:
    """Return a view of a module in the class it was traced from, which shares its attributes."""
    original: nn.Module = object.__new__(cls or module.__dict__.get("_traced_class", type(module)))
    object.__setattr__(original, "__dict__", module.__dict__)
    return original
