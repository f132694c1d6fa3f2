"""The private names of torch that this package uses; a test fails when torch moves one."""

from __future__ import annotations

from typing import Any

import torch


def nll_mean_of(loss: torch.Tensor) -> tuple[int, int] | None:
    """Over how many labels a loss is a mean, and the label it leaves out, as ``cross_entropy`` and ``nll_loss`` keep it for
    their backward, or as another's ``grad_fn.label_mean`` says, its labels and the one left out.

    None where that does not tell, as for a weighted mean, or for what is unpacked, and so may run, only once.
    """
    node = loss.grad_fn
    if (told := getattr(node, "label_mean", None)) is not None:
        return int((told[0] != told[1]).sum()), told[1]
    if node is None or node.name() not in ("NllLossBackward0", "NllLoss2DBackward0"):
        return None
    kept: Any = node
    target, weight, ignored = kept._raw_saved_target, kept._raw_saved_weight, kept._saved_ignore_index
    if target.unpack_hook is not None or weight.data is not None or kept._saved_reduction != _MEAN:
        return None
    ignored -= 2**64 if ignored >= 2**63 else 0  # torch gives it as if it had no sign
    return int((target.data != ignored).sum()), ignored


_MEAN = 1
"""How torch numbers ``reduction="mean"``."""
