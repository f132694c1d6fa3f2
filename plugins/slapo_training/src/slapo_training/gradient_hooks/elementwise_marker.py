"""Marker by which users declare a hook elementwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from slapo_core import UnknownNameError

_KIND = "_slapo_gradient_hook"
KINDS = ("elementwise", "whole")


def gradient_hook(hook: Callable[[Any], Any], kind: str = "whole") -> Callable[[Any], Any]:
    """Declare how a hook reads the gradient; return the hook for ``Tensor.register_hook``.

    Without a declaration a hook gets the whole gradient, which is right for each hook. An elementwise hook costs no message:

        weight.register_hook(slapo.gradient_hook(lambda gradient: gradient.clamp(-1, 1), kind="elementwise"))

    Args:
        hook: Hook for ``Tensor.register_hook`` or ``Tensor.register_post_accumulate_grad_hook``.
        kind: ``"elementwise"`` if each element depends on the same element only, and equally at all positions; the hook then
            gets its rank's shard of the reduced gradient. ``"whole"`` for all other hooks: masks, norms, slices.

    Raises:
        UnknownNameError: no such kind.
    """
    if kind not in KINDS:
        raise UnknownNameError.of("kind", kind, KINDS)
    try:
        setattr(hook, _KIND, kind)
    except AttributeError:  # a method or a builtin
        hook = partial(hook)
        setattr(hook, _KIND, kind)
    return hook


def is_elementwise(hook: object) -> bool:
    return getattr(hook, _KIND, None) == "elementwise"
