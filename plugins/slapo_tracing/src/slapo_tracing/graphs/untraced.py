"""Steps on a traced model that see the original modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from slapo_core import Schedule

from ..recording.module_hooks import rebind_wrappers
from .originals import as_original
from .traced_module import TracedModule, variants_of


@contextmanager
def as_untraced(schedule: Schedule) -> Iterator[None]:
    """Put the originals in place of traced modules in a ``with`` block; afterwards the traced ones are back, with the
    changes.

    The originals share attributes, parameters, submodules and hooks with the traced modules, so a step changes both. Modules
    with a rewritten graph stay. A module that the step replaced stays replaced.
    """
    top = schedule.root_module
    views: dict[nn.Module, nn.Module] = {}
    for module in top.modules():
        variants = variants_of(module)
        if isinstance(module, TracedModule) and variants is not None and not variants.is_rewritten and variants.inner is None:
            views[as_original(module)] = module
    for module in list(top.modules()) if views else ():
        schedule.touch(module)
    for view, module in views.items():
        schedule.share_metadata(module, view)
    if views:
        schedule.replace_modules({module: view for view, module in views.items()})
    try:
        yield
    finally:
        if views:
            schedule.replace_modules(views)
        for view, module in views.items():
            schedule.share_metadata(view, module)
            rebind_wrappers(module)
