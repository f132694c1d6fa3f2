"""Steps on a traced model that see the original modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from ..recording.module_hooks import rebind_wrappers
from .traced_module import TracedModule, as_original, variants_of

if TYPE_CHECKING:
    from slapo_core import Schedule


@contextmanager
def as_untraced(schedule: Schedule) -> Iterator[None]:
    """Put the originals in place of traced modules in a ``with`` block; afterwards the traced ones are back, with the
    changes.

    The originals share attributes, parameters, submodules and hooks with the traced modules, so a step changes both. Modules
    with a rewritten graph stay. A module that the step replaced stays replaced.
    """
    root = schedule._root
    transaction = root.transaction
    assert transaction is not None, "only a step may change the model"
    views: dict[int, tuple[nn.Module, TracedModule]] = {}
    for module in list(root.module.modules()):
        variants = variants_of(module)
        if isinstance(module, TracedModule) and variants is not None and not variants.is_rewritten and variants.inner is None:
            views[id(module)] = (as_original(module), module)
    for module in root.module.modules() if views else ():
        transaction.touch(module)
    for view, module in views.values():
        if module in root.metadata:
            root.metadata[view] = root.metadata[module]
    _substitute_modules(schedule, {key: view for key, (view, _) in views.items()})
    try:
        yield
    finally:
        _substitute_modules(schedule, {id(view): module for view, module in views.values()})
        for view, module in views.values():
            if view in root.metadata:
                root.metadata[module] = root.metadata[view]
            rebind_wrappers(module)


def _substitute_modules(schedule: Schedule, others: dict[int, nn.Module]) -> None:
    root = schedule._root
    if not others:
        return
    root.holders.invalidate()
    for module in list(root.module.modules()):
        for name, child in module._modules.items():
            if id(child) in others:
                module._modules[name] = others[id(child)]
    root.module = others.get(id(root.module), root.module)
