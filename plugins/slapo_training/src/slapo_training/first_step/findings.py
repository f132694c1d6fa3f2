"""Sentences about what the checks found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

Pair = tuple[float, float]
"""The loss of some rows, and the mean of the losses of their parts."""
_MOST_NAMES = 4
IN_FP16 = (
    "the model injects gradients into its backward, which the loss scale of precision='fp16' would not scale; use "
    "precision='bf16', or add the auxiliary loss to the loss"
)
"""Error where the loss is multiplied by a scale that does not reach the injected gradients."""
INNER_BACKWARD = (
    "gradients that the model injects are not seen behind torch.utils.checkpoint with use_reentrant=True, and weighted wrong; "
    "use use_reentrant=False"
)
"""Note where a backward cannot be run without the engine taking its gradients."""


class Cut(NamedTuple):
    """Parts that a batch is cut into.

    Args:
        microbatches: Number of micro-batches of each replica.
        replicas: Number of replicas.
    """

    microbatches: int
    replicas: int

    def __str__(self) -> str:
        number = f"{self.microbatches} micro-batch{'es' if self.microbatches > 1 else ''}"
        return f"{number} on {self.replicas} replica{'s' if self.replicas > 1 else ''}"


def loss_is_no_mean(pair: Pair, rows: int, cut: Cut) -> str:
    """Return the sentence that refuses a loss."""
    return (
        f"the loss is no mean over rows: it is {pair[0]:.6g} for {rows} rows, and the losses of their parts have the mean "
        f"{pair[1]:.6g}, so training in {cut} would minimise another loss than the whole batch's; use loss_over='replicas' "
        "with microbatches=1 for a loss that compares rows, loss_weights= for terms that are means over counts of their own, "
        "or one micro-batch on one replica; SLAPO_DISABLE_CHECKS=rows trains the mean over parts"
    )


def injected_is_no_mean(cut: Cut) -> str:
    """Return the sentence that warns of injected gradients, as of a balance loss of the statistics of a batch."""
    return (
        "the gradients that the model injects into its backward for some rows are not the mean of those for their parts, so "
        f"those of {cut} are others than the whole batch's; with one micro-batch on one replica they are of the whole batch"
    )


def rows_are_mixed(root: nn.Module, paths: Sequence[str], pair: Pair | None, cut: Cut, has_batch_norm: bool) -> str:
    """Return the sentence that warns of modules.

    Args:
        root: The model.
        paths: Paths of the modules; the empty one is the model's own forward.
        pair: The losses that differ, or None.
        cut: Into what a batch is cut.
        has_batch_norm: Whether some are BatchNorms.
    """
    named = dict(root.named_modules())
    shown = [_shown(path, named) for path in paths[:_MOST_NAMES]]
    more = [f"{len(paths) - _MOST_NAMES} more"] if len(paths) > _MOST_NAMES else []
    names = " and ".join([", ".join([*shown, *more][:-1]), [*shown, *more][-1]]) if len(paths) > 1 else shown[0]
    numbers = f" ({pair[0]:.6g} for a micro-batch, {pair[1]:.6g} for the mean of its parts)" if pair is not None else ""
    what = f"{names} mix{'es' if len(paths) == 1 else ''} the rows of a micro-batch"
    effect = f"training in {cut} gives another loss than the whole batch{numbers}"
    if not has_batch_norm:
        return f"{what}, so {effect}; one micro-batch on one replica mixes the rows of the whole batch"
    ways = []
    if cut.replicas > 1:
        ways.append("sch.sync_batch_norm() takes BatchNorm's statistics over all replicas")
    if cut.microbatches > 1:
        ways.append("BatchNorm's statistics are those of each micro-batch, and with microbatches=1 those of all of them")
    return f"{what}, so {effect}; {'; '.join(ways)}"


def _shown(path: str, named: dict[str, nn.Module]) -> str:
    kind = type(named[path]).__name__ if path in named else "module"
    return f"{kind} {path!r}" if path else f"the forward of {kind}"
