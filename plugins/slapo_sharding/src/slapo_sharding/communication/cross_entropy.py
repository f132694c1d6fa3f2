"""Cross entropy of logits that are sharded along the vocabulary, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_tracing.nodes import has_values

from . import collectives
from .shard_ranges import shard_range


def parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: collectives.Group = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Compute ``torch.nn.functional.cross_entropy`` of the full logits from each rank's shard of them.

    It computes in float32 at least. Two numbers per target are reduced over the group, three with label smoothing; the logits
    are never gathered.

    Args:
        logits: ``(..., vocabulary / n)``: this rank's columns, in the order of the ranks. All ranks have the same number, or,
            with ``vocab_size``, the last ranks fewer, as ``torch.chunk`` splits.
        target: ``(...)``: global ids, the same on every rank.
        group: The ranks; None for one.
        ignore_index: Targets that do not count.
        label_smoothing: Weight of the uniform distribution in the target, 0 to 1.
        reduction: ``"mean"`` over the targets that count, ``"sum"`` or ``"none"``.
        vocab_size: Size of the vocabulary if the ranks do not divide it. If all ranks have the same number of columns all the
            same, the last columns of the full logits are padding, which never counts.

    Returns:
        The loss, the same on every rank, in the dtype of ``logits``; ``(...)`` for ``"none"``, else a scalar.

    Raises:
        TypeError: ``group`` is not a process group.
        ValueError: shapes that do not fit together, an unknown reduction, a smoothing outside 0 to 1, a vocabulary that is
            larger than the columns, or different numbers of columns on the ranks without ``vocab_size``.
        IndexError: a target outside the vocabulary.
    """
    if not isinstance(group, collectives.Group):
        raise TypeError(f"group is {group!r}; give a process group or None, and what follows by name, as vocab_size=")
    ranks = collectives.num_ranks(group)
    width, rank = logits.shape[-1], 0 if group is None else group.rank()
    size = width * ranks if vocab_size is None else vocab_size
    part, (low, high) = -(-size // ranks), shard_range(size, ranks, rank)
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"logits {list(logits.shape)} and target {list(target.shape)} differ in more than the vocabulary")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; use 'mean', 'sum' or 'none'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; give a number from 0 to 1")
    if vocab_size is not None and (size <= 0 or (width < part and width != high - low)):
        raise ValueError(f"vocab_size is {size}, but there are {width} columns on rank {rank} of {ranks}")
    start = rank * max(width, part)
    real = min(max(size - start, 0), width)  # the columns after these are padding
    highest = _row_maxima(logits.detach()[..., :real], width, group, same=vocab_size is None)
    counts = target != ignore_index
    outside = counts & ((target < 0) | (target >= size))
    if not torch.compiler.is_compiling() and has_values(outside) and bool(outside.any()):  # an estimate's may have none
        raise IndexError(f"a target is outside of the vocabulary of {size} and is not ignore_index ({ignore_index})")
    column = target - start
    losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, highest, column, counts, group, label_smoothing, (real, size)
    )
    if reduction == "mean":
        losses = losses.sum() / counts.sum()
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(logits.dtype)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    group: collectives.Group = None,
    *,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the loss of each target: the established name of ``parallel_cross_entropy`` without a reduction.

    Args:
        vocab_parallel_logits: ``(..., vocabulary / n)``: this rank's columns.
        target: ``(...)``: global ids, the same on every rank.
        label_smoothing: Weight of the uniform distribution in the target.
        group: The ranks; None is the whole world, as in torch.
        ignore_index: Targets whose loss is 0.
    """
    ranks = dist.group.WORLD if group is None and dist.is_initialized() else group
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "reduction": "none"}
    return parallel_cross_entropy(vocab_parallel_logits, target, ranks, **options)


class ParallelCrossEntropy(nn.Module):
    """Module that returns ``vocab_parallel_cross_entropy``, the loss of each target.

    Args:
        group: The ranks; None is the whole world, as in torch.
    """

    def __init__(self, group: collectives.Group = None) -> None:
        super().__init__()
        self.group = group

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Map ``(..., vocabulary / n)`` and ``(...)`` to ``(...)``; its mean is the value of ``cross_entropy``."""
        return vocab_parallel_cross_entropy(outputs, labels, group=self.group)


def _row_maxima(values: torch.Tensor, width: int, group: collectives.Group, same: bool) -> torch.Tensor:
    """Return the highest logit of each row over all ranks; the same reduction compares their numbers of columns."""
    highest = values.amax(-1) if values.shape[-1] else values.new_full(values.shape[:-1], -torch.inf)
    highest = highest.to(torch.promote_types(values.dtype, torch.float32))
    all_highest = collectives.max_over_ranks(torch.cat([highest.flatten(), highest.new_tensor([width, -width])]), group)
    is_checked = same and not torch.compiler.is_compiling() and has_values(all_highest)
    if is_checked and bool(all_highest[-2] != -all_highest[-1]):
        most, fewest = int(all_highest[-2]), -int(all_highest[-1])
        raise ValueError(f"the ranks have from {fewest} to {most} columns; give vocab_size=, the size of the whole vocabulary")
    return all_highest[:-2].view_as(highest)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        highest: torch.Tensor,
        column: torch.Tensor,
        counts: torch.Tensor,
        group: collectives.Group,
        smoothing: float,
        sizes: tuple[int, int],
    ) -> torch.Tensor:
        real, size = sizes
        values = logits[..., :real].to(highest.dtype)
        shifted = values - highest.unsqueeze(-1)
        owned = counts & (column >= 0) & (column < real)
        column = column.masked_fill(~owned, 0)
        picked = torch.zeros_like(highest)
        if real:
            picked = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~owned, 0)
        exponentials = shifted.exp()
        sums = torch.stack([exponentials.sum(-1), picked, shifted.sum(-1)][: 3 if smoothing else 2])
        sums = collectives.sum_over_ranks(sums, group)
        losses = sums[0].log() - (1 - smoothing) * sums[1]
        if smoothing:
            losses = losses - smoothing / size * sums[2]
        ctx.save_for_backward(exponentials / sums[0].unsqueeze(-1), column, owned, counts)
        ctx.shares, ctx.width, ctx.dtype = (1 - smoothing, smoothing / size), logits.shape[-1], logits.dtype
        return losses.masked_fill(~counts, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, column, owned, counts = ctx.saved_tensors
        hit, spread = ctx.shares
        local = softmax - spread
        if local.shape[-1]:
            local = local.scatter_add(-1, column.unsqueeze(-1), (owned * -hit).to(local.dtype).unsqueeze(-1))
        local = local * grad.masked_fill(~counts, 0).unsqueeze(-1)
        padded = torch.nn.functional.pad(local, (0, ctx.width - local.shape[-1]))
        return padded.to(ctx.dtype), None, None, None, None, None, None
