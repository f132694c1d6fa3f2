"""Values whose partial gradient is reduced in the backward, overlapped with the gradients of weights.

    x -- wait -- start --- layers        forward: nothing, or a gather
          \\-- their weights --/          backward: inputs of the layers, start, their weights, wait

A column-parallel layer looks up whether its input is such a value (``overlapped_linear``). For a gathered value it saves this
rank's shard, and the shard is gathered again while the first layer computes its input's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..communication import collectives
from ..communication._torch_autograd import saved_tensor_hook, swap_sequence_numbers


class InputSource:
    """Source of a layer's input for its weight's gradient, from the tensor that the forward saved: here the input itself.

    Args:
        group: Ranks that each use the input for their own shards.
    """

    def __init__(self, group: collectives.Group) -> None:
        self.group = group

    def start_gather(self, saved: torch.Tensor) -> None:
        """Announce that one more layer will ask for the input in this backward."""

    def input(self, saved: torch.Tensor) -> torch.Tensor:
        """Return the input; in a recorded backward it is differentiable, and its gradient, which is partial, is reduced."""
        return collectives.all_reduce_grad(saved, self.group) if torch.is_grad_enabled() else saved

    def add_dtype(self, dtype: torch.dtype) -> None:
        """Record the dtype in which a layer of the forward computes."""


class OverlappedReduction:
    """Record of a value: the tensor that layers save instead, and the autograd node that starts the reduction.

    Args:
        value: The value; no reference is kept.
        saved: Input or shard that the value was made from.
        source: Makes the value from ``saved`` in the backward.
        saved_hook: Saved-tensor hook under which the value was made. The record is found only under the same hook, because a
            recomputation that is given the value, or a copy, must save as many tensors as its forward did.
    """

    def __init__(self, value: torch.Tensor, saved: torch.Tensor, source: InputSource, saved_hook: Any = None) -> None:
        self.saved, self.source, self.saved_hook = saved, source, saved_hook
        self.node = value.grad_fn
        self.versions = value._version, saved._version

    def run_before(self, weights: torch.Tensor) -> None:
        """Let the start node run in the backward before the node that computes a layer's weight gradients."""
        if self.node is not None and weights.grad_fn is not None:
            swap_sequence_numbers(self.node, weights.grad_fn)


_ANY_SAVED_TENSOR_HOOK = object()
_reductions: Any = WeakIdKeyDictionary()


def reduction_of(x: torch.Tensor) -> OverlappedReduction | None:
    """Return the record of ``x``, or of the value that ``x`` is a full view of; None if the value was modified since."""
    if not torch.is_grad_enabled():
        return None
    value = x if x in _reductions else x._base
    found: OverlappedReduction | None = None if value is None else _reductions.get(value)
    if value is None or found is None:
        return None
    if found.saved_hook is not _ANY_SAVED_TENSOR_HOOK and found.saved_hook is not saved_tensor_hook():
        return None
    if found.versions != (value._version, found.saved._version) or x.dtype != value.dtype:
        return None
    same = x.is_contiguous() and value.is_contiguous() and x.numel() == value.numel() and x.shape[-1] == value.shape[-1]
    return found if same else None


def with_reduced_gradient(x: torch.Tensor, group: collectives.Group) -> torch.Tensor:
    """Return ``x``, with its gradient summed over the group."""
    if torch.compiler.is_compiling():  # the compiler orders the backward itself
        return collectives.all_reduce_grad(x, group)
    value = collectives.all_reduce_grad(x, group, split_backward=True)
    if value is not x:
        _reductions[value] = OverlappedReduction(value, x, InputSource(group), _ANY_SAVED_TENSOR_HOOK)
    return value


def gather_with_overlap(x: torch.Tensor, dim: int, group: collectives.Group, size: int | None) -> torch.Tensor:
    """All-gather a value that each rank uses for its own shards; the gradient is reduce-scattered."""
    overlaps = torch.is_grad_enabled() and not (torch.compiler.is_compiling() or x.is_inference())
    value = collectives.all_gather(x, dim, group, backward="reduce_scatter", size=size, split_backward=overlaps)
    if overlaps and value is not x:
        source = _RegatheredInput(dim % x.dim(), group, value.size(dim))
        _reductions[value] = OverlappedReduction(value, x, source, saved_tensor_hook())
    return value


class _RegatheredInput(InputSource):
    """Source that gathers a saved shard again in the backward, once for all layers that use it.

    Args:
        dim: Dimension that is sharded.
        group: Ranks in the order of their shards.
        size: Size of the gathered input along ``dim``.
    """

    def __init__(self, dim: int, group: collectives.Group, size: int) -> None:
        super().__init__(group)
        self.dim, self.size = dim, size
        self.dtypes: set[torch.dtype] = set()
        self.num_waiting = 0  # layers that have yet to ask
        self.started: torch.Tensor | None = None
        self.gathered: torch.Tensor | None = None

    def add_dtype(self, dtype: torch.dtype) -> None:
        """Record a dtype; if all layers compute in the same one, the shard is sent in it."""
        self.dtypes.add(dtype)

    def start_gather(self, saved: torch.Tensor) -> None:
        """Start the all-gather, unless it was started already."""
        if torch.is_grad_enabled():
            return
        self.num_waiting += 1
        if self.started is None and self.gathered is None:
            (dtype,) = self.dtypes if len(self.dtypes) == 1 else (saved.dtype,)
            self.started = collectives.start_all_gather(saved.to(dtype), self.dim, self.group, self.size)

    def input(self, saved: torch.Tensor) -> torch.Tensor:
        """Return the gathered input; the last layer that asks releases it."""
        if torch.is_grad_enabled():
            return collectives.all_gather(saved, self.dim, self.group, backward="reduce_scatter", size=self.size)
        if self.started is None and self.gathered is None:
            self.start_gather(saved)
        if self.started is not None:
            self.gathered, self.started = collectives.wait_all_gather(self.started, self.dim, self.group, self.size), None
        full, self.num_waiting = self.gathered, self.num_waiting - 1
        assert full is not None
        if not self.num_waiting:
            self.gathered = None
        return full


class SharedGradientReduction:
    """Shared reduction of the partial gradients of several modules that take the same tensor.

    The tensors are compared when the modules run. A tensor that no other module took has its own reduction, so the gradients
    are right whatever the modules take.

    Args:
        group: The ranks that each have a partial gradient.
        members: Number of modules; the tensor is released when all have taken it.
    """

    __slots__ = ("current", "group", "is_shared", "members", "num_left")  # no ``__dict__``: nothing here is model state

    def __init__(self, group: collectives.Group, members: int) -> None:
        self.group, self.members = group, members
        self.num_left = 0
        self.is_shared = False  # True once all modules have taken one tensor, unchanged
        self.current: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def with_shared_reduction(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with a reduced gradient: the same tensor for each module while ``x`` is the same and unchanged."""
        compiling = torch.compiler.is_compiling()
        if compiling and not self.is_shared:  # a compiled graph has no version counters to tell that x is unchanged
            return collectives.all_reduce_grad(x, self.group)
        version = 0 if compiling else x._version
        if self.current is None or self.current[0] is not x or self.current[1] != version:
            self.current, self.num_left = (x, version, with_reduced_gradient(x, self.group)), self.members
        taken = self.current[2]
        self.num_left -= 1
        if self.num_left == 0:
            self.current, self.is_shared = None, True
        return taken
