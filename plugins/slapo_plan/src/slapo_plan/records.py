"""Records of the work of one rank: operators, collectives and messages between pipeline stages."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slapo_training import CollectiveRecord as CollectiveRecord


class OperatorRecord(NamedTuple):
    """One call of an operator on a device.

    Args:
        name: Name of the operator, e.g. ``"aten.mm"``; a causal attention ends in ``".causal"``.
        kind: ``"matmul"``, ``"attention"``, ``"convolution"`` or ``"pointwise"``; views are not recorded.
        dtype: Type in which it computes.
        flops: Floating-point operations; a multiply-add counts as two. 0 for ``"pointwise"``. A causal attention counts in
            full, as by torch's counter, though kernels skip about half.
        nbytes: Bytes read and written.
        shape: Sizes that decide its speed: ``(batch, m, n, k)`` for ``"matmul"``,
            ``(batch, heads, queries, keys, width)`` for ``"attention"``; otherwise empty.
        hooked: True if hooks see the tensors that it saves, as under a checkpoint.
        recomputed: True if it runs a second time, in a backward, what the forward has run.
    """

    name: str
    kind: str
    dtype: torch.dtype
    flops: int
    nbytes: int
    shape: tuple[int, ...] = ()
    hooked: bool = False
    recomputed: bool = False

    @property
    def model_flops(self) -> int:
        """Floating-point operations of the model itself: none of a recomputation, nor of scores of an attention's backward."""
        if self.recomputed:
            return 0
        return self.flops * 4 // 5 if self.kind == "attention" and "backward" in self.name else self.flops


Work = OperatorRecord | CollectiveRecord
"""An entry in the list of what a rank does, in order."""
