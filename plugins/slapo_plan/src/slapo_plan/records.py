"""Records of the work of one rank: operators, collectives and messages between pipeline stages."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
    """

    name: str
    kind: str
    dtype: torch.dtype
    flops: int
    nbytes: int
    shape: tuple[int, ...] = ()


class CollectiveRecord(NamedTuple):
    """One collective, or one message of a pipeline, as one rank sees it.

    Args:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"``, ``"reduce"``,
            ``"gather"``, ``"scatter"`` or ``"send"``.
        nbytes: Bytes of the whole tensor on one rank: the reduced tensor, the gathered result, the input of a reduce-scatter
            or all-to-all, the message.
        ranks: Global ranks of the group, in order; the two ends of a message.
        overlapped: True if the rank goes on computing while it runs.
    """

    kind: str
    nbytes: int
    ranks: tuple[int, ...]
    overlapped: bool = False


Work = OperatorRecord | CollectiveRecord
"""An entry in the list of what a rank does, in order."""
