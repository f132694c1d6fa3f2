"""Private names of torch that need no DTensor import; the others are in ``_torch_private``. Plugin discovery imports this."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

no_functions = torch._C.DisableTorchFunction
"""Context in which no ``TorchFunctionMode`` and no subclass sees torch functions."""


preserve_versions = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
"""Context after which tensors have their former version counters, as if they had not been written to in place."""


def swap_sequence_numbers(start: Any, weights: Any) -> None:
    """Let the autograd node ``weights`` run in a backward after ``start``, which was recorded earlier.

    Autograd runs the ready node with the highest sequence number first. A torch without settable numbers keeps its order.
    """
    if hasattr(start, "_set_sequence_nr"):
        earlier, later = start._sequence_nr(), weights._sequence_nr()
        if earlier < later:
            start._set_sequence_nr(later)
            weights._set_sequence_nr(earlier)


def saved_tensor_hook() -> Any:
    """Return the innermost hook for tensors that autograd saves now, such as a checkpoint's; None if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def is_batched(x: torch.Tensor) -> bool:
    """Return whether ``x`` is a batch of tensors under ``vmap``."""
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)


@contextmanager
def watched_functions(observe: Callable[[Any, tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Call ``observe(function, args, result)`` after each call of an autograd function in the block, except checkpoints.

    The patch is below ``Function.apply``, because models keep that bound, as in ``swish = Swish.apply``.
    """
    plain = vars(_SingleLevelFunction).get("apply")

    def apply(cls: Any, *args: Any) -> Any:
        call = plain.__get__(None, cls) if plain else super(_SingleLevelFunction, cls).apply
        result = call(*args)
        if not issubclass(cls, CheckpointFunction):
            observe(cls, args, result)
        return result

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if plain is None:
            del _SingleLevelFunction.apply  # type: ignore[attr-defined]
        else:
            _SingleLevelFunction.apply = plain  # type: ignore[attr-defined]
