"""Cross entropy of logits whose vocabulary is sharded; no rank ever holds all of them."""

from __future__ import annotations

from typing import Any

import torch

from . import collectives


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
    """What ``torch.nn.functional.cross_entropy`` gives for the whole logits, from each rank's piece of them.

    Computed in float32 at least. Two reductions of one number per target, or three with label smoothing, cross the group;
    the logits are never gathered.

    Args:
        logits: ``(..., vocabulary / n)``: this rank's columns, in the order of the ranks, as many on each.
        target: ``(...)``: ids out of the whole vocabulary, the same on every rank.
        group: The ranks; None for one.
        ignore_index: Targets that do not count.
        label_smoothing: Share of the target that is spread over the vocabulary, 0 to 1.
        reduction: ``"mean"`` over the targets that count, ``"sum"`` or ``"none"``.
        vocab_size: Size of the vocabulary where the last columns of the whole logits are padding: these never count.

    Returns:
        The loss, the same on every rank, in the dtype of ``logits``; ``(...)`` for ``"none"``, else a scalar.

    Raises:
        ValueError: shapes that do not belong together, an unknown reduction, a smoothing outside of 0 to 1, or a padded
            vocabulary that is larger than the columns.
        IndexError: a target outside of the vocabulary.
    """
    ranks = collectives.num_ranks(group)
    whole = logits.shape[-1] * ranks
    size = whole if vocab_size is None else vocab_size
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"logits {list(logits.shape)} and target {list(target.shape)} differ in more than the vocabulary")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; 'mean', 'sum' and 'none' are known")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it lies between 0 and 1")
    if not 0 < size <= whole:
        raise ValueError(f"vocab_size is {size}, but there are {whole} columns on {ranks} ranks")
    counts = target != ignore_index
    if not torch.compiler.is_compiling() and bool((counts & ((target < 0) | (target >= size))).any()):
        raise IndexError(f"a target is outside of the vocabulary of {size} and is not ignore_index ({ignore_index})")
    losses: torch.Tensor = _CrossEntropy.apply(logits, target, counts, group, label_smoothing, size)  # type: ignore[no-untyped-call]
    if reduction == "mean":
        losses = losses.sum() / counts.sum()
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        counts: torch.Tensor,
        group: collectives.Group,
        smoothing: float,
        size: int,
    ) -> torch.Tensor:
        width = logits.shape[-1]
        start = width * (0 if group is None else group.rank())
        real = min(max(size - start, 0), width)  # the columns after these are padding
        values = logits[..., :real].to(torch.promote_types(logits.dtype, torch.float32))
        largest = values.amax(-1) if real else values.new_full(target.shape, -torch.inf)
        shifted = values - collectives.largest(largest, group).unsqueeze(-1)
        column = target - start
        owned = counts & (column >= 0) & (column < real)
        column = column.masked_fill(~owned, 0)
        picked = (
            shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~owned, 0) if real else torch.zeros_like(largest)
        )
        exponentials = shifted.exp()
        sums = torch.stack([exponentials.sum(-1), picked, shifted.sum(-1)][: 3 if smoothing else 2])
        sums = collectives.total(sums, group)
        losses = sums[0].log() - (1 - smoothing) * sums[1]
        if smoothing:
            losses = losses - smoothing / size * sums[2]
        ctx.save_for_backward(exponentials / sums[0].unsqueeze(-1), column, owned, counts)
        ctx.shares, ctx.width, ctx.dtype = (1 - smoothing, smoothing / size), width, logits.dtype
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
        return padded.to(ctx.dtype), None, None, None, None, None
