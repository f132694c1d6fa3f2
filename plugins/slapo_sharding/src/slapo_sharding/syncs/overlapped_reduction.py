"""Values of which each rank uses its own part of the gradient, and where the sum of these starts in the backward.

    x -- wait -- start --- layers        forward: nothing, or a gather
          \\-- their weights --/          backward: data of the layers, start, their weights, wait

A column-parallel layer knows such a value (``column_forward``): it computes its weight's gradient while the sum is under way.
Of a gathered value it keeps this rank's part, and gathers that again while the first layer computes its input's gradient.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..communication import collectives
from ..communication._torch_autograd import saved_tensor_hook, swap_sequence_numbers


class InputSource(Protocol):
    """Where a weight's gradient has the layer's input from, given what the forward kept of it."""

    def start(self, kept: torch.Tensor) -> None:
        """One more layer will ask for it in this backward."""

    def whole(self, kept: torch.Tensor) -> torch.Tensor:
        """The input; differentiable while a graph of the backward is made."""

    def expect(self, dtype: torch.dtype) -> None:
        """One more layer of the forward computes in this dtype."""


class OverlappedReduction:
    """Of a value: what layers keep of it, and the node of autograd that starts the sum of its gradient.

    Args:
        value: The value; it is not kept.
        kept: Input or part that it was made from.
        source: Makes the value of that in the backward.
        held: What says how autograd saves tensors, if the value is found only where that is the same: a recompute that is
            given the value, or a copy of it, must keep as much as its forward did.
    """

    def __init__(self, value: torch.Tensor, kept: torch.Tensor, source: InputSource, held: Any = None) -> None:
        self.kept, self.source, self.held = kept, source, held
        self.node = value.grad_fn
        self.versions = value._version, kept._version

    def precede(self, weights: torch.Tensor) -> None:
        """What stands for a layer's weights takes its turn in the backward after the start, and before the wait."""
        if self.node is not None and weights.grad_fn is not None:
            swap_sequence_numbers(self.node, weights.grad_fn)


_ANY_SAVED_TENSOR_HOOK = object()
_reductions: Any = WeakIdKeyDictionary()


def reduction_of(x: torch.Tensor) -> OverlappedReduction | None:
    """What is known of ``x``, if it is such a value, unchanged, or all of one in another shape."""
    if not torch.is_grad_enabled():
        return None
    value = x if x in _reductions else x._base
    found: OverlappedReduction | None = None if value is None else _reductions.get(value)
    if value is None or found is None:
        return None
    if found.held is not _ANY_SAVED_TENSOR_HOOK and found.held is not saved_tensor_hook():
        return None
    if found.versions != (value._version, found.kept._version) or x.dtype != value.dtype:
        return None
    same = x.is_contiguous() and value.is_contiguous() and x.numel() == value.numel() and x.shape[-1] == value.shape[-1]
    return found if same else None


def with_reduced_gradient(x: torch.Tensor, group: collectives.Group) -> torch.Tensor:
    """``x``, its gradient summed over the group."""
    if torch.compiler.is_compiling():  # the compiler orders the backward itself
        return collectives.all_reduce_grad(x, group)
    value = collectives.all_reduce_grad(x, group, apart=True)
    if value is not x:
        _reductions[value] = OverlappedReduction(value, x, _SavedInput(group), _ANY_SAVED_TENSOR_HOOK)
    return value


def gather_with_overlap(x: torch.Tensor, dim: int, group: collectives.Group, size: int | None) -> torch.Tensor:
    """All parts of a value, of which each rank goes on to use its own."""
    apart = torch.is_grad_enabled() and not (torch.compiler.is_compiling() or x.is_inference())
    value = collectives.all_gather(x, dim, group, backward="reduce_scatter", size=size, apart=apart)
    if apart and value is not x:
        _reductions[value] = OverlappedReduction(
            value, x, _RegatheredInput(dim % x.dim(), group, value.size(dim)), saved_tensor_hook()
        )
    return value


class _SavedInput:
    """The input as it was kept."""

    def __init__(self, group: collectives.Group) -> None:
        self.group = group

    def start(self, kept: torch.Tensor) -> None:
        """It is there."""

    def whole(self, kept: torch.Tensor) -> torch.Tensor:
        """A gradient of a weight's gradient is this rank's part of the input's."""
        return collectives.all_reduce_grad(kept, self.group) if torch.is_grad_enabled() else kept

    def expect(self, dtype: torch.dtype) -> None:
        """It is kept in its own."""


class _RegatheredInput:
    """Gathers a part once more in the backward, once for all layers that use it.

    Args:
        dim: Dimension that is sharded.
        group: Ranks in the order of their shards.
        size: Of the whole along ``dim``.
    """

    def __init__(self, dim: int, group: collectives.Group, size: int) -> None:
        self.dim, self.group, self.size = dim, group, size
        self.dtypes: set[torch.dtype] = set()
        self.left = 0  # layers that have yet to ask
        self.sent: torch.Tensor | None = None
        self.known: torch.Tensor | None = None

    def expect(self, dtype: torch.dtype) -> None:
        """If all layers compute in one dtype, that is what is sent."""
        self.dtypes.add(dtype)

    def start(self, kept: torch.Tensor) -> None:
        """Send this rank's part, unless it is sent already."""
        if torch.is_grad_enabled():
            return
        self.left += 1
        if self.sent is None and self.known is None:
            (dtype,) = self.dtypes if len(self.dtypes) == 1 else (kept.dtype,)
            self.sent = collectives.start_all_gather(kept.to(dtype), self.dim, self.group, self.size)

    def whole(self, kept: torch.Tensor) -> torch.Tensor:
        """All parts, let go with the last layer that asks."""
        if torch.is_grad_enabled():
            return collectives.all_gather(kept, self.dim, self.group, backward="reduce_scatter", size=self.size)
        if self.sent is None and self.known is None:
            self.start(kept)
        if self.sent is not None:
            self.known, self.sent = collectives.wait_all_gather(self.sent, self.dim, self.group, self.size), None
        whole, self.left = self.known, self.left - 1
        assert whole is not None
        if not self.left:
            self.known = None
        return whole
