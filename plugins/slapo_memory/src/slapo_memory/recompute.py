"""Run a function without keeping its activations; the backward pass runs it again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from .arguments import Arguments
from .buffers import StartBuffers
from .randomness import RandomState

_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Keyword arguments that are torch's, not the function's."""


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """Checkpoint a model or part of the model.

    As ``torch.utils.checkpoint.checkpoint``, with these differences: the random states that Slapo tracks beside the
    default one, Python's and NumPy's are put back for the recompute too, keyword arguments reach ``function`` in both
    modes, and without gradients ``function`` is just called. What ``function`` itself changes, buffers of modules that
    it calls for one, changes again in the recompute; ``sch.checkpoint()`` takes care of the module's buffers.

    Args:
        function: What to run, and to run again in the backward pass.
        *args: Its positional arguments.
        use_reentrant: Torch's older implementation; it gives no gradients unless a tensor argument requires one.
        **kwargs: Its keyword arguments, and torch's options: ``preserve_rng_state``, and without ``use_reentrant``
            ``context_fn``, ``determinism_check``, ``debug``, ``early_stop``.

    Returns:
        What ``function`` returns.
    """
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    region = _Region(function, args, kwargs, options.get("preserve_rng_state", True))
    tensors = region.arguments.tensors
    return torch_checkpoint.checkpoint(region, *tensors, use_reentrant=use_reentrant, **options)


def checkpointed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward wrapper that ``sch.checkpoint()`` puts around a module; every keyword is the module's."""
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    region = _Region(call, args, kwargs, module=_module_of(call))
    return torch_checkpoint.checkpoint(region, *region.arguments.tensors, use_reentrant=False)


class _Region:
    """The function with its arguments: called once for the forward, and once for each recompute."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: bool = True,
        module: nn.Module | None = None,
    ) -> None:
        self.function = function
        self.arguments = Arguments(args, kwargs)
        self._original: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._random = RandomState() if preserve_rng_state else None
        self._buffers = StartBuffers(module)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._original is not None:  # the forward: what it does to its arguments, the caller sees
            (args, kwargs), self._original = self._original, None
            result = self.function(*args, **kwargs)
            self._buffers.keep_changed()
            return result
        args, kwargs = self.arguments.rebuild(tensors)
        with self._random.again() if self._random else nullcontext(), self._buffers.in_place():
            return self.function(*args, **kwargs)


def _module_of(call: Callable[..., Any]) -> nn.Module | None:
    """The module whose forward is innermost in ``call``; None for a forward that is no method."""
    inner: Any = call
    while isinstance(inner, partial):
        inner = inner.args[0]
    owner = getattr(inner, "__self__", inner)
    return owner if isinstance(owner, nn.Module) else None
