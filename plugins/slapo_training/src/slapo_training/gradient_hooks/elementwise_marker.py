"""Marks by which users declare a hook elementwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from slapo_core import UnknownNameError

_KIND = "_slapo_gradient_hook"
KINDS = ("elementwise", "whole")


def gradient_hook(hook: Callable[[Any], Any], kind: str = "whole") -> Callable[[Any], Any]:
    """Say how a hook of a parameter looks at the gradient, and give it back for ``Tensor.register_hook``.

    Without this a hook is taken to look at the whole gradient, which is right for each. An elementwise one costs no message:

        weight.register_hook(slapo.gradient_hook(lambda gradient: gradient.clamp(-1, 1), kind="elementwise"))

    Args:
        hook: For ``Tensor.register_hook`` or ``Tensor.register_post_accumulate_grad_hook``.
        kind: ``"elementwise"`` where each element is computed from the same element alone, alike at all places; such a hook
            gets the part of the reduced gradient that its rank has. ``"whole"`` for all others: masks, norms, slices.

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
    """Return whether a hook was said to be elementwise."""
    return getattr(hook, _KIND, None) == "elementwise"
