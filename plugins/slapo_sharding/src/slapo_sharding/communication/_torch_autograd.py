"""Private names of torch without DTensor, which finding the plugin must not import; the others are in ``_torch_private``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

no_functions = torch._C.DisableTorchFunction
"""A context in which no code but torch's own sees torch functions."""


preserve_versions = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
"""A context after which one or several tensors count as not written to in place, whatever was set to what it was."""


def swap_sequence_numbers(start: Any, weights: Any) -> None:
    """Let ``weights`` have its turn in a backward after ``start``, a node of autograd that was recorded before it.

    Of the nodes that are ready the one with the highest number runs first. Where torch has no numbers to set, the turns stay as
    they are.
    """
    if hasattr(start, "_set_sequence_nr"):
        earlier, later = start._sequence_nr(), weights._sequence_nr()
        if earlier < later:
            start._set_sequence_nr(later)
            weights._set_sequence_nr(earlier)


def saved_tensor_hook() -> Any:
    """Return the hook for tensors that autograd saves now, inside of a checkpoint, say; None outside of all."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def is_batched(x: torch.Tensor) -> bool:
    """Return whether ``x`` is many tensors that ``vmap`` computes with at once."""
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)


@contextmanager
def watched_functions(told: Callable[[Any, tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Call ``told(function, args, result)`` after each call of an autograd function in the block, but for recomputation.

    A function is met below ``Function.apply``, which models keep bound, as ``swish = Swish.apply``.
    """
    plain = vars(_SingleLevelFunction).get("apply")

    def apply(cls: Any, *args: Any) -> Any:
        call = plain.__get__(None, cls) if plain else super(_SingleLevelFunction, cls).apply
        result = call(*args)
        if not issubclass(cls, CheckpointFunction):
            told(cls, args, result)
        return result

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if plain is None:
            del _SingleLevelFunction.apply  # type: ignore[attr-defined]
        else:
            _SingleLevelFunction.apply = plain  # type: ignore[attr-defined]
