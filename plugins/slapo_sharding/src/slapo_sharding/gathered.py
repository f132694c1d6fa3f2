"""What a gather of a split sequence returns: layers keep this rank's part of it for the backward, and gather it again there.

As long as it is unchanged, column-parallel layers take the gathered value for a use of the part. In the backward it is gathered
while the first of them computes its input's gradient, and that gradient reduced and scattered while one computes its weight's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import collectives

_GATHERED = "_slapo_gathered"


class Again:
    """Gathers a part once more in the backward, once for all layers that use it.

    Args:
        dim: Dimension that is sharded.
        group: Ranks in the order of their shards.
        size: Of the whole along ``dim``.
    """

    __slots__ = ("dim", "dtype", "group", "known", "left", "sent", "size", "users")  # none of it is state of the model

    def __init__(self, dim: int, group: collectives.Group, size: int) -> None:
        self.dim, self.group, self.size = dim, group, size
        self.users = self.left = 0
        self.dtype: torch.dtype | None = None
        self.sent: torch.Tensor | None = None
        self.known: torch.Tensor | None = None

    def expect(self, dtype: torch.dtype) -> None:
        """One more layer will ask, and compute in this dtype; if all do in one, that is what is sent."""
        self.dtype = dtype if not self.users or self.dtype == dtype else None
        self.users += 1

    def start(self, kept: torch.Tensor) -> None:
        """Send this rank's part, unless it is sent already."""
        if not torch.is_grad_enabled() and self.sent is None and self.known is None:
            self.sent = collectives.send(kept.to(self.dtype or kept.dtype), self.dim, self.group, self.size)
            self.left = self.users

    def whole(self, kept: torch.Tensor) -> torch.Tensor:
        """All parts; differentiable while a graph of the backward is made."""
        if torch.is_grad_enabled():
            return collectives.all_gather(kept, self.dim, self.group, backward="reduce_scatter", size=self.size)
        self.start(kept)
        if self.sent is not None:
            self.known, self.sent = collectives.received(self.sent, self.dim, self.group, self.size), None
        whole, self.left = self.known, self.left - 1
        assert whole is not None
        if not self.left:
            self.known = None
        return whole


class Gathered:
    """Of a gathered value: what it was gathered from.

    Args:
        whole: The value; it is not kept.
        part: This rank's, of which it was gathered.
        again: Gathers it once more.
    """

    def __init__(self, whole: torch.Tensor, part: torch.Tensor, again: Again) -> None:
        self.part, self.again = part, again
        self.versions = whole._version, part._version
        self.entered: torch.Tensor | None = None

    def enter(self, x: torch.Tensor, between: Callable[[], None]) -> torch.Tensor:
        """The value for a layer; ``between`` records what stands for the layer's weight."""
        if self.entered is None:
            self.entered = collectives.gathered_around(self.part, x, self.again.dim, self.again.group, between)
        else:
            between()
        return self.entered


def gather(x: torch.Tensor, dim: int, group: collectives.Group, size: int | None) -> torch.Tensor:
    """All parts of a value of which each rank goes on to use its own; what layers make of it, see above."""
    whole = collectives.all_gather(x, dim, group, backward="reduce_scatter", size=size)
    if whole is not x and torch.is_grad_enabled() and not (torch.compiler.is_compiling() or x.is_inference()):
        again = Again(dim % x.dim(), group, whole.size(dim))
        whole.__dict__[_GATHERED] = Gathered(whole, x, again)
    return whole


def of(x: torch.Tensor) -> Gathered | None:
    """What ``x`` was gathered from, if it is such a value, unchanged, or all of one in another shape."""
    whole = x if _GATHERED in x.__dict__ else x._base
    found: Gathered | None = None if whole is None else whole.__dict__.get(_GATHERED)
    if whole is None or found is None or not torch.is_grad_enabled():
        return None
    if found.versions != (whole._version, found.part._version) or x.dtype != whole.dtype:
        return None
    same = x.is_contiguous() and whole.is_contiguous() and x.numel() == whole.numel() and x.shape[-1] == whole.shape[-1]
    return found if same else None
