"""What a checkpoint keeps of its forward, so that the recompute need not compute it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Operators of ``torch.ops.aten`` whose outputs ``"matmuls"`` keeps."""

Contexts = Callable[[], Any]
"""``context_fn`` of ``torch.utils.checkpoint.checkpoint``."""


def contexts_of(policy: Any) -> Contexts | None:
    """What a policy is to torch; None recomputes everything.

    Args:
        policy: See ``CheckpointPrimitive``.

    Raises:
        ValueError: no policy.
    """
    if policy is None:
        return None
    if policy == "matmuls":
        return partial(create_selective_checkpoint_contexts, [*_overloads()])
    if callable(policy):
        return partial(create_selective_checkpoint_contexts, policy)
    if isinstance(policy, (list, tuple)) and policy and all(isinstance(op, torch._ops.OpOverload) for op in policy):
        return partial(create_selective_checkpoint_contexts, list(policy))
    raise ValueError(
        f"policy is {policy!r}; give None, 'matmuls', a list of operators such as torch.ops.aten.mm.default, or a policy "
        "function of torch.utils.checkpoint"
    )


def _overloads() -> Iterator[Any]:
    for name in KEPT:
        packet = getattr(torch.ops.aten, name, None)  # some are new in torch
        if packet is not None:
            yield packet.default
