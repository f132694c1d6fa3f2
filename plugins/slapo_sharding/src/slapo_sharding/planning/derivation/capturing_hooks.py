"""Support for the forward hooks with which Transformers' models collect hidden states and attentions."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_LIBRARY, _MODELS = "transformers.utils.output_capturing", "transformers.modeling_utils"
_INSTALLED = "_output_capturing_hooks_installed"


@contextmanager
def recorded_captures(model: nn.Module) -> Iterator[None]:
    """Record in a trace what these hooks append, and the layers that they are on.

    A model installs them on its layers in its first call. They do nothing in a call that does not ask for their output. A
    graph therefore serves calls that ask for the same output.
    """
    pretrained = _outermost_pretrained(model) if {_LIBRARY, _MODELS} <= sys.modules.keys() else []
    before = {module: dict(module._forward_hooks) for module in model.modules()} if pretrained else {}
    marked = {module for module in before if _INSTALLED in vars(module)}
    hooks = list[Any]()
    held = {inner for module in marked for inner in module.modules()}
    try:
        for each in pretrained:
            sys.modules[_LIBRARY].maybe_install_capturing_hooks(each)
        for module in held:  # Transformers installs them again, beside those of the first call
            _remove_hooks(module, before[module])
        hooks += {hook for module in before for hook in module._forward_hooks.values() if _is_new(hook)}
        for hook in hooks:
            hook.traced = True
        yield
    finally:
        for hook in hooks:
            del hook.traced
        for module, kept in before.items():
            _remove_hooks(module, kept)
            if module not in marked:
                vars(module).pop(_INSTALLED, None)


def _remove_hooks(module: nn.Module, kept: Collection[int]) -> None:
    """Remove the hooks of a module whose keys are not in ``kept``."""
    for key in module._forward_hooks.keys() - kept:
        del module._forward_hooks[key]


def _is_new(hook: Any) -> bool:
    """Return whether a hook is a capturing hook that no enclosing ``recorded_captures`` records."""
    return getattr(hook, "__module__", "") == _LIBRARY and not hasattr(hook, "traced")


def _outermost_pretrained(model: nn.Module) -> list[nn.Module]:
    """Return the Transformers models that no other one contains."""
    if isinstance(model, sys.modules[_MODELS].PreTrainedModel):
        return [model]
    return [each for child in model.children() for each in _outermost_pretrained(child)]
